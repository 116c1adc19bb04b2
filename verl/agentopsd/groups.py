"""Statistics of a group: the episodes of one game in one update. Lost episodes count in none of them (I9)."""

import torch
from torch import Tensor

RELATIVE = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "opo")
"""verl's estimators that compare an episode with its group alone: equal outcomes have no advantage."""


def group_success_rate(won: Tensor, valid: Tensor, group: Tensor) -> Tensor:
    """S/G per row, (N,) float64, over the group's valid episodes; 0 for a group without any. All inputs (N,)."""
    return _group_sum(won.double() * valid, group) / _group_sum(valid.double(), group).clamp(min=1)


def group_advantage(outcome: Tensor, valid: Tensor, group: Tensor, eps: float = 1e-6) -> Tensor:
    """GRPO's (R - mean R)/(std R + eps) over the group's valid episodes, sample std; (N,) in ``outcome``'s dtype.

    0 for episodes lost to the environment (not ``valid``) and for a group's only valid one. All inputs (N,)."""
    valid, G = valid.bool(), _group_sum(valid.double(), group).clamp(min=1)
    R = outcome.double().where(valid, 0.0)
    d = (R - _group_sum(R, group) / G).where(valid, 0.0)
    d = d.where(d.abs() > 1e-12 * R.abs(), 0.0)  # equal outcomes: 0, not the rounding of their mean
    return (d / ((_group_sum(d.square(), group) / (G - 1).clamp(min=1)).sqrt() + eps)).to(outcome.dtype)


def _group_sum(x: Tensor, group: Tensor) -> Tensor:
    index = group.unique(return_inverse=True)[1]
    return torch.zeros_like(x).index_add(0, index, x)[index]
