"""Models are found, merged and recognised: shards of several ranks, LoRA adapters, folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from verl.agentopsd.config import TINY_MODEL
from verl.agentopsd.evaluation.checkpoint import CheckpointError, find_model, model_hash
from verl.agentopsd.evaluation.checkpoint_merge import fold_lora, materialize, read_shards


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def save_sharded(state: dict[str, torch.Tensor], actor: Path, ranks: int) -> None:
    """Writes ``state`` as FSDP2 would on so many ranks: rows of every tensor are shared out, unevenly if need be."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    actor.mkdir(parents=True)
    shutil.copytree(TINY_MODEL, actor / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
            shards = {}
            for name, tensor in state.items():
                parts = list(tensor.chunk(ranks)) + [tensor[:0]] * ranks
                local = parts[rank].clone()
                shards[name] = DTensor.from_local(
                    local, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
                )
            torch.save(shards, actor / f"model_world_size_{ranks}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a checkpoint of three ranks; its weights are the shipped model's, times 1.001."""
    run = tmp_path_factory.mktemp("runs") / "run"
    actor = run / "checkpoints" / "global_step_4" / "actor"
    save_sharded({name: tensor * 1.001 for name, tensor in weights(TINY_MODEL).items()}, actor, ranks=3)
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    return run


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/global_step_4", "checkpoints/global_step_4/actor"])
def test_a_run_is_found_by_any_of_its_folders(checkpoint: Path, below: str):
    source = find_model(str(checkpoint / below))
    assert (source.kind, source.name, source.step) == ("shards", "run-step4", 4)
    assert source.path == str(checkpoint / "checkpoints" / "global_step_4" / "actor")


def test_shards_are_put_together_in_full_precision(checkpoint: Path):
    merged = weights(materialize(find_model(str(checkpoint)), "float32"))
    expected = weights(TINY_MODEL)
    assert merged.keys() == expected.keys()
    assert all(torch.equal(merged[name], expected[name] * 1.001) for name in expected)


def test_verl_s_own_merger_gives_the_same_rounded(checkpoint: Path):
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    actor = checkpoint / "checkpoints" / "global_step_4" / "actor"
    merger = FSDPModelMerger(
        ModelMergerConfig("merge", "fsdp", local_dir=str(actor), hf_model_config_path=str(actor / "huggingface"))
    )
    theirs = merger._load_and_merge_state_dicts(3, 3, (3,), ("fsdp",))
    ours = read_shards(actor)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name].bfloat16()) for name in ours)


def test_a_merged_model_is_a_whole_one_and_is_made_once(checkpoint: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = find_model(str(checkpoint))
    folder = materialize(source, "float32")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.float32
    assert (
        AutoTokenizer.from_pretrained(folder).chat_template == AutoTokenizer.from_pretrained(TINY_MODEL).chat_template
    )
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert (materialize(source, "float32") / "model.safetensors").stat().st_mtime_ns == made
    assert materialize(source, "bfloat16") != folder
    shard = next(Path(source.path).glob("*rank_0.pt"))
    shard.touch()  # trained again
    assert (materialize(source, "float32") / "model.safetensors").stat().st_mtime_ns > made
    assert not list(Path(source.path).glob(".merged*"))


def test_a_missing_rank_is_named(checkpoint: Path, tmp_path: Path):
    actor = tmp_path / "actor"
    shutil.copytree(checkpoint / "checkpoints" / "global_step_4" / "actor", actor)
    (actor / "model_world_size_3_rank_1.pt").unlink()
    with pytest.raises(CheckpointError, match="lacks the shard of rank 1 of 3"):
        find_model(str(actor))


def test_a_model_with_too_few_tensors_is_refused_and_leaves_nothing(tmp_path: Path):
    state = weights(TINY_MODEL)
    name = sorted(state)[-1]
    state.pop(name)
    save_sharded(state, tmp_path / "actor", ranks=1)
    with pytest.raises(CheckpointError, match=f"lacks 1 tensors of the model, the first is {name}"):
        materialize(find_model(str(tmp_path / "actor")), "float32")
    assert not [entry for entry in (tmp_path / "actor").iterdir() if "merged" in entry.name]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "is neither a Hugging Face model"),
        (["config.json"], "has a config.json but no weights"),
        (["config.yaml", "versions.json"], "has no checkpoint yet"),
        (["actor/optim_world_size_1_rank_0.pt"], "the checkpoint is not complete"),
    ],
)
def test_what_is_no_model_says_what_is_missing(tmp_path: Path, files: list[str], message: str):
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=message):
        find_model(str(tmp_path))


