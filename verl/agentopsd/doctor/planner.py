"""Memory and time of one update for a configuration: ``cost.py`` with the numbers filled in."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.agentopsd.config import has_teacher, sequence_parallel_size, teacher_config, teacher_gpus
from verl.agentopsd.doctor import cost
from verl.agentopsd.doctor.finding import Finding, error, ok, unchecked, warning
from verl.agentopsd.doctor.gpus import DEFAULT, DEVICES, GIB, Device, device_of
from verl.agentopsd.doctor.resources import Gpu
from verl.agentopsd.doctor.shapes import ModelShape, shape_of

MEAN_RESPONSE = 0.5
"""Assumed: an average episode takes half of ``data.max_response_length``; the longest takes all of it."""
SAMPLED = 0.4
"""Assumed: 2 of 5 tokens of a response are sampled, the others are observations."""
SKILL_TOKENS = 600
"""Assumed where the tokenizer is not here to count them."""
SCORED = 0.7
"""Assumed: 3 of 10 episodes are in groups that all won or all lost, and are not read again."""


@dataclass(frozen=True)
class Plan:
    """What is known about memory and time before the start."""

    device: str
    shape: ModelShape
    layout: cost.Layout
    work: cost.Workload
    memory: cost.GpuBytes
    seconds: cost.StageSeconds
    largest_micro_batch: int
    rows_in_cache: float
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain numbers, bytes and seconds."""
        return {
            "device": self.device,
            "model": asdict(self.shape) | {"parameters": self.shape.parameters},
            "layout": asdict(self.layout),
            "workload": asdict(self.work),
            "bytes_per_gpu": asdict(self.memory)
            | {"training_peak": self.memory.training, "rollout_peak": self.memory.playing},
            "seconds_per_update": asdict(self.seconds) | {"total": self.seconds.total},
            "largest_micro_batch_tokens": self.largest_micro_batch,
            "rows_in_cache": self.rows_in_cache,
            "assumptions": list(self.notes),
        }


def choose_device(config: DictConfig, gpus: list[Gpu]) -> tuple[Device, str]:
    """The device to plan for, and where it comes from."""
    if config.trainer.device == "cpu":
        return DEVICES["cpu"], "one process of this machine"
    named = str(config.hardware.gpu)
    if named != "auto":
        return DEVICES[named], "hardware.gpu"
    if gpus and (device := device_of(gpus[0].name)):
        return device, "nvidia-smi"
    if gpus:
        found = replace(DEVICES[DEFAULT], name=gpus[0].name, memory=gpus[0].total)
        return found, f"its memory from nvidia-smi, speeds of {DEFAULT} as it is not listed; hardware.gpu names another"
    return DEVICES[DEFAULT], "assumed, no GPU here; hardware.gpu names another"


def plan(config: DictConfig, shape: ModelShape | None, gpus: list[Gpu], skill_tokens: int | None) -> Plan | None:
    """The plan; None when the model's sizes are unknown."""
    if shape is None:
        return None
    device, origin = choose_device(config, gpus)
    teacher = teacher_shape(config)
    layout, work = layout_of(config, teacher), workload_of(config, skill_tokens)
    ranks = layout.gpus
    notes = [
        f"{device.name}: {origin}",
        f"efficiencies {cost.Assumptions().forward_efficiency:.0%} of the data sheet's FLOP/s, "
        f"{cost.Assumptions().decode_efficiency:.0%} of its bandwidth, {device.step_overhead * 1000:.0f} ms a step",
        f"mean response {MEAN_RESPONSE:.0%} of the limit, longest 100 %, {SAMPLED:.0%} of it sampled",
        f"{SCORED:.0%} of the episodes read by the teacher, {work.skill_tokens:.0f} skill tokens"
        + ("" if skill_tokens else " (assumed)"),
    ]
    return Plan(
        device=device.name,
        shape=shape,
        layout=layout,
        work=work,
        memory=cost.gpu_bytes(shape, layout, device),
        seconds=cost.stage_seconds(
            shape, work, device, ranks, None, layout.rollout_tensor_parallel, teacher, teacher_gpus(config)
        ),
        largest_micro_batch=cost.largest_micro_batch(shape, layout, device),
        rows_in_cache=cost.rows_in_cache(shape, layout, device, work.prompt_tokens + config.data.max_response_length),
        notes=tuple(notes),
    )


