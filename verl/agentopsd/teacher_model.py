"""A teacher with weights of its own: a forward-only worker group (``agentopsd.teacher.source=model``).

The group is verl's reference worker with another checkpoint in it: same back end, same settings, its parameters in host
memory while idle. It shares the actor's GPUs, or has its own (``agentopsd.teacher.n_gpus_per_node``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl.agentopsd.config import ConfigError, TeacherConfig, teacher_config

ROLE = "teacher_policy"


def teacher_tokenizer(settings: TeacherConfig, folder: Path | None = None) -> Any:
    """The tokenizer of the teacher's checkpoint.

    Args:
        folder: where it is on this machine, when that is known.

    Raises:
        ConfigError: there is none that loads.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder or settings.path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"agentopsd.teacher.path={settings.path} has no tokenizer that loads: {error}") from error


def require_same_vocabulary(student: Any, teacher: Any, path: str | None) -> None:
    """Refuses a teacher whose tokens are not the student's: its log-probs would be those of other tokens.

    Args:
        student, teacher: tokenizers; every token and its id is compared, not the name of the tokenizer.
        path: where the teacher comes from.

    Raises:
        ConfigError: with the number of differing tokens and the first of them.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    differ = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if not differ:
        return
    first = differ[0]
    raise ConfigError(
        f"agentopsd.teacher.path={path} has another vocabulary than the student: {len(differ)} of "
        f"{len(ours.keys() | theirs.keys())} tokens differ, the first is {first!r} (student id {ours.get(first)}, "
        f"teacher id {theirs.get(first)}). A teacher scores the student's token ids: choose a model of the same family"
    )


def worker_config(config: DictConfig) -> DictConfig:
    """``actor_rollout_ref`` as the teacher's workers read it: its checkpoint, no adapter, idle in host memory."""
    section = OmegaConf.create(OmegaConf.to_container(config.actor_rollout_ref, resolve=True))
    assert isinstance(section, DictConfig)
    with open_dict(section):
        section.model.path = teacher_config(config).path
        section.model.tokenizer_path = None
        section.model.hf_config_path = None
        section.model.lora_rank = 0
        section.model.lora_adapter_path = None
        if "lora" in section.model:
            section.model.lora.rank = 0
        engine = section.ref.get("fsdp_config") or section.ref.get("megatron")
        if engine is not None and config.trainer.device != "cpu":
            engine.param_offload = True
    return section


def start_teacher_group(config: DictConfig, actor_pool: Any) -> Any:
    """Starts the group and loads the checkpoint; its ``compute_ref_log_prob`` scores rows.

    Args:
        actor_pool: the actor's resource pool, used unless the teacher has GPUs of its own.
    """
    import ray
    from verl.single_controller.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        create_colocated_worker_cls,
    )
    from verl.workers.engine_workers import ActorRolloutRefWorker

    settings, pool = teacher_config(config), actor_pool
    if settings.n_gpus_per_node:
        pool = RayResourcePool(
            process_on_nodes=[settings.n_gpus_per_node] * settings.nnodes,
            use_gpu=True,
            max_colocate_count=1,
            name_prefix=ROLE,
        )
    worker = RayClassWithInitArgs(cls=ray.remote(ActorRolloutRefWorker), config=worker_config(config), role="ref")
    group = RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=create_colocated_worker_cls(class_dict={ROLE: worker}),
        device_name=config.trainer.device,
    ).spawn(prefix_set={ROLE})[ROLE]
    group.init_model()
    return group
