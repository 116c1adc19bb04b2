"""Seconds per stage and bytes per GPU of one update, from sizes alone: pure arithmetic, named assumptions.

Time::

    forward FLOPs  = 2 × matrix parameters × tokens + 4 × attention layers × heads × head size × tokens × mean context
    forward stage  = FLOPs / (GPUs × data-sheet FLOP/s × forward_efficiency)
    update         = 3 × forward (4 × with gradient checkpointing), at train_efficiency
    rollout        = prefill of every token once + decoding steps of the longest episode
    decoding step  = step overhead + (weights + keys and values of all running rows) / (bandwidth × decode_efficiency)

Memory: weights, gradients and Adam in float32 sharded over all ranks; one gathered layer; checkpointed activations and
logits of the micro-batch; the rollout engine's share while it is awake.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from verl.agentopsd.doctor.gpus import Device
from verl.agentopsd.doctor.shapes import ModelShape

FLOAT32, BFLOAT16 = 4, 2
LOGIT_BYTES = 8
"""Per token and vocabulary entry: bf16 logits, a float32 copy for the softmax, a bf16 gradient. Counted for every token
of a row: an upper bound where the engine makes logits of sampled tokens alone (``agentopsd.action_logits``)."""
USABLE = 0.92
"""Share of a GPU's memory that is left to plan with: the CUDA context, NCCL buffers and fragmentation take the rest."""


@dataclass(frozen=True)
class Assumptions:
    """Efficiencies: the share of the data sheet that is reached."""

    forward_efficiency: float = 0.40
    train_efficiency: float = 0.40
    decode_efficiency: float = 0.60
    prefill_efficiency: float = 0.40


@dataclass(frozen=True)
class Workload:
    """One update.

    Attributes:
        episodes: rows of the batch.
        prompt_tokens, response_tokens: mean tokens per row.
        sampled_tokens: mean sampled tokens per row; the rest of the response is observation.
        longest_sampled_tokens: of the episode that samples most: the number of decoding steps, one after the other.
        skill_tokens: what the teacher's prompt has more.
        scored_share: share of rows with a non-zero advantage, which the teacher reads.
        teacher, reference: whether these stages exist.
        epochs: passes over the batch.
        gradient_checkpointing: activations are computed again in the backward pass.
    """

    episodes: float
    prompt_tokens: float
    response_tokens: float
    sampled_tokens: float
    longest_sampled_tokens: float
    skill_tokens: float = 0.0
    scored_share: float = 1.0
    teacher: bool = True
    reference: bool = False
    epochs: int = 1
    gradient_checkpointing: bool = True

    @property
    def row_tokens(self) -> float:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class StageSeconds:
    """Seconds per stage of one update."""

    rollout: float
    old_log_probs: float
    teacher: float
    reference: float
    update: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def forward_flops(shape: ModelShape, tokens: float, row_tokens: float) -> float:
    """FLOPs of one forward pass over ``tokens`` in rows of ``row_tokens``; a token sees half of its row on average."""
    matrices = 2.0 * shape.matrix_parameters * tokens
    attention = 4.0 * shape.attention_layers * shape.heads * shape.head_dim * tokens * row_tokens / 2
    return matrices + attention


def stage_seconds(
    shape: ModelShape,
    work: Workload,
    device: Device,
    gpus: int,
    assumed: Assumptions | None = None,
    rollout_tensor_parallel: int = 1,
    teacher_shape: ModelShape | None = None,
    teacher_gpus: int = 0,
) -> StageSeconds:
    """Seconds per stage on ``gpus`` devices.

    Args:
        teacher_shape: of a teacher with weights of its own; None when the actor or its reference rereads.
        teacher_gpus: that only the teacher has; 0 when it shares the actor's.
    """
    assumed = assumed or Assumptions()
    forward_rate = gpus * device.flops * assumed.forward_efficiency
    tokens = work.episodes * work.row_tokens
    forward = forward_flops(shape, tokens, work.row_tokens)
    taught_row = work.row_tokens + work.skill_tokens
    taught = forward_flops(teacher_shape or shape, work.episodes * work.scored_share * taught_row, taught_row)
    passes = (4.0 if work.gradient_checkpointing else 3.0) * work.epochs
    return StageSeconds(
        rollout=rollout_seconds(shape, work, device, gpus, assumed, rollout_tensor_parallel),
        old_log_probs=forward / forward_rate,
        teacher=taught / (forward_rate * (teacher_gpus or gpus) / gpus) if work.teacher else 0.0,
        reference=forward / forward_rate if work.reference else 0.0,
        update=passes * forward / (gpus * device.flops * assumed.train_efficiency),
    )