def teacher_shape(config: DictConfig) -> ModelShape | None:
    """Of a teacher with weights of its own, where its sizes are known."""
    settings = teacher_config(config)
    if settings.source != "model" or settings.path is None or not has_teacher(config):
        return None
    try:
        return shape_of(str(settings.path))
    except ValueError:
        return None


def layout_of(config: DictConfig, teacher: ModelShape | None = None) -> cost.Layout:
    """How the configuration spreads the run; a teacher's own weights count where it shares the actor's GPUs."""
    arr = config.actor_rollout_ref
    gpus = int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node)
    row = int(config.data.max_prompt_length) + int(config.data.max_response_length)
    if arr.actor.use_dynamic_bsz:
        tokens = int(arr.actor.ppo_max_token_len_per_gpu)
    else:
        tokens = int(arr.actor.ppo_micro_batch_size_per_gpu) * row
    engine = arr.actor.get("fsdp_config") or arr.actor.get("megatron")
    return cost.Layout(
        gpus=gpus,
        micro_batch_tokens=tokens,
        row_gpus=sequence_parallel_size(config),
        rollout_tensor_parallel=int(arr.rollout.tensor_model_parallel_size),
        rollout_share=float(arr.rollout.gpu_memory_utilization),
        gradient_checkpointing=bool(arr.model.enable_gradient_checkpointing),
        optimizer_offload=bool(engine.optimizer_offload),
        fused_logits=bool(arr.model.use_fused_kernels),
        lora_rank=int(arr.model.lora_rank),
        teacher_parameters=teacher.parameters if teacher is not None and teacher_gpus(config) == 0 else 0,
    )


def workload_of(config: DictConfig, skill_tokens: int | None) -> cost.Workload:
    """One update of the configuration under this file's assumptions."""
    arr = config.actor_rollout_ref
    response = float(config.data.max_response_length)
    sampled = min(response * SAMPLED, float(config.env.max_turns * config.env.max_action_tokens))
    return cost.Workload(
        episodes=config.data.train_batch_size * arr.rollout.n,
        prompt_tokens=0.5 * config.data.max_prompt_length,
        response_tokens=MEAN_RESPONSE * response,
        sampled_tokens=MEAN_RESPONSE * sampled,
        longest_sampled_tokens=sampled,
        skill_tokens=skill_tokens or SKILL_TOKENS,
        scored_share=SCORED,
        teacher=has_teacher(config),
        reference=bool(arr.actor.use_kl_loss or OmegaConf.select(config, "algorithm.use_kl_in_reward")),
        epochs=int(arr.actor.ppo_epochs),
        gradient_checkpointing=bool(arr.model.enable_gradient_checkpointing),
    )


