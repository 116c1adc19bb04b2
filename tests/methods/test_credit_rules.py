"""How each method spreads A over the tokens of three trajectories, by hand."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.agentopsd.config import credit_config
from verl.agentopsd.credit import CreditConfig, agentopsd_credit
from verl.agentopsd.main import compose_config
from verl.agentopsd.methods import METHODS
from verl.agentopsd.methods.base import even_credit
from verl.agentopsd.methods.rlsd import rlsd_credit
from verl.agentopsd.methods.step_opsd import step_credit

A = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
TURNS = torch.tensor([[0, 0, -1, 1, 2], [0, -1, 1, 1, -1], [0, -1, -1, -1, -1]])
D = torch.tensor(
    [[0.1, 0.2, 9.0, -0.4, 0.05], [0.3, 9.0, -0.1, 0.02, 9.0], [-0.7, 9.0, 9.0, 9.0, 9.0]], dtype=torch.float64
)
RATE = torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)


def test_every_method_says_what_it_needs():
    assert {name: (m.rescored, m.credit is not None, m.loss_term is not None) for name, m in METHODS.items()} == {
        "grpo": ("none", False, False),
        "skill_grpo": ("none", False, False),
        "agentopsd": ("nonzero", True, False),
        "step_opsd": ("nonzero", True, False),
        "rlsd": ("nonzero", True, False),
        "opd": ("valid", True, True),
        "sdar": ("valid", True, True),
        "grpo_opsd": ("valid", True, True),
        "skill_sd": ("valid", True, True),
    }


def test_rlsd_weighs_every_token():
    credit = rlsd_credit(A, D, TURNS, RATE, CreditConfig(lam=0.5, bound=0.2))
    for row in range(3):
        for token in range(5):
            expected = 0.0
            if TURNS[row, token] >= 0:
                weight = math.exp(math.copysign(1, A[row]) * D[row, token])
                expected = float(A[row]) * (0.5 + 0.5 * min(max(weight, 0.8), 1.2))
            assert credit.advantages[row, token].item() == pytest.approx(expected, abs=1e-12)
    assert credit.turn_mask.sum(-1).tolist() == [4, 3, 1]
    assert credit.evidence[0].tolist() == [0.1, 0.2, -0.4, 0.05]
    assert credit.weights[1, :3].tolist() == pytest.approx([0.8, math.exp(0.1), math.exp(-0.02)])


@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=12), st.floats(-3, 3), st.floats(0, 1), st.floats(0, 0.9))
def test_rlsd_keeps_sign_and_bounds(gaps: list[float], advantage: float, lam: float, bound: float):
    base = torch.tensor([advantage], dtype=torch.float64)
    d = torch.tensor([gaps], dtype=torch.float64)
    turns = torch.arange(len(gaps))[None]
    out = rlsd_credit(base, d, turns, torch.tensor([0.5]), CreditConfig(lam=lam, bound=bound)).advantages
    assert out.isfinite().all()
    low, high = sorted((advantage * (1 - lam * bound), advantage * (1 + lam * bound)))
    assert ((out >= low - 1e-12) & (out <= high + 1e-12)).all()


def test_step_opsd_ranks_turns_by_their_own_evidence():
    credit = step_credit(A, D, TURNS, RATE, CreditConfig(lam=0.5, bound=0.2, eps=1e-4, gamma=0.95))
    for row, turns in enumerate([[[0, 1], [3], [4]], [[0], [2, 3]], [[0]]]):
        q = np.array([np.sign(A[row].item()) * sum(D[row, t].item() for t in tokens) for tokens in turns])
        weights = np.clip(1 + 0.2 * (q - q.mean()) / (q.std() + 1e-4), 0.8, 1.2)
        for tokens, weight in zip(turns, weights, strict=True):
            for token in tokens:
                expected = A[row].item() * (0.5 + 0.5 * weight)
                assert credit.advantages[row, token].item() == pytest.approx(expected, abs=1e-12)


def test_step_opsd_forgets_what_came_before():
    """Evidence of an earlier turn moves AgentOPSD's later weights, never Step-OPSD's order of turns."""
    for gamma in (0.0, 0.5, 1.0):
        one = step_credit(A, D, TURNS, RATE, CreditConfig(gamma=gamma))
        other = step_credit(A, D, TURNS, RATE, CreditConfig(gamma=0.95, recursion=True))
        assert torch.equal(one.advantages, other.advantages)
    full = agentopsd_credit(A, D, TURNS, RATE, CreditConfig())
    assert not torch.equal(full.advantages, other.advantages)


def test_step_opsd_is_agentopsd_without_recursion():
    """``method=step_opsd`` and ``method=agentopsd_no_recursion``: one rule with the same constants."""
    step, ablation = (compose_config([f"method={name}"]) for name in ("step_opsd", "agentopsd_no_recursion"))
    one = step_credit(A, D, TURNS, RATE, credit_config(step))
    other = agentopsd_credit(A, D, TURNS, RATE, credit_config(ablation))
    for field in dataclasses.fields(one):
        assert torch.equal(getattr(one, field.name), getattr(other, field.name)), field.name


def test_methods_with_a_loss_term_leave_a_alone():
    credit = even_credit(A.float(), D.float(), TURNS, RATE, CreditConfig())
    assert torch.equal(credit.advantages, A.float()[:, None] * (TURNS >= 0))
    assert credit.weights[0].tolist() == [1, 1, 1] and not credit.delta.any()
    assert credit.evidence[0].tolist() == pytest.approx([0.3, -0.4, 0.05], abs=1e-6)


@pytest.mark.parametrize("name", ["agentopsd", "step_opsd", "rlsd"])
def test_lambda_0_is_grpo_bit_for_bit(name: str):
    rule = METHODS[name].credit
    assert rule is not None
    out = rule(A.float(), D.float(), TURNS, RATE, CreditConfig(lam=0.0)).advantages
    assert torch.equal(out, A.float()[:, None] * (TURNS >= 0))


@pytest.mark.parametrize("name", ["agentopsd", "step_opsd", "rlsd", "opd"])
def test_what_is_not_finite_is_refused(name: str):
    rule = METHODS[name].credit
    assert rule is not None
    gaps = D.clone()
    gaps[0, 0] = math.inf
    with pytest.raises(ValueError, match="not finite"):
        rule(A, gaps, TURNS, RATE, CreditConfig())


def test_dealt_evidence_is_the_same_evidence_on_other_turns():
    order = torch.tensor([[2, 0, 1], [1, 0, 2], [0, 1, 2]])
    plain, dealt = (agentopsd_credit(A, D, TURNS, RATE, CreditConfig(), order=o) for o in (None, order))
    assert dealt.evidence[0].tolist() == [plain.evidence[0, k].item() for k in (2, 0, 1)]
    assert dealt.evidence[1, :2].tolist() == [plain.evidence[1, 1].item(), plain.evidence[1, 0].item()]
    moved = torch.tensor([[0.05, 0.3, -0.4]], dtype=torch.float64)
    expected = agentopsd_credit(A[:1], moved, torch.arange(3)[None], RATE[:1], CreditConfig())
    assert dealt.weights[0].tolist() == pytest.approx(expected.weights[0].tolist())
