"""verl's policy loss with a method's term added: the loss function that the training engine is given."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from verl.agentopsd.methods import METHODS
from verl.agentopsd.methods.base import DistillConfig, LossInputs

logger = logging.getLogger(__name__)

COEF = "distill_coef"
"""The batch's entry with this update's weight of the term."""


def distilled_loss(
    config: Any, model_output: Any, data: TensorDict, dp_group: Any = None, *, method: str, distill: DistillConfig
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's ``ppo_loss`` plus ``coef`` times the method's term; exactly ``ppo_loss`` when ``coef`` is 0.

    Args:
        config: verl's ``ActorConfig``.
        model_output: jagged ``log_probs`` with gradient.
        data: verl's fields and jagged ``teacher_log_probs``, ``action_mask``, each (B,T); the entry ``distill_coef``.
        method: a method with a loss term.
    """
    loss, metrics = ppo_loss(config, model_output, data, dp_group)
    coef = tu.get_non_tensor_data(data, COEF, default=None)
    if coef is None:
        raise KeyError(f"the batch has no {COEF}: without it {method} would train as GRPO")
    if coef == 0.0:
        return loss, metrics
    term_of = METHODS[method].loss_term
    assert term_of is not None
    term = term_of(_inputs(config, model_output, data), distill)
    metrics["distill_loss"] = Metric(value=term.detach(), aggregation=metrics["actor/pg_loss"].aggregation)
    return loss + float(coef) * term, metrics


def _inputs(config: Any, model_output: Any, data: TensorDict) -> LossInputs:
    # verl's loss has just put the mini-batch's size into config.global_batch_info
    fields = data.select("old_log_probs", "teacher_log_probs", _mask_field(data)).to_padded_tensor()
    mask = fields[_mask_field(data)].bool()
    old = fields["old_log_probs"]
    log_probs = no_padding_2_padding(model_output["log_probs"], data)

    def aggregate(matrix: torch.Tensor) -> torch.Tensor:
        # off the mask a matrix may hold anything, and 0 · inf is not 0
        kept = torch.where(mask, matrix, torch.zeros_like(matrix))
        return agg_loss(kept, mask, config.loss_agg_mode, **config.global_batch_info)

    def clipped(advantages: torch.Tensor) -> torch.Tensor:
        policy_loss = get_policy_loss_fn(config.policy_loss.get("loss_mode", "vanilla"))
        return policy_loss(old, log_probs, advantages, mask, loss_agg_mode=config.loss_agg_mode, config=config)[0]

    return LossInputs(log_probs, old, fields["teacher_log_probs"], mask, aggregate, clipped)


def _mask_field(data: TensorDict) -> str:
    if "action_mask" in data:
        return "action_mask"
    _say_once("the rollout has no action_mask: the distillation term is taken on response_mask")
    return "response_mask"


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)
