"""The credit rule against worked numbers, a plain loop, and its promises (bounds, sign, invariances)."""

import ast
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.agentopsd import credit as credit_module
from verl.agentopsd import turns as turns_module
from verl.agentopsd.credit import Credit, CreditConfig, agentopsd_credit
from verl.agentopsd.groups import group_advantage, group_success_rate
from verl.agentopsd.turns import by_token, by_turn

CONFIGS = {
    "default": CreditConfig(),
    "eps_1e-3": CreditConfig(eps=1e-3),
    "direction_magnitude": CreditConfig(direction="magnitude"),
    "prior_0.5": CreditConfig(prior=0.5),
    "no_recursion": CreditConfig(recursion=False),
    "single_turn": CreditConfig(),
    "lambda_0": CreditConfig(lam=0.0),
    "granularity_token": CreditConfig(granularity="token"),
}


@pytest.fixture(scope="module")
def worked(vectors: Path) -> dict:
    return json.loads((vectors / "credit.json").read_text())


def as_row(turns: list[list[float]], lead: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaps and turn ids of one row: every turn is preceded by ``lead`` context columns that hold garbage."""
    gaps, ids = [], []
    for k, tokens in enumerate(turns):
        gaps += [math.nan] * lead + tokens
        ids += [-1] * lead + [k] * len(tokens)
    return torch.tensor([gaps], dtype=torch.float64), torch.tensor([ids])


def batch(rows: list[list[list[float]]], lead: int = 0, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [as_row(turns, lead) for turns in rows]
    width = max(g.shape[1] for g, _ in parts) + pad
    gaps, ids = torch.full((len(rows), width), math.nan, dtype=torch.float64), torch.full((len(rows), width), -1)
    for i, (g, t) in enumerate(parts):
        gaps[i, : g.shape[1]], ids[i, : t.shape[1]] = g[0], t[0]
    return gaps, ids


def by_hand(A: float, turns: list[list[float]], rate: float, config: CreditConfig) -> dict[str, list[float]]:
    """The rule for one trajectory, turn after turn, in plain Python."""
    if config.granularity == "token":
        turns = [[gap] for tokens in turns for gap in tokens]
    e = [sum(tokens) for tokens in turns]
    if config.evidence == "token_mean":
        e = [x / len(tokens) for x, tokens in zip(e, turns, strict=True)]
    if config.evidence == "clip":
        e = [min(1.0, max(-1.0, x)) for x in e]
    if config.evidence == "centered":
        e = [x - sum(e) / len(e) for x in e]
    b_0 = min(1 - config.eps, max(config.eps, rate if config.prior == "group" else float(config.prior)))
    logit, c, before = math.log(b_0 / (1 - b_0)), 0.0, b_0
    beliefs, deltas = [], []
    for x in e:
        c = config.gamma * c + x
        s = logit + c
        belief = 1 / (1 + math.exp(-s)) if s >= 0 else math.exp(s) / (1 + math.exp(s))
        beliefs.append(belief)
        deltas.append(belief - before)
        before = belief
    sign = (A > 0) - (A < 0)
    q = [sign * x for x in (deltas if config.recursion else e)]
    q = [abs(x) for x in q] if config.direction == "magnitude" else q
    mean = sum(q) / len(q)
    std = math.sqrt(sum((x - mean) ** 2 for x in q) / len(q))
    w = [min(1 + config.bound, max(1 - config.bound, 1 + config.bound * (x - mean) / (std + config.eps))) for x in q]
    shaped = [A * ((1 - config.lam) + config.lam * x) for x in w]
    return {"e": e, "B": beliefs, "dB": deltas, "w": w, "A_tilde": shaped, "b0": [b_0]}


def per_turn(result: Credit, turn_ids: torch.Tensor, row: int = 0) -> list[float]:
    """Ã of each turn, read back from the first token of the turn."""
    first = {int(k): result.advantages[row, t].item() for t, k in reversed(list(enumerate(turn_ids[row]))) if k >= 0}
    return [first[k] for k in sorted(first)]


def check(result: Credit, expected: dict, turn_ids: torch.Tensor, row: int = 0, tol: float = 1e-9) -> None:
    K = int(result.turn_mask[row].sum())
    near = {"rel": tol, "abs": tol}
    assert K == len(expected["e"])
    assert result.prior[row].item() == pytest.approx(np.ravel(expected["b0"])[0], **near)
    for name, tensor in (("e", result.evidence), ("B", result.belief), ("dB", result.delta), ("w", result.weights)):
        assert tensor[row, :K].tolist() == pytest.approx(expected[name], **near), name
        assert (tensor[row, K:] == 0).all(), name
    assert per_turn(result, turn_ids, row) == pytest.approx(expected["A_tilde"], **near)


# ---- worked numbers


@pytest.mark.parametrize("variant", CONFIGS)
@pytest.mark.parametrize("outcome", ["success", "failure"])
def test_worked_numbers(worked: dict, outcome: str, variant: str) -> None:
    expected = worked[outcome][variant]
    turns = worked["inputs"]["token_gaps"]
    gaps, ids = as_row([[expected["e"][0]]] if variant == "single_turn" else turns, lead=2)
    A = torch.tensor([worked["A_seq"][outcome == "failure"]], dtype=torch.float64)
    rate = torch.tensor([worked["inputs"]["S"] / worked["inputs"]["G"]])
    result = agentopsd_credit(A, gaps, ids, rate, CONFIGS[variant])
    if variant == "granularity_token":
        ids = torch.where(ids >= 0, (ids >= 0).cumsum(-1) - 1, -1)
    check(result, expected, ids)


def test_every_worked_variant_is_covered(worked: dict) -> None:
    assert set(worked["success"]) == set(worked["failure"]) == set(CONFIGS)


@pytest.mark.parametrize(("name", "rate"), [("all_failed", 0.0), ("all_succeeded", 1.0)])
def test_worked_zero_advantage_groups(worked: dict, name: str, rate: float) -> None:
    gaps, ids = as_row(worked["inputs"]["token_gaps"])
    result = agentopsd_credit(torch.zeros(1, dtype=torch.float64), gaps, ids, torch.tensor([rate]), CreditConfig())
    check(result, worked["zero_advantage_groups"][name], ids)


def test_worked_base_advantages(worked: dict) -> None:
    S, G = worked["inputs"]["S"], worked["inputs"]["G"]
    won = torch.tensor([1.0] * S + [0.0] * (G - S), dtype=torch.float64)
    A = group_advantage(won, torch.ones(G), torch.zeros(G, dtype=torch.long))
    assert A.tolist() == pytest.approx([worked["A_seq"][0]] * S + [worked["A_seq"][1]] * (G - S), abs=1e-9)


# ---- properties

gap = st.floats(-1e4, 1e4, allow_subnormal=False)
mild = st.floats(-3, 3, allow_subnormal=False)


def rows_of(element: st.SearchStrategy[float], max_rows: int = 4, max_turns: int = 6) -> st.SearchStrategy:
    turns = st.lists(st.lists(element, min_size=1, max_size=4), min_size=1, max_size=max_turns)
    return st.lists(turns, min_size=1, max_size=max_rows)


configs = st.builds(
    CreditConfig,
    lam=st.floats(0, 1),
    gamma=st.floats(0, 1),
    bound=st.floats(0, 0.99),
    eps=st.sampled_from([1e-4, 1e-3, 1e-8]),
    granularity=st.sampled_from(["turn", "token"]),
    recursion=st.booleans(),
    prior=st.one_of(st.just("group"), st.floats(0, 1)),
    direction=st.sampled_from(["signed", "magnitude"]),
    evidence=st.sampled_from(["raw", "clip", "centered", "token_mean"]),
)
magnitude = st.floats(1e-6, 1e3)
advantage = st.one_of(st.just(0.0), magnitude, magnitude.map(lambda x: -x))


def inputs_for(data: st.DataObject, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    A = data.draw(st.lists(advantage, min_size=n, max_size=n))
    rate = data.draw(st.lists(st.sampled_from([0.0, 0.125, 0.5, 1.0]), min_size=n, max_size=n))
    return torch.tensor(A, dtype=torch.float64), torch.tensor(rate)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), rows=rows_of(mild), config=configs)
def test_equals_the_plain_loop(data: st.DataObject, rows: list, config: CreditConfig) -> None:
    config = replace(config, eps=max(config.eps, 1e-4))  # a smaller ε magnifies rounding beyond the tolerance
    A, rate = inputs_for(data, len(rows))
    gaps, ids = batch(rows, lead=1, pad=2)
    result = agentopsd_credit(A, gaps, ids, rate, config)
    if config.granularity == "token":
        ids = torch.where(ids >= 0, (ids >= 0).cumsum(-1) - 1, -1)
    for i, turns in enumerate(rows):
        check(result, by_hand(A[i].item(), turns, rate[i].item(), config), ids, i, tol=1e-8)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), rows=rows_of(gap), config=configs, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_lambda_0_is_the_base_estimator_bit_for_bit(data, rows, config, dtype) -> None:
    A, rate = inputs_for(data, len(rows))
    A = A.to(dtype)
    gaps, ids = batch(rows, lead=1)
    result = agentopsd_credit(A, gaps, ids, rate, replace(config, lam=0.0))
    base = A[:, None] * (ids >= 0)  # how verl spreads an outcome advantage over its tokens
    as_int = torch.int32 if dtype == torch.float32 else torch.int64
    assert result.advantages.dtype == dtype
    assert torch.equal(result.advantages.view(as_int), base.contiguous().view(as_int))


@settings(max_examples=200, deadline=None)
@given(data=st.data(), rows=rows_of(gap), config=configs, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_sign_bounds_and_finiteness(data, rows, config, dtype) -> None:
    A, rate = inputs_for(data, len(rows))
    A = A.to(dtype)
    gaps, ids = batch(rows)
    result = agentopsd_credit(A, gaps, ids, rate, config)
    low, high = 1 - config.lam * config.bound, 1 + config.lam * config.bound
    for field in ("advantages", "evidence", "prior", "belief", "delta", "weights"):
        assert getattr(result, field).isfinite().all(), field
    on = ids >= 0
    base = A[:, None].expand_as(ids)
    assert torch.equal(result.advantages.sign()[on], base.sign()[on])
    scored = on & (base != 0)
    ratio = result.advantages.double()[scored] / base.double()[scored]
    assert ((low <= ratio) & (ratio <= high)).all()
    zero = A == 0
    assert (result.advantages[zero] == 0).all()
    assert (result.weights[zero] == result.turn_mask[zero].double()).all()
    assert (result.advantages[~on] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_does_not_leave_the_bounds(dtype: torch.dtype) -> None:
    """A·(1+λb) rounded to the advantages' dtype may lie over the bound; the result must not."""
    A = torch.rand(4000, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 3
    A[:4] = torch.tensor(
        [1e-45 if dtype == torch.float32 else 5e-324, torch.finfo(dtype).tiny, 1e-30, 1e30], dtype=dtype
    )
    gaps, ids = batch([[[5.0], [-1.0], [-1.0], [-1.0], [-1.0], [-1.0]]] * len(A))
    config = CreditConfig(lam=0.5, bound=0.2)
    result = agentopsd_credit(A, gaps, ids, torch.full((len(A),), 0.5), config)
    assert result.weights.max() == 1.2
    ratio = result.advantages.double() / A.double()[:, None]
    assert (ratio.max() <= 1 + config.lam * config.bound) and (ratio.min() >= 1 - config.lam * config.bound)


@settings(max_examples=60, deadline=None)
@given(e=gap, A=advantage, config=configs)
def test_a_single_turn_gets_exactly_the_base_advantage(e: float, A: float, config: CreditConfig) -> None:
    gaps, ids = batch([[[e]]])
    base = torch.tensor([A], dtype=torch.float32)
    result = agentopsd_credit(base, gaps, ids, torch.tensor([0.5]), config)
    assert result.weights.item() == 1.0
    assert result.advantages.item() == base.item()


@settings(max_examples=100, deadline=None)
@given(data=st.data(), rows=rows_of(mild, max_rows=6), config=configs)
def test_row_order_padding_and_chunking_change_nothing(data, rows, config) -> None:
    config = replace(config, eps=max(config.eps, 1e-4))
    A, rate = inputs_for(data, len(rows))
    gaps, ids = batch(rows)
    whole = agentopsd_credit(A, gaps, ids, rate, config)

    order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
    shuffled = agentopsd_credit(A[order], gaps[order], ids[order], rate[order], config)
    wide_gaps, wide_ids = batch(rows, pad=5)
    empty = torch.full_like(wide_ids[:1], -1)  # a padding row has no action tokens
    padded = agentopsd_credit(
        torch.cat([A, A[:1]]),
        torch.cat([wide_gaps, torch.full_like(wide_gaps[:1], torch.nan)]),
        torch.cat([wide_ids, empty]),
        torch.cat([rate, rate[:1]]),
        config,
    )
    chunks = [
        agentopsd_credit(A[i : i + 1], gaps[i : i + 1], ids[i : i + 1], rate[i : i + 1], config) for i in range(len(A))
    ]

    near = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(shuffled.advantages, whole.advantages[order], **near)
    torch.testing.assert_close(padded.advantages[:-1, : ids.shape[1]], whole.advantages, **near)
    assert (padded.advantages[-1] == 0).all() and (padded.advantages[:, ids.shape[1] :] == 0).all()
    torch.testing.assert_close(torch.cat([c.advantages for c in chunks]), whole.advantages, **near)


# ---- options


def test_zscore_evidence_uses_the_turns_of_scored_rows_only() -> None:
    gaps, ids = batch([[[1.0], [3.0]], [[5.0]], [[100.0], [-100.0]]])
    A = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    result = agentopsd_credit(A, gaps, ids, torch.full((3,), 0.5), CreditConfig(evidence="zscore", eps=1e-6))
    std = math.sqrt(8 / 3)  # of 1, 3, 5
    expected = [0.5 * (x - 3) / (std + 1e-6) for x in (1.0, 3.0, 5.0)]
    assert result.evidence[0].tolist() == pytest.approx(expected[:2])
    assert result.evidence[1].tolist() == pytest.approx([expected[2], 0.0])
    assert (result.evidence[2] == 0).all()


def test_zscore_evidence_without_scored_rows_changes_nothing() -> None:
    gaps, ids = batch([[[1.0], [3.0]]])
    result = agentopsd_credit(torch.zeros(1), gaps, ids, torch.ones(1), CreditConfig(evidence="zscore"))
    assert result.evidence.tolist() == [[1.0, 3.0]]
    assert (result.advantages == 0).all()


def test_unscored_rows_stay_zero_everywhere() -> None:
    gaps, ids = batch([[[0.0, 0.0], [0.0]], [[0.0]]])
    result = agentopsd_credit(torch.zeros(2), gaps, ids, torch.tensor([0.0, 1.0]), CreditConfig())
    for field in (result.advantages, result.evidence, result.delta):
        assert (field == 0).all()
    assert (result.weights == result.turn_mask.double()).all()


@pytest.mark.parametrize("granularity", ["turn", "token"])
def test_long_trajectories_equal_the_sequential_recursion(granularity: str) -> None:
    T = 16_000 if granularity == "token" else 3_000
    e = np.random.default_rng(0).normal(0, 0.3, T)
    gaps = torch.tensor(e)[None]
    ids = torch.arange(T)[None] if granularity == "turn" else torch.zeros(1, T, dtype=torch.long)
    config = CreditConfig(granularity=granularity, gamma=0.999)
    result = agentopsd_credit(torch.ones(1, dtype=torch.float64), gaps, ids, torch.tensor([0.5]), config)
    expected = by_hand(1.0, [[x] for x in e.tolist()], 0.5, config)
    assert result.belief[0].tolist() == pytest.approx(expected["B"], abs=1e-9)
    assert result.advantages[0].tolist() == pytest.approx(expected["A_tilde"], abs=1e-9)


def test_an_empty_batch_and_rows_without_actions() -> None:
    none = agentopsd_credit(torch.ones(0), torch.ones(0, 3), torch.ones(0, 3).long(), torch.ones(0), CreditConfig())
    assert none.advantages.shape == (0, 3)
    idle = agentopsd_credit(torch.ones(2), torch.ones(2, 3), torch.full((2, 3), -1), torch.ones(2), CreditConfig())
    assert (idle.advantages == 0).all() and not idle.turn_mask.any()


def test_lambda_falls_linearly_to_zero() -> None:
    config = CreditConfig(lam=0.4, warmdown_steps=4)
    assert [config.lambda_at(s) for s in (0, 1, 2, 4, 9)] == pytest.approx([0.4, 0.3, 0.2, 0.0, 0.0])
    assert CreditConfig(lam=0.4).lambda_at(1000) == 0.4


# ---- refusals


@pytest.mark.parametrize(
    ("bad", "key"),
    [
        ({"lam": 1.5}, "lambda"),
        ({"lam": math.nan}, "lambda"),
        ({"gamma": -0.1}, "gamma"),
        ({"bound": 1.0}, "bound"),
        ({"eps": 0.0}, "eps"),
        ({"warmdown_steps": -1}, "warmdown_steps"),
        ({"granularity": "word"}, "granularity"),
        ({"direction": "up"}, "direction"),
        ({"evidence": "sum"}, "evidence"),
        ({"prior": "batch"}, "prior"),
        ({"prior": 1.2}, "prior"),
    ],
)
def test_impossible_settings_are_refused_by_name(bad: dict, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        CreditConfig(**bad)


def test_non_finite_input_is_refused_with_its_count() -> None:
    gaps, ids = batch([[[1.0], [math.inf, math.nan]]])
    with pytest.raises(ValueError, match="2 base advantages or action-token gaps are not finite"):
        agentopsd_credit(torch.ones(1), gaps, ids, torch.ones(1), CreditConfig())
    with pytest.raises(ValueError, match="1 base advantages"):
        agentopsd_credit(torch.tensor([math.nan]), *batch([[[1.0]]]), torch.ones(1), CreditConfig())


def test_a_skipped_turn_is_refused() -> None:
    with pytest.raises(ValueError, match="skip a turn"):
        agentopsd_credit(torch.ones(1), torch.ones(1, 3), torch.tensor([[0, -1, 2]]), torch.ones(1), CreditConfig())


# ---- group statistics


def verl_grpo(reward: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    advantages, _ = compute_grpo_outcome_advantage(reward[:, None].clone(), torch.ones(len(reward), 1), group.numpy())
    return advantages[:, 0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=24))
def test_group_advantage_equals_verl_on_valid_episodes(rows: list[tuple[int, int]]) -> None:
    outcome = torch.tensor([float(won) * 10 for won, _ in rows])
    group = torch.tensor([g * 7 + 3 for _, g in rows])
    ours = group_advantage(outcome, torch.ones(len(rows)), group)
    alone = torch.tensor([int((group == g).sum()) == 1 for g in group])
    torch.testing.assert_close(ours[~alone], verl_grpo(outcome, group)[~alone], rtol=1e-5, atol=1e-6)
    assert (ours[alone] == 0).all()


def test_lost_episodes_leave_mean_std_and_success_rate() -> None:
    won = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    valid = torch.tensor([True, True, True, False, False, True])
    group = torch.tensor([4, 4, 4, 4, 9, 11])
    A = group_advantage(won, valid, group)
    torch.testing.assert_close(A[:3], verl_grpo(won[:3], group[:3]), rtol=1e-5, atol=1e-6)
    assert A[3:].tolist() == [0.0, 0.0, 0.0]
    assert group_success_rate(won, valid, group).tolist() == pytest.approx([1 / 3] * 4 + [0.0, 1.0])


@settings(max_examples=50, deadline=None)
@given(st.floats(-1e3, 1e3), st.integers(2, 16))
def test_equal_outcomes_have_exactly_zero_advantage(reward: float, n: int) -> None:
    A = group_advantage(torch.full((n,), reward, dtype=torch.float64), torch.ones(n), torch.zeros(n).long())
    assert (A == 0).all()


def test_statistics_are_per_trajectory_whatever_its_length() -> None:
    """Three wins in eight give +1.21/-0.72, whether a loss took fifty turns or one."""
    won = torch.tensor([1.0] * 3 + [0.0] * 5)
    A = group_advantage(won, torch.ones(8), torch.zeros(8).long())
    assert A[0].item() == pytest.approx(1.2076, abs=1e-4) and A[-1].item() == pytest.approx(-0.7246, abs=1e-4)


def imported(module) -> set[str]:
    tree = ast.parse(Path(module.__file__).read_text())
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in top}


def test_credit_imports_torch_and_nothing_of_the_training_stack() -> None:
    assert imported(credit_module) == {"dataclasses", "torch", "verl.agentopsd.turns"}
    assert imported(turns_module) == {"torch"}
    assert len(Path(credit_module.__file__).read_text().splitlines()) < 150


@pytest.mark.parametrize("block", [1, 7, 64, 2**17])
def test_blocks_of_rows_change_no_bit(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Sums and look-ups equal the ones over the whole batch, whatever the block."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(12).div(3, rounding_mode="floor").repeat(5, 1).masked_fill(torch.rand(5, 12) < 0.3, -1)
    x = torch.randn(5, 12, generator=generator).masked_fill(ids < 0, float("nan"))
    whole = torch.zeros(5, 5, dtype=torch.float64).scatter_add(1, ids + 1, x.double())[:, 1:]
    monkeypatch.setattr(turns_module, "BLOCK_TOKENS", block)
    count, total = by_turn(x, ids, 4)
    assert torch.equal(total, whole)
    assert torch.equal(count, torch.stack([(ids == turn).sum(-1) for turn in range(4)], -1).double())
    spread = by_token(whole.float(), ids, off=torch.full((5, 1), 9.0))
    assert torch.equal(spread, whole.float().gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 9.0))
