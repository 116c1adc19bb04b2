"""RLSD: the outcome gives the direction of every token's update, the teacher its size.

    Ã_t = A [(1−λ) + λ clip(exp(sign(A) d_t), 1−b, 1+b)]        λ from .5 linearly to 0, b .2

Source: Self-Distilled RLVR, arXiv 2604.03128. With A > 0 a token that the teacher likes better counts more; with A < 0
it is blamed less. The sign of A never changes.
"""

import torch
from torch import Tensor

from verl.agentopsd.credit import Credit, CreditConfig
from verl.agentopsd.methods.base import Method


@torch.no_grad()
def rlsd_credit(
    advantages: Tensor, gaps: Tensor, turn_ids: Tensor, success_rate: Tensor, config: CreditConfig
) -> Credit:
    """One weight per action token; every token is a turn of its own in the result, the belief stays at its prior.

    Args:
        advantages: (N,) base advantages A.
        gaps: (N,T) d_t in nats; read on action tokens only.
        turn_ids: (N,T) int64, -1 off the action mask.
        success_rate: (N,) S/G of the row's group.

    Raises:
        ValueError: an advantage or an action token's gap is not finite.
    """
    mask, A = turn_ids >= 0, advantages[:, None].double()
    d = torch.where(mask, gaps.double(), 0.0)
    if not (d.isfinite().all() and A.isfinite().all()):
        raise ValueError("a base advantage or an action-token gap is not finite: check the rewards and log-probs")
    w = torch.exp(A.sign() * d).clamp(1 - config.bound, 1 + config.bound)
    tokens = torch.where(mask, A * (1 + config.lam * (w - 1)), 0.0)
    prior = success_rate.double().clamp(config.eps, 1 - config.eps)
    own = mask.sum(-1)
    each = (
        torch.arange(max(int(own.max()) if own.numel() else 0, 1)) < own[:, None]
    )  # (N,K) action tokens, left-aligned

    def packed(x: Tensor) -> Tensor:
        result = torch.zeros(each.shape, dtype=torch.float64)
        result[each] = x[mask]
        return result

    return Credit(tokens.to(advantages.dtype), packed(d), prior, prior[:, None] * each, packed(d * 0), packed(w), each)


METHOD = Method("rlsd", rescored="nonzero", credit=rlsd_credit)
