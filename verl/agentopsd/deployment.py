"""Combinations of trainer mode, back end, engine and device that cannot work: each with its reason."""

from __future__ import annotations

from omegaconf import DictConfig

from verl.agentopsd import trackers

SYNCHRONOUS = ("agentopsd", "sync")

ASYNCHRONOUS = {
    "colocate_async": "rollout runs on while the actor is updated, so an episode mixes answers of several weights",
    "separate_async": "rollout runs on GPUs of its own, one or more updates behind the actor",
}


def problems(config: DictConfig) -> list[str]:
    """One line per combination that cannot work; empty when all is well."""
    checks = [_mode(config), _separate_rollout(config), _without_gpu(config), _ranks(config), _shared_rows(config)]
    return [*(problem for problem in checks if problem), *trackers.problems(config)]


def _mode(config: DictConfig) -> str | None:
    mode = str(config.trainer.v1.trainer_mode)
    if mode in SYNCHRONOUS:
        return None
    if mode not in ASYNCHRONOUS:
        return f"trainer.v1.trainer_mode={mode}: unknown; leave it at agentopsd"
    return (
        f"trainer.v1.trainer_mode={mode} is refused: {ASYNCHRONOUS[mode]}. The evidence of a turn is the gap between "
        "two readings by the weights that sampled it; once the actor has moved on, verl keeps no copy of those "
        "weights, and the gap would measure the update instead of the skill. Use trainer.v1.trainer_mode=agentopsd "
        "(synchronous)"
    )


def _separate_rollout(config: DictConfig) -> str | None:
    nodes = int(config.actor_rollout_ref.rollout.nnodes)
    if nodes > 0 or not config.actor_rollout_ref.get("hybrid_engine", True):
        return (
            f"actor_rollout_ref.rollout.nnodes={nodes}, actor_rollout_ref.hybrid_engine="
            f"{config.actor_rollout_ref.get('hybrid_engine', True)}: GPUs for the rollout alone belong to verl's "
            "asynchronous trainers, which are refused here; use nnodes=0 and hybrid_engine=true"
        )
    return None


def _without_gpu(config: DictConfig) -> str | None:
    if config.trainer.device != "cpu":
        return None
    if config.actor_rollout_ref.actor.strategy == "megatron":
        return "backend=megatron needs GPUs: use device=gpu, or backend=fsdp2 without a GPU"
    if config.actor_rollout_ref.rollout.name != "vllm":
        return (
            f"actor_rollout_ref.rollout.name={config.actor_rollout_ref.rollout.name} needs GPUs: use device=gpu, or "
            "rollout_engine=vllm without a GPU"
        )
    return None


def _ranks(config: DictConfig) -> str | None:
    """Ranks that share rows or layers, and GPUs that share a server, must divide all of them."""
    ranks = int(config.trainer.n_gpus_per_node) * int(config.trainer.nnodes)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    if actor.strategy == "megatron":
        engine = actor.megatron
        sharing = engine.tensor_model_parallel_size * engine.pipeline_model_parallel_size * engine.context_parallel_size
        what = (
            f"actor_rollout_ref.actor.megatron: tensor {engine.tensor_model_parallel_size} × pipeline "
            f"{engine.pipeline_model_parallel_size} × context {engine.context_parallel_size} = {sharing} ranks"
        )
    else:
        sharing = actor.ulysses_sequence_parallel_size
        what = f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={sharing} ranks"
    if ranks % sharing:
        return (
            f"{what} share a row, which does not divide the {ranks} GPUs of the run (trainer.nnodes "
            f"{config.trainer.nnodes} × trainer.n_gpus_per_node {config.trainer.n_gpus_per_node}): change one of them"
        )
    settings = config.agentopsd.teacher
    teacher = int(settings.n_gpus_per_node) * int(settings.nnodes) if settings.source == "model" else 0
    if teacher % sharing:
        return (
            f"{what} share a row, in the teacher too, which does not divide its {teacher} GPUs (agentopsd.teacher."
            f"nnodes {settings.nnodes} × agentopsd.teacher.n_gpus_per_node {settings.n_gpus_per_node}): change one of "
            "them"
        )
    server = int(rollout.tensor_model_parallel_size)
    if ranks % server:
        return (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={server} does not divide the {ranks} GPUs of the "
            f"run (trainer.nnodes {config.trainer.nnodes} × trainer.n_gpus_per_node {config.trainer.n_gpus_per_node}): "
            "change one of them"
        )
    return None


def _shared_rows(config: DictConfig) -> str | None:
    """Ulysses exchanges heads between ranks inside verl's flash-attention call; other kernels would see a part of a row
    and nobody would notice."""
    actor, kernel = config.actor_rollout_ref.actor, attention_kernel(config)
    if actor.strategy == "megatron" or int(actor.ulysses_sequence_parallel_size) == 1 or "flash" in kernel:
        return None
    return (
        f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={actor.ulysses_sequence_parallel_size} needs "
        f"flash-attn, and attention here is {kernel}: install it (bash scripts/install.sh --gpu --flash-attn), or set "
        "hardware.sequence_parallel=1"
    )


def attention_kernel(config: DictConfig) -> str:
    """What verl's FSDP engine asks transformers for."""
    overrides = config.actor_rollout_ref.model.get("override_config") or {}
    return str(overrides.get("attn_implementation", "flash_attention_2"))