def rollout_seconds(
    shape: ModelShape, work: Workload, device: Device, gpus: int, assumed: Assumptions, tensor_parallel: int = 1
) -> float:
    """Prefill of every token once (prefixes are cached), then the decoding steps of the longest episode."""
    servers = max(1, gpus // tensor_parallel)
    rows = work.episodes / servers
    prefill = forward_flops(shape, work.episodes * work.row_tokens, work.row_tokens) / (
        gpus * device.flops * assumed.prefill_efficiency
    )
    read = shape.parameters * BFLOAT16 + rows * work.row_tokens / 2 * shape.kv_bytes_per_token
    step = device.step_overhead + read / (tensor_parallel * device.bandwidth * assumed.decode_efficiency)
    return prefill + work.longest_sampled_tokens * step


@dataclass(frozen=True)
class Layout:
    """How a run is spread over GPUs.

    Attributes:
        gpus: all of them; the model is sharded over all.
        row_gpus: that share one row (Ulysses or context parallelism), and its logits and activations.
        rollout_tensor_parallel: GPUs per rollout server.
        rollout_share: of a GPU's memory that the rollout engine may take (``gpu_memory_utilization``).
        micro_batch_tokens: tokens of a micro-batch on one GPU.
        lora_rank: 0 trains all weights.
        teacher_parameters: of a teacher with weights of its own on the same GPUs; 0 for the actor's or the reference's.
    """

    gpus: int
    micro_batch_tokens: int
    row_gpus: int = 1
    rollout_tensor_parallel: int = 1
    rollout_share: float = 0.5
    gradient_checkpointing: bool = True
    optimizer_offload: bool = False
    fused_logits: bool = False
    lora_rank: int = 0
    teacher_parameters: int = 0


@dataclass(frozen=True)
class GpuBytes:
    """Bytes on one GPU."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    logits: float
    teacher: float
    rollout_weights: float
    kv_cache: float

    @property
    def training(self) -> float:
        """Peak of the update; the rollout engine sleeps."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.gathered
            + self.activations
            + self.logits
            + self.teacher
        )

    @property
    def playing(self) -> float:
        """While the rollout engine is awake; the training engine keeps its shards."""
        return self.weights + self.optimizer + self.teacher + self.rollout_weights + self.kv_cache


def trained_parameters(shape: ModelShape, lora_rank: int) -> float:
    """All weights, or two thin matrices beside every matrix of the layers (``target_modules=all-linear``)."""
    if lora_rank == 0:
        return shape.parameters
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = (shape.hidden + queries * (2 if shape.query_gate else 1)) + 2 * (shape.hidden + keys)
    attention += queries + shape.hidden
    linear = 2 * (shape.hidden + shape.linear_key) + 2 * (shape.hidden + shape.linear_value)
    linear += shape.linear_value + shape.hidden
    mlp = 3 * (shape.hidden + shape.intermediate)
    sums = shape.attention_layers * attention + shape.linear_layers * linear + shape.layers * mlp
    return float(lora_rank * sums)


def gpu_bytes(shape: ModelShape, layout: Layout, device: Device) -> GpuBytes:
    """What one GPU holds."""
    trained = trained_parameters(shape, layout.lora_rank)
    tokens = layout.micro_batch_tokens
    rollout_weights = shape.parameters * BFLOAT16 / layout.rollout_tensor_parallel
    return GpuBytes(
        weights=shape.parameters * FLOAT32 / layout.gpus + (trained if layout.lora_rank else 0) * FLOAT32,
        gradients=trained * FLOAT32 / layout.gpus,
        optimizer=0.0 if layout.optimizer_offload else 2 * trained * FLOAT32 / layout.gpus,
        gathered=(2 * shape.layer_parameters + shape.vocab * shape.hidden) * BFLOAT16,
        activations=tokens * activation_bytes_per_token(shape, layout.gradient_checkpointing),
        logits=0.0 if layout.fused_logits else tokens * shape.vocab * LOGIT_BYTES,
        teacher=layout.teacher_parameters * BFLOAT16 / layout.gpus,
        rollout_weights=rollout_weights,
        kv_cache=max(0.0, layout.rollout_share * device.memory - rollout_weights),
    )


def activation_bytes_per_token(shape: ModelShape, gradient_checkpointing: bool) -> float:
    """One layer's intermediate results in bf16 for every layer, or for one layer beside every layer's input."""
    attention = 2 * shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim
    inside = BFLOAT16 * (4 * shape.hidden + attention + 4 * shape.intermediate)
    if not gradient_checkpointing:
        return float(shape.layers * inside)
    return float(shape.layers * shape.hidden * BFLOAT16 + inside)


def largest_micro_batch(shape: ModelShape, layout: Layout, device: Device) -> int:
    """Tokens per GPU at which the update fills the usable memory; negative when not even the weights fit."""
    one = gpu_bytes(shape, layout, device)
    per_token = (one.activations + one.logits) / layout.micro_batch_tokens
    fixed = one.training - one.activations - one.logits
    return int((USABLE * device.memory - fixed) // per_token)


def rows_in_cache(shape: ModelShape, layout: Layout, device: Device, row_tokens: float) -> float:
    """Whole rows whose keys and values fit one rollout server at once."""
    cache = gpu_bytes(shape, layout, device).kv_cache * layout.rollout_tensor_parallel
    per_row = shape.kv_bytes_per_token * row_tokens
    return cache / per_row if per_row else float("inf")
