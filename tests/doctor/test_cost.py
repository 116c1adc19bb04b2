"""The planner's arithmetic: exact where the truth is known, and how far off where a run was measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from verl.agentopsd.config import TINY_MODEL
from verl.agentopsd.doctor import cost
from verl.agentopsd.doctor.gpus import DEVICES, GIB, device_of
from verl.agentopsd.doctor.shapes import KNOWN, ModelShape, from_config, shape_of

THREE_B = KNOWN["Qwen/Qwen2.5-3B-Instruct"]

# A model small enough to count by hand.
TOY = ModelShape("toy", layers=2, hidden=4, heads=2, kv_heads=1, head_dim=2, intermediate=8, vocab=10)


@pytest.mark.parametrize(
    ("name", "parameters"),
    # numel() of the published checkpoints
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-14B-Instruct", 14_770_033_664),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
        ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824),
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
    ],
)
def test_parameters_of_known_models(name: str, parameters: int):
    assert KNOWN[name].parameters == parameters


@pytest.mark.parametrize(("name", "parameters"), [("Qwen/Qwen3-4B", 4_022_468_096), ("Qwen/Qwen3-8B", 8_190_735_360)])
def test_norms_of_single_heads_are_left_out(name: str, parameters: int):
    assert KNOWN[name].parameters == pytest.approx(parameters, rel=1e-5)


def test_a_hybrid_models_text_part():
    """4.54 B with a vision tower of about 0.33 B."""
    assert KNOWN["Qwen/Qwen3.5-4B"].parameters == pytest.approx(4.2e9, rel=0.01)


def test_the_shipped_model_is_read_from_its_folder():
    shape = shape_of(str(TINY_MODEL))
    assert shape is not None
    assert (shape.layers, shape.hidden, shape.vocab, shape.positions) == (3, 128, 919, 2048)
    assert shape.parameters == pytest.approx(561_280, rel=1e-3)


def test_unknown_names_have_no_shape_and_bad_folders_say_why(tmp_path: Path):
    assert shape_of("Nobody/Nothing") is None
    with pytest.raises(ValueError, match="config.json cannot be read"):
        shape_of(str(tmp_path))
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2}')
    with pytest.raises(ValueError, match="config.json has no 'num_hidden_layers'"):
        from_config(tmp_path / "config.json")


def test_by_hand():
    # one layer: q 4x4, o 4x4, k 4x2, v 4x2 = 48; mlp 3 x 4 x 8 = 96
    assert TOY.matrix_parameters == 2 * (48 + 96) + 40
    assert TOY.kv_bytes_per_token == 2 * 2 * 2 * 1 * 2
    # 5 rows of 6 tokens: 2 FLOPs per weight and token; attention 4 x layers x width x tokens x half a row
    assert cost.forward_flops(TOY, 30, 6) == 2 * 328 * 30 + 4 * 2 * 4 * 30 * 3


def test_memory_by_hand():
    layout = cost.Layout(gpus=2, micro_batch_tokens=100, rollout_share=0.5)
    one = cost.gpu_bytes(TOY, layout, dataclasses.replace(DEVICES["cpu"], memory=100_000))
    parameters = 328 + 4 * 5
    assert (one.weights, one.gradients, one.optimizer) == (2 * parameters, 2 * parameters, 4 * parameters)
    assert one.gathered == (2 * 144 + 40) * 2
    assert one.logits == 100 * 10 * 8
    # 2 layers' inputs of 4 numbers and one layer's insides: 4 x 4 + (2 x 4 + 2 x 2) + 4 x 8 = 60 numbers, 2 bytes each
    assert one.activations == 100 * (2 * 4 * 2 + 60 * 2)
    assert one.kv_cache == 50_000 - 2 * parameters
    assert one.playing == one.weights + one.optimizer + 50_000


def test_the_largest_micro_batch_just_fits():
    layout = cost.Layout(gpus=4, micro_batch_tokens=16384)
    device = DEVICES["A100-40GB"]
    largest = cost.largest_micro_batch(THREE_B, layout, device)
    usable = cost.USABLE * device.memory
    fits = cost.gpu_bytes(THREE_B, dataclasses.replace(layout, micro_batch_tokens=largest), device).training
    too_much = cost.gpu_bytes(THREE_B, dataclasses.replace(layout, micro_batch_tokens=largest + 1), device).training
    assert fits <= usable < too_much


def test_what_saves_memory_saves_it():
    base = cost.Layout(gpus=8, micro_batch_tokens=8192)
    device = DEVICES["H100-80GB"]

    def peak(**change):
        return cost.gpu_bytes(THREE_B, dataclasses.replace(base, **change), device).training / GIB

    assert peak(gradient_checkpointing=False) > 2.5 * peak()
    assert peak() - peak(optimizer_offload=True) == pytest.approx(2 * 4 * 3.0859e9 / 8 / GIB, rel=1e-3)
    assert peak() - peak(fused_logits=True) == pytest.approx(8192 * 151936 * 8 / GIB, rel=1e-3)
    assert peak(lora_rank=32) < peak() - 3, "gradients and Adam are those of the adapter"


def test_lora_parameters_by_hand():
    # a matrix of n x m gets r (n + m): q 4+4, k 4+2, v 4+2, o 4+4, gate 4+8, up 4+8, down 8+4
    assert cost.trained_parameters(TOY, 3) == 3 * 2 * (8 + 6 + 6 + 8 + 12 * 3)


# One update of the CPU run in README.md: 64 episodes of 8 games, means over the updates.
CPU_RUN = {"rollout": 9.4, "old_log_probs": 1.6, "teacher": 1.4, "update": 4.4}
CPU_WORK = cost.Workload(
    episodes=64,
    prompt_tokens=116,
    response_tokens=434,
    sampled_tokens=111,
    longest_sampled_tokens=157,
    skill_tokens=45,
    scored_share=0.79,
    gradient_checkpointing=False,
)


@pytest.mark.parametrize(
    ("stage", "off"),
    # predicted / measured − 1
    [("rollout", -0.54), ("old_log_probs", 0.00), ("teacher", 0.00), ("update", 0.10)],
)
def test_how_far_off_the_cpu_run_is(stage: str, off: float):
    shape = shape_of(str(TINY_MODEL))
    assert shape is not None
    predicted = cost.stage_seconds(shape, CPU_WORK, DEVICES["cpu"], gpus=1)
    assert getattr(predicted, stage) / CPU_RUN[stage] - 1 == pytest.approx(off, abs=0.03)


# The one published breakdown: 3B, 4 × A100, 128 episodes of up to 50 turns, every turn a row of its own that holds its
# history again. Its token counts were not published: they are fitted to the 179 s of old log-probs at 40 % of the data
# sheet (49 turns of 2,200 tokens an episode), so that stage says nothing; the others do.
PUBLISHED = {"rollout": 424, "old_log_probs": 179, "teacher": 260, "reference": 175, "update": 774}
TURNS = 49
PUBLISHED_WORK = cost.Workload(
    episodes=128 * TURNS,
    prompt_tokens=2048,
    response_tokens=152,
    sampled_tokens=152,
    longest_sampled_tokens=TURNS * 152,
    skill_tokens=600,
    reference=True,
)


@pytest.mark.parametrize(
    ("stage", "off"),
    [("old_log_probs", 0.00), ("reference", 0.02), ("update", -0.07), ("teacher", -0.12), ("rollout", -0.36)],
)
def test_how_far_off_the_published_breakdown_is(stage: str, off: float):
    work, device = PUBLISHED_WORK, DEVICES["A100-80GB"]
    predicted = cost.stage_seconds(THREE_B, work, device, gpus=4)
    if stage == "rollout":
        # the turns of an episode follow one another: 128 rows at a time, not all of them
        prefill = predicted.old_log_probs
        at_once = dataclasses.replace(work, episodes=128)
        steps = cost.rollout_seconds(THREE_B, at_once, device, 4, cost.Assumptions())
        steps -= cost.stage_seconds(THREE_B, at_once, device, 4).old_log_probs
        seconds = prefill + steps
    else:
        seconds = getattr(predicted, stage)
    assert seconds / PUBLISHED[stage] - 1 == pytest.approx(off, abs=0.03)


def test_one_row_per_episode_is_the_cheaper_layout():
    """The same episodes with their turns appended: every token is forwarded once."""
    appended = cost.Workload(
        episodes=128,
        prompt_tokens=2048,
        response_tokens=TURNS * (152 + 60),
        sampled_tokens=TURNS * 152,
        longest_sampled_tokens=TURNS * 152,
        skill_tokens=600,
        reference=True,
    )
    ours = cost.stage_seconds(THREE_B, appended, DEVICES["A100-80GB"], gpus=4)
    theirs = cost.stage_seconds(THREE_B, PUBLISHED_WORK, DEVICES["A100-80GB"], gpus=4)
    assert theirs.update / ours.update > 6


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-80GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GH200 480GB", None),
        ("Tesla T4", None),
    ],
)
def test_devices_by_the_name_nvidia_smi_gives(product: str, name: str | None):
    device = device_of(product)
    assert (device.name if device else None) == name
