"""AgentOPSD credit: from the teacher's token gaps to one bounded advantage per turn (arXiv 2608.05987).

GRPO gives all of an episode the same advantage A. The teacher, the same weights with a skill in the prompt, likes some
turns better than the student did: evidence e_k about turn k. Evidence moves a belief B_k in success, and the turns that
move it most get a larger share of A: never another sign, never beyond a factor 1 ± λb.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.agentopsd.turns import by_token, by_turn


@dataclass(frozen=True)
class CreditConfig:
    """The constants λ, γ, b, ε and the ablations."""

    lam: float = 0.5
    gamma: float = 0.95
    bound: float = 0.2
    eps: float = 1e-4
    granularity: str = "turn"  # "token": every action token is a turn of its own
    recursion: bool = True  # False ranks turns by e_k instead of ΔB_k; the belief is still reported
    prior: str | float = "group"  # B_0: the group's success rate, or this number
    direction: str = "signed"  # "magnitude" ranks by |ΔB_k|, whatever the outcome
    # raw: sum over the turn's tokens; token_mean: their mean; clip: the sum cut to ±1; centered: the sum less its mean
    # over the trajectory; zscore: half of (e - mean)/(std + ε), both over all turns of the batch's rows with A ≠ 0
    evidence: str = "raw"
    warmdown_steps: int = 0  # λ falls linearly to 0 over this many updates; 0 keeps it constant

    def __post_init__(self) -> None:
        for key, allowed in (
            ("granularity", ("turn", "token")),
            ("direction", ("signed", "magnitude")),
            ("evidence", ("raw", "token_mean", "clip", "centered", "zscore")),
        ):
            if (value := getattr(self, key)) not in allowed:
                raise ValueError(f"agentopsd.{key}={value!r} must be one of {', '.join(allowed)}")
        in_range = 0 <= self.lam <= 1 and 0 <= self.gamma <= 1 and 0 <= self.bound < 1 and 0 < self.eps < 0.5
        if not in_range or self.warmdown_steps < 0:
            raise ValueError(f"lambda, gamma in [0,1]; bound in [0,1); eps in (0,0.5); warmdown_steps >= 0; not {self}")
        if self.prior != "group" and not (isinstance(self.prior, int | float) and 0 <= self.prior <= 1):
            raise ValueError(f"agentopsd.prior={self.prior!r} must be 'group' or a number from 0 to 1")

    def lambda_at(self, step: int) -> float:
        """λ after ``step`` finished updates."""
        return self.lam * max(0.0, 1 - step / self.warmdown_steps) if self.warmdown_steps else self.lam


@dataclass(frozen=True)
class Credit:
    """Every intermediate value; N rows, one per trajectory. (N,K) fields are float64 and 0 outside ``turn_mask``."""

    advantages: Tensor  # (N,T) Ã of the token's turn, dtype of the base advantage, 0 off the action mask
    evidence: Tensor  # (N,K) e_k
    prior: Tensor  # (N,) B_0
    belief: Tensor  # (N,K) B_k
    delta: Tensor  # (N,K) ΔB_k
    weights: Tensor  # (N,K) w_k
    turn_mask: Tensor  # (N,K) bool: the row has a k-th turn (with granularity=token, a k-th action token)


@torch.no_grad()
def agentopsd_credit(
    advantages: Tensor,
    gaps: Tensor,
    turn_ids: Tensor,
    success_rate: Tensor,
    config: CreditConfig,
    order: Tensor | None = None,
) -> Credit:
    """Re-weights one advantage per trajectory into one per turn; a ValueError names non-finite or disordered input.

    Args:
        advantages: (N,) base advantages A; a row with A = 0 keeps weight 1 and stays 0.
        gaps: (N,T) log π(y_t | ctx + skill) - log π(y_t | ctx) in nats; read on action tokens only.
        turn_ids: (N,T) long, the turn of each action token, 0..K-1 in order; -1 off the action mask.
        success_rate: (N,) S/G of the row's group.
        order: (N,K) int64, a control: turn (or token) k gets the transformed evidence of ``order[:, k]``.
    """
    A = advantages[:, None]
    if config.granularity == "token":
        turn_ids = token_ids(turn_ids)
    K = max(int(turn_ids.max()) + 1 if turn_ids.numel() else 0, 1)
    tokens, e = by_turn(gaps, turn_ids, K)
    if not (A.isfinite().all() and e.isfinite().all()):
        bad = int((~A.isfinite()).sum() + (~gaps.isfinite() & (turn_ids >= 0)).sum())
        raise ValueError(f"{bad} base advantages or action-token gaps are not finite: check the rewards and log-probs")
    turns = tokens > 0
    n = turns.sum(-1, keepdim=True).clamp(min=1)
    if (turns[:, 1:] & ~turns[:, :-1]).any():
        raise ValueError("turn_ids skip a turn: every row must number its turns 0, 1, … without a gap")
    if config.evidence == "token_mean":
        e = e / tokens.clamp(min=1)
    elif config.evidence == "clip":
        e = e.clamp(-1, 1)
    elif config.evidence == "centered":
        e = (e - e.sum(-1, keepdim=True) / n) * turns
    elif config.evidence == "zscore" and (scored := turns & (A != 0)).any():
        e = 0.5 * (e - e[scored].mean()) / (e[scored].std(correction=0) + config.eps) * scored
    e = e if order is None else e.gather(1, order)
    rate = success_rate.double()
    B_0 = (rate if config.prior == "group" else rate * 0 + float(config.prior)).clamp(config.eps, 1 - config.eps)
    c = torch.nn.functional.pad(_discounted_sum(e, config.gamma), (1, 0))  # c_0 = 0
    B = torch.sigmoid(torch.logit(B_0)[:, None] + c)
    dB = B.diff(dim=-1) * turns
    q = A.double().sign() * (dB if config.recursion else e)
    q = q.abs() if config.direction == "magnitude" else q
    d = (q - q.sum(-1, keepdim=True) / n) * turns
    z = d / ((d.square().sum(-1, keepdim=True) / n).sqrt() + config.eps)
    w = (1 + config.bound * z).clamp(1 - config.bound, 1 + config.bound)
    low, high = 1 - config.lam * config.bound, 1 + config.lam * config.bound
    m = (1 + config.lam * (w - 1)).clamp(low, high)  # (1-λ) + λw, in the form that is exact at λ = 0 and at w = 1
    A_k = (A.double() * m).to(A.dtype)
    ratio = A_k.double() / A.double()
    A_k = torch.where((ratio < low) | (ratio > high), torch.nextafter(A_k, A), A_k)  # rounding may not leave the bounds
    return Credit(by_token(A_k, turn_ids, off=A * 0), e, B_0, B[:, 1:] * turns, dB, w * turns, turns)


def token_ids(turn_ids: Tensor) -> Tensor:
    """(N,T) int64: every action token as a turn of its own, numbered 0, 1, …; -1 off the action mask."""
    return torch.where(turn_ids >= 0, (turn_ids >= 0).long().cumsum(-1) - 1, -1)


def _discounted_sum(e: Tensor, gamma: float) -> Tensor:
    """c_k = γ c_{k-1} + e_k by doubling: after the pass with shift s, c_k holds its last 2s terms."""
    c, s = e, 1
    while s < e.shape[-1]:
        c = torch.cat([c[:, :s], c[:, s:] + gamma**s * c[:, :-s]], dim=-1)
        s *= 2
    return c


if __name__ == "__main__":
    from verl.agentopsd.evaluation.recredit import main

    raise SystemExit(main())
