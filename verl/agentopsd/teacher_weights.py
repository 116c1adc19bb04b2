"""Whose weights the teacher has (``agentopsd.teacher.source``): the forward pass of each source and what fits into it.

``self``   the actor, before the update: evidence about the policy that acted
``ref``    the frozen reference policy; under a LoRA adapter the base model, which is the actor without the adapter
``model``  another checkpoint, in workers of its own
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl.agentopsd.config import data_parallel_size, sequence_parallel_size, teacher_config
from verl.agentopsd.teacher import LogProbFn
from verl.agentopsd.teacher_model import start_teacher_group


@dataclass(frozen=True)
class TeacherWeights:
    """A forward pass.

    Attributes:
        compute_log_prob: takes and returns jagged rows, no gradient.
        max_length: tokens that one row may have.
        row_multiple: rows per call must be a multiple of this: data-parallel size × micro-batch.
    """

    compute_log_prob: LogProbFn
    max_length: int
    row_multiple: int


def teacher_weights(trainer: Any) -> TeacherWeights:
    """The forward pass that the trainer's configuration names; starts the workers of ``source=model``."""
    config: DictConfig = trainer.config
    settings, section = teacher_config(config), config.actor_rollout_ref
    if settings.source == "self" or (settings.source == "ref" and trainer.ref_in_actor):
        actor = trainer.actor_rollout_wg.compute_log_prob
        forward = actor if settings.source == "self" else without_adapter(actor)
        return TeacherWeights(forward, longest_row(config, section.model.path, "rollout"), _multiple(config, "rollout"))
    if settings.source == "ref":
        forward = trainer.ref_policy_wg.compute_ref_log_prob
        return TeacherWeights(forward, longest_row(config, section.model.path, "ref"), _multiple(config, "ref"))
    actor_pool = trainer.resource_pool_manager.resource_pool_dict["global_pool"]
    group = start_teacher_group(config, actor_pool)
    assert settings.path is not None
    ranks = group.world_size // max(
        1, config.trainer.n_gpus_per_node * config.trainer.nnodes // data_parallel_size(config)
    )
    multiple = max(1, ranks) * _micro_batch(config, "ref")
    return TeacherWeights(group.compute_ref_log_prob, longest_row(config, settings.path, "ref"), multiple)


def without_adapter(compute_log_prob: LogProbFn) -> LogProbFn:
    """The actor's forward pass with its LoRA adapter switched off: the base model."""

    def forward(batch: TensorDict) -> TensorDict:
        tu.assign_non_tensor(batch, no_lora_adapter=True)
        return compute_log_prob(batch)

    return forward


def longest_row(config: DictConfig, model: str, engine: str) -> int:
    """Tokens that one row may have: the model's positions, and a dynamic micro-batch of ``rollout`` or ``ref``."""
    from transformers import AutoConfig

    limits = [getattr(AutoConfig.from_pretrained(model).get_text_config(), "max_position_embeddings", None)]
    section = config.actor_rollout_ref[engine]
    if section.log_prob_use_dynamic_bsz:
        limits.append(section.log_prob_max_token_len_per_gpu * sequence_parallel_size(config))
    return min((int(limit) for limit in limits if limit), default=sys.maxsize)


def _multiple(config: DictConfig, engine: str) -> int:
    return data_parallel_size(config) * _micro_batch(config, engine)


def _micro_batch(config: DictConfig, engine: str) -> int:
    section = config.actor_rollout_ref[engine]
    return 1 if section.log_prob_use_dynamic_bsz else int(section.log_prob_micro_batch_size_per_gpu)
