"""What a method is: which episodes the teacher rereads, how A is spread over tokens, and what is added to the loss.

Throughout, d_t = log π_T(y_t) − log π_old(y_t) is the teacher's gap on the action token y_t. It carries no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from verl.agentopsd.credit import Credit, CreditConfig, agentopsd_credit

Rescored = Literal["none", "nonzero", "valid"]
"""Which episodes the teacher rereads: none; those with A ≠ 0; all that the environment did not lose."""


@dataclass(frozen=True)
class DistillConfig:
    """Constants of the methods that add a loss term (``agentopsd.distill``).

    Attributes:
        coef: weight of the term; 0 leaves verl's loss as it is, bit for bit.
        warmdown_steps: ``coef`` falls linearly to 0 over this many updates; 0 keeps it constant.
        pg_coef: weight of the policy gradient on A; 0 is pure distillation.
        beta: β of SDAR's gate σ(β d), 1/nats.
        kl: estimator of the reverse KL in ``grpo_opsd``: ``k2`` or ``k3+`` (value of k3, gradient of k2).
    """

    coef: float = 0.0
    warmdown_steps: int = 0
    pg_coef: float = 1.0
    beta: float = 5.0
    kl: str = "k3+"

    def coef_at(self, step: int) -> float:
        """The weight after ``step`` finished updates."""
        return self.coef * max(0.0, 1 - step / self.warmdown_steps) if self.warmdown_steps else self.coef


@dataclass(frozen=True)
class LossInputs:
    """What a loss term sees of a micro-batch; all (B,T), zero-padded at the right.

    Attributes:
        log_probs: log π_θ of the response tokens, the only one with a gradient.
        old_log_probs: log π_old.
        teacher_log_probs: log π_T.
        mask: bool, action tokens of the episodes that the teacher reread.
        aggregate: (B,T) matrix → scalar over ``mask``, as ``actor.loss_agg_mode`` says, over the whole mini-batch.
        clipped: (B,T) advantages → scalar, the run's own clipped policy loss on ``mask``.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    teacher_log_probs: Tensor
    mask: Tensor
    aggregate: Callable[[Tensor], Tensor]
    clipped: Callable[[Tensor], Tensor]

    @property
    def gap(self) -> Tensor:
        """(B,T) d_t, without gradient, 0 off the mask."""
        return ((self.teacher_log_probs - self.old_log_probs) * self.mask).detach()


LossTerm = Callable[[LossInputs, DistillConfig], Tensor]
CreditRule = Callable[..., Credit]
"""``(advantages (N,), gaps (N,T), turn_ids (N,T), success_rate (N,), constants) -> Credit``"""


@dataclass(frozen=True)
class Method:
    """One method.

    Attributes:
        name: the value of ``algorithm.adv_estimator``.
        rescored: see :data:`Rescored`.
        credit: spreads A over the tokens of the reread episodes.
        loss_term: added to verl's loss with weight ``agentopsd.distill.coef``.
        believes: ``credit`` has a belief, so that belief metrics mean something.
        student_skill: the student reads the skill in training.
    """

    name: str
    rescored: Rescored = "none"
    credit: CreditRule | None = None
    loss_term: LossTerm | None = None
    believes: bool = False
    student_skill: bool = False


def even_credit(
    advantages: Tensor, gaps: Tensor, turn_ids: Tensor, success_rate: Tensor, config: CreditConfig
) -> Credit:
    """A on every action token, weight 1, the belief at its prior; the evidence is kept for the records."""
    one = agentopsd_credit(advantages, gaps, turn_ids, success_rate, config)
    tokens = torch.where(turn_ids >= 0, advantages[:, None], torch.zeros_like(advantages[:, None]))
    return Credit(
        advantages=tokens,
        evidence=one.evidence,
        prior=one.prior,
        belief=one.prior[:, None] * one.turn_mask,
        delta=torch.zeros_like(one.delta),
        weights=one.turn_mask.double(),
        turn_mask=one.turn_mask,
    )