def check(config: DictConfig, shape: ModelShape | None, gpus: list[Gpu], made: Plan | None) -> list[Finding]:
    """Errors when it cannot fit, warnings when it is tight."""
    if config.trainer.device != "cpu" and str(config.hardware.gpu) not in ("auto", *DEVICES):
        return [error("plan", f"hardware.gpu={config.hardware.gpu}: unknown; known: auto, {', '.join(DEVICES)}")]
    if made is None or shape is None:
        path = config.actor_rollout_ref.model.path
        return [unchecked("plan", f"the sizes of {path} are unknown here: no folder, and not in doctor/shapes.py")]
    if config.trainer.device == "cpu":
        return []
    if config.actor_rollout_ref.actor.strategy == "megatron":
        text = (
            "the plan knows how FSDP spreads a model; Megatron keeps whole bf16 weights and fp32 gradients per replica"
        )
        return [unchecked("memory", f"{text} (divided by hardware.tensor_parallel), which is not planned")]
    device, _ = choose_device(config, gpus)
    usable = cost.USABLE * device.memory
    needed, largest = made.layout.micro_batch_tokens, made.largest_micro_batch
    findings = []
    arithmetic = (
        f"update peak {made.memory.training / GIB:.1f} of {usable / GIB:.1f} GiB on {device.name}: weights, gradients "
        f"and Adam {(made.memory.weights + made.memory.gradients + made.memory.optimizer) / GIB:.1f}, gathered layer "
        f"{made.memory.gathered / GIB:.1f}, activations {made.memory.activations / GIB:.1f}, logits "
        f"{made.memory.logits / GIB:.1f} for {needed} tokens"
    )
    remedies = (
        "raise hardware.sequence_parallel, set actor_rollout_ref.model.use_fused_kernels=true (no logits kept), "
        "hardware.optimizer_offload=true, or use more GPUs"
    )
    of_sampled = config.agentopsd.action_logits is True and "fsdp" in str(config.actor_rollout_ref.actor.strategy)
    if largest < needed and of_sampled and made.memory.training - made.memory.logits <= usable:
        may = "if every token were sampled; agentopsd.action_logits makes the sampled ones' alone, so that it may fit"
        findings.append(warning("memory", f"{arithmetic} {may}. If it does not: {remedies}"))
    elif largest < needed:
        findings.append(
            error("memory", f"{arithmetic}; the largest micro-batch that fits has {max(0, largest)} tokens: {remedies}")
        )
    elif largest < 1.15 * needed:
        findings.append(warning("memory", f"{arithmetic}: tight (at most {largest} tokens fit): {remedies}"))
    else:
        findings.append(ok("memory", f"{arithmetic}; up to {largest} tokens would fit"))
    findings.append(_rollout_memory(made, device))
    return findings


def weight_bucket(config: DictConfig, shape: ModelShape | None) -> list[Finding]:
    """verl sends weights to the rollout engine in buckets; the largest matrix must fit one."""
    rollout = config.actor_rollout_ref.rollout
    if shape is None or rollout.checkpoint_engine.backend != "naive":
        return []
    bucket = int(rollout.checkpoint_engine.update_weights_bucket_megabytes) * 2**20
    on_cpu = config.trainer.device == "cpu"
    # FSDP sends its float32 master weights as they are, Megatron what it computes with
    size = cost.BFLOAT16 if config.actor_rollout_ref.actor.strategy == "megatron" else cost.FLOAT32
    largest = shape.vocab * shape.hidden * size
    text = f"largest matrix {shape.vocab} × {shape.hidden} × {size} bytes = {largest / 2**20:.0f} MiB"
    if largest <= bucket:
        return [ok("weight sync", f"{text}, bucket {bucket // 2**20} MiB")]
    if not on_cpu:  # shared through CUDA directly, at the price of its memory once more
        return [ok("weight sync", f"{text}, larger than a bucket of {bucket // 2**20} MiB: sent by itself")]
    return [
        error(
            "weight sync",
            f"{text} does not fit actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes="
            f"{bucket // 2**20}: raise it to {-(-largest // 2**20)}",
        )
    ]


def _rollout_memory(made: Plan, device: Device) -> Finding:
    usable = cost.USABLE * device.memory
    playing = (
        f"rollout peak {made.memory.playing / GIB:.1f} of {usable / GIB:.1f} GiB: engine "
        f"{made.layout.rollout_share:.0%} = weights {made.memory.rollout_weights / GIB:.1f} + KV cache "
        f"{made.memory.kv_cache / GIB:.1f}; training keeps {(made.memory.weights + made.memory.optimizer) / GIB:.1f}"
    )
    remedy = (
        "change actor_rollout_ref.rollout.gpu_memory_utilization, raise hardware.rollout_tensor_parallel, or set "
        "hardware.optimizer_offload=true"
    )
    if made.memory.playing > usable or made.memory.kv_cache == 0:
        return error("rollout", f"{playing}: {remedy}")
    rows = made.work.episodes * made.layout.rollout_tensor_parallel / made.layout.gpus
    if made.rows_in_cache < rows:
        return warning(
            "rollout",
            f"{playing}; {made.rows_in_cache:.0f} rows of full length fit the cache of a server that plays {rows:.0f}: "
            f"the others are preempted and computed again: {remedy}",
        )
    return ok(
        "rollout", f"{playing}; {made.rows_in_cache:.0f} rows of full length fit, {rows:.0f} are played per server"
    )