def test_a_name_may_be_on_the_hub_but_a_missing_path_is_not():
    assert find_model("Qwen/Qwen2.5-3B-Instruct").kind == "hub"
    for path in ("/no/where", "./no", "../no", "a/b/c"):
        with pytest.raises(CheckpointError, match="no model at"):
            find_model(path)


def lora_model(seed: int = 0):
    """The shipped model with a random adapter on two kinds of layers."""
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.1
    return adapted


def merged_by_peft(adapted) -> dict[str, torch.Tensor]:
    return dict(adapted.merge_and_unload().state_dict())


def test_an_adapter_in_a_checkpoint_is_merged_as_peft_merges_it(tmp_path: Path):
    adapted = lora_model()
    save_sharded({name: tensor.clone() for name, tensor in adapted.state_dict().items()}, tmp_path / "actor", ranks=2)
    with pytest.raises(CheckpointError, match=r"no lora_train_meta\.json"):
        materialize(find_model(str(tmp_path / "actor")), "float32")
    (tmp_path / "actor" / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 12}))
    merged, expected = weights(materialize(find_model(str(tmp_path / "actor")), "float32")), merged_by_peft(adapted)
    assert any(not torch.equal(merged[name], tensor) for name, tensor in weights(TINY_MODEL).items())
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)


def test_an_adapter_that_was_saved_alone_finds_its_base_in_the_run_s_configuration(tmp_path: Path):
    adapted = lora_model(seed=1)
    actor = tmp_path / "run" / "checkpoints" / "global_step_2" / "actor"
    save_sharded({n: t.clone() for n, t in adapted.state_dict().items() if "lora_" in n}, actor, ranks=1)
    (actor / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 12}))
    with pytest.raises(CheckpointError, match=r"its run's config\.yaml, with the base, is gone"):
        materialize(find_model(str(actor)), "float32")
    (tmp_path / "run" / "config.yaml").write_text(f"actor_rollout_ref: {{model: {{path: {TINY_MODEL}}}}}\n")
    merged, expected = weights(materialize(find_model(str(actor)), "float32")), merged_by_peft(adapted)
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)


def test_an_adapter_s_own_folder(tmp_path: Path):
    adapted = lora_model(seed=2)
    adapted.save_pretrained(tmp_path / "adapter")
    source = find_model(str(tmp_path / "adapter"))
    assert source.kind == "adapter"
    merged, expected = weights(materialize(source, "float32")), merged_by_peft(adapted)
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6)


def test_adapters_that_cannot_be_merged_are_refused():
    matrix = torch.ones(2, 2)
    with pytest.raises(CheckpointError, match="only plain LoRA can"):
        fold_lora({"base_model.model.a.lora_magnitude_vector.default.weight": matrix}, 1.0)
    with pytest.raises(CheckpointError, match="the adapter of a lacks its layer"):
        fold_lora({"a.lora_A.weight": matrix, "a.lora_B.weight": matrix}, 1.0)


def test_the_hash_is_of_what_decides(tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(TINY_MODEL, copy)
    (copy / "README.md").write_text("other words")
    assert model_hash(copy) == model_hash(TINY_MODEL)
    (copy / "chat_template.jinja").write_text("other words")
    assert model_hash(copy) != model_hash(TINY_MODEL)
