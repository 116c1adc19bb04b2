"""Every preset composes with every method and back end, passes verl's checks and ours, and has its promised numbers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl.agentopsd import config as config_module
from verl.agentopsd.config import TINY_MODEL, ConfigError, data_parallel_size, dynamic_row_limit
from verl.agentopsd.doctor import resources
from verl.agentopsd.doctor.examine import examine
from verl.agentopsd.doctor.finding import Level
from verl.agentopsd.main import compose_config, config_group, prepare, quoted

PRESETS, METHODS, BACKENDS = (config_group(group) for group in ("model", "method", "backend"))


def test_the_presets_that_are_promised_exist():
    promised = {"tiny", "smollm2_135m", "qwen2.5_1.5b_1gpu", "qwen2.5_3b", "qwen2.5_7b", "qwen3.5_4b_lora"}
    assert promised <= set(PRESETS)
    assert set(BACKENDS) == {"fsdp2", "fsdp", "megatron"}
    assert set(config_group("rollout_engine")) == {"vllm", "sglang"}


@pytest.mark.parametrize(("preset", "backend"), list(itertools.product(PRESETS, BACKENDS)))
def test_every_method_on_every_preset_and_back_end(preset: str, backend: str):
    for method in METHODS:
        config = compose_config([f"model={preset}", f"method={method}", f"backend={backend}", "device=gpu"])
        prepare(config)
        assert config.actor_rollout_ref.actor.strategy == backend
        longest = config.data.max_prompt_length + config.data.max_response_length
        assert dynamic_row_limit(config) >= longest + 2048, "room for a skill"


@pytest.mark.parametrize(("preset", "backend"), list(itertools.product(PRESETS, BACKENDS)))
def test_everything_that_needs_no_gpu_is_made(preset: str, backend: str, alfworld_data: Path, monkeypatch):
    """Data set, a game, agent loop, trainer class, typed settings of verl, tokenizer where it is here, and the plan."""
    monkeypatch.setattr(resources, "gpus", lambda: [])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    games = [f"env.data_dir={alfworld_data}", "data.train_files=valid_seen"]
    model = f"actor_rollout_ref.model.path={TINY_MODEL}" if preset == "smollm2_135m" else "env.check_counts=true"
    config = compose_config([f"model={preset}", f"backend={backend}", "device=gpu", *games, model])
    prepare(config)
    report = examine(config, rehearse=True)
    assert report.of(Level.ERROR) == []
    made = {finding.subject: finding.text for finding in report.findings}
    assert made["data set"].startswith("140 games") and made["agent loop"] == "TextEnvAgentLoop"
    assert made["trainer"].startswith("AgentOPSDTrainer")
    assert made["settings"].startswith({"megatron": "McoreActorConfig, McoreOptimizerConfig"}.get(backend, "FSDPActor"))
    assert report.plan is not None and report.plan.seconds.update > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_on_sglang(preset: str):
    config = compose_config([f"model={preset}", "rollout_engine=sglang", "device=gpu"])
    prepare(config)
    assert config.actor_rollout_ref.rollout.name == "sglang"


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp"])
@pytest.mark.parametrize("preset", ["tiny", "smollm2_135m"])
def test_small_presets_without_a_gpu(preset: str, backend: str):
    prepare(compose_config([f"model={preset}", f"backend={backend}", "device=cpu"]))


@pytest.mark.parametrize("preset", ["qwen2.5_3b", "qwen2.5_7b"])
def test_the_papers_recipe(preset: str):
    config = compose_config([f"model={preset}", "device=gpu"])
    model, actor, rollout = (config.actor_rollout_ref[name] for name in ("model", "actor", "rollout"))
    assert (config.data.train_batch_size, rollout.n, config.env.max_turns) == (16, 8, 50)
    assert (config.trainer.total_training_steps, actor.optim.lr) == (150, 1e-6)
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.01, "low_var_kl")
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.24)
    assert (config.trainer.n_gpus_per_node, actor.strategy, rollout.name) == (8, "fsdp2", "vllm")
    assert (actor.fsdp_config.dtype, rollout.dtype) == ("bfloat16", "bfloat16")
    assert actor.use_dynamic_bsz and model.use_remove_padding and model.enable_gradient_checkpointing


def test_the_lora_preset():
    config = compose_config(["model=qwen3.5_4b_lora", "device=gpu"])
    model = config.actor_rollout_ref.model
    assert (model.lora_rank, config.actor_rollout_ref.actor.optim.lr) == (32, 4e-6)
    assert config.trainer.total_training_steps == 80
    assert config.data.max_prompt_length + config.data.max_response_length == 14336
    assert dynamic_row_limit(config) == 14336 + 2048
    assert config.actor_rollout_ref.rollout.load_format == "safetensors", "vLLM must load the base weights itself"
    megatron = compose_config(["model=qwen3.5_4b_lora", "backend=megatron"])
    assert megatron.actor_rollout_ref.model.lora.rank == 32


def test_one_gpu_is_one_gpu():
    config = compose_config(["model=qwen2.5_1.5b_1gpu", "device=gpu"])
    assert (config.trainer.n_gpus_per_node, config.trainer.nnodes) == (1, 1)


@pytest.mark.parametrize(
    ("backend", "ranks"),
    # 8 GPUs: rows are shared by 2 (Ulysses); Megatron also splits layers over 2
    [("fsdp2", 4), ("megatron", 2)],
)
def test_ranks_that_share_a_row_are_one_data_parallel_rank(backend: str, ranks: int):
    config = compose_config(["model=qwen2.5_7b", f"backend={backend}", "device=gpu"])
    assert data_parallel_size(config) == ranks
    # the limit is per GPU, a row is spread over the GPUs that share it
    assert config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == 16384 // 2
    assert dynamic_row_limit(config) == 16384


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["backend=megatron", "device=cpu"], "backend=megatron needs GPUs: use device=gpu"),
        (["rollout_engine=sglang", "model=tiny", "device=cpu"], "rollout.name=sglang needs GPUs"),
        (
            ["model=qwen2.5_7b", "device=gpu", "trainer.n_gpus_per_node=3"],
            r"ulysses_sequence_parallel_size=2 ranks share a row, which does not divide the 3 GPUs",
        ),
        (
            ["model=qwen2.5_3b", "device=gpu", "hardware.rollout_tensor_parallel=3"],
            r"tensor_model_parallel_size=3 does not divide the 8 GPUs of the run \(trainer.nnodes 1 ×",
        ),
        (
            ["model=qwen2.5_7b", "device=gpu", "actor_rollout_ref.model.override_config.attn_implementation=sdpa"],
            r"ulysses_sequence_parallel_size=2 needs flash-attn, and attention here is sdpa: install it .*=1$",
        ),
        (
            ["model=tiny", "device=cpu", "trainer.n_gpus_per_node=2", "hardware.sequence_parallel=2"],
            "ulysses_sequence_parallel_size=2 needs flash-attn, and attention here is sdpa",
        ),
        (
            [
                *("model=qwen2.5_7b", "device=gpu", "agentopsd.teacher.source=model"),
                *("agentopsd.teacher.path=Qwen/Qwen2.5-7B-Instruct", "agentopsd.teacher.n_gpus_per_node=1"),
            ],
            r"ulysses_sequence_parallel_size=2 ranks share a row, in the teacher too, .* its 1 GPUs",
        ),
        (["algorithm.adv_estimator=rlsd"], "agentopsd.warmdown_steps=0 with RLSD, .* choose method=rlsd"),
        (["trainer.v1.trainer_mode=separate_async"], "separate_async is refused: .* weights that sampled it"),
        (["trainer.v1.trainer_mode=colocate_async"], "colocate_async is refused: .* several weights"),
        (["trainer.v1.trainer_mode=one_step_off"], "trainer_mode=one_step_off: unknown; leave it at agentopsd"),
        (["actor_rollout_ref.rollout.nnodes=1"], "rollout.nnodes=1, .* asynchronous trainers, which are refused"),
        (["actor_rollout_ref.hybrid_engine=false"], "hybrid_engine=False: .* asynchronous trainers"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        prepare(compose_config(overrides))


def test_the_refused_modes_are_the_ones_that_verl_has():
    """A new asynchronous trainer of verl must be looked at before it is refused or allowed."""
    from verl.trainer.ppo.v1 import trainer_base, trainer_colocate_async, trainer_separate_async, trainer_sync  # noqa: F401

    from verl.agentopsd.deployment import ASYNCHRONOUS, SYNCHRONOUS

    known = {name for name, value in vars(trainer_base).items() if isinstance(value, dict) and "sync" in value}
    assert len(known) == 1
    assert set(getattr(trainer_base, known.pop())) - {"agentopsd"} == {*ASYNCHRONOUS, *SYNCHRONOUS} - {"agentopsd"}


@pytest.mark.parametrize("name", ["lr=1e-6", "a=b=c", "it's=1", "a\\b=1"])
def test_names_with_an_equals_sign_need_no_quotes(name: str):
    assert compose_config([f"trainer.experiment_name={name}"]).trainer.experiment_name == name


def test_quotes_and_lists_are_left_alone():
    for override in ("a='b=c'", "a=[b=c]", "a={b:c=d}", "a=b", "--flag"):
        assert quoted(override) == override
    both = compose_config(["trainer.logger=[console,tensorboard]"])
    assert OmegaConf.to_container(both.trainer.logger) == ["console", "tensorboard"]


@pytest.mark.parametrize(
    ("modules", "cpu_set", "kernel"),
    [
        ({"vllm", "flash_attn"}, False, "flash_attention_2"),
        ({"vllm"}, False, "sdpa"),
        ({"vllm"}, True, "flash_attention_2"),  # the CPU set: a run for GPUs is rehearsed here and starts elsewhere
    ],
)
def test_attention_is_what_the_gpu_set_has(modules: set[str], cpu_set: bool, kernel: str, monkeypatch):
    monkeypatch.setattr(config_module, "find_spec", lambda name: True if name in modules else None)
    monkeypatch.setattr(config_module, "_has_cpu_set", lambda: cpu_set)
    made = compose_config(["model=qwen2.5_1.5b_1gpu", "device=gpu"])
    assert made.actor_rollout_ref.model.override_config.attn_implementation == kernel


def test_what_presets_for_gpus_share():
    lora = compose_config(["model=qwen3.5_4b_lora", "device=gpu"]).actor_rollout_ref.model
    assert lora.exclude_modules == ".*visual.*", "the games have no pictures"
    one = compose_config(["model=qwen2.5_1.5b_1gpu", "device=gpu"])
    eight = compose_config(["model=qwen2.5_7b", "device=gpu"])
    units = [config.transfer_queue.backend.SimpleStorage.num_data_storage_units for config in (one, eight)]
    assert units == [1, 8], "one CPU of Ray's each: an 8-core node with one GPU has room"
    sglang = compose_config(["model=qwen2.5_7b", "rollout_engine=sglang", "device=gpu"]).actor_rollout_ref.rollout
    assert sglang.engine_kwargs.sglang == {"enable_deterministic_inference": True, "attention_backend": "triton"}
    megatron = compose_config(["model=qwen2.5_7b", "backend=megatron", "device=gpu"]).actor_rollout_ref
    recompute = megatron.actor.megatron.override_transformer_config
    assert (recompute.recompute_granularity, recompute.recompute_num_layers) == ("full", 1)
