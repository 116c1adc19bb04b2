"""Intervals and tests against closed forms, SciPy and statsmodels."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.power import NormalIndPower
from statsmodels.stats.proportion import proportion_confint, proportion_effectsize

from verl.agentopsd.evaluation.statistics import (
    detectable_episodes,
    hierarchical_bootstrap,
    mcnemar_exact,
    paired_bootstrap,
    pass_at_k,
    wilson,
)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.sampled_from([0.9, 0.95, 0.99])
)
def test_wilson_equals_scipy_and_statsmodels(counts: tuple[int, int], confidence: float) -> None:
    k, n = counts
    got = wilson(k, n, confidence)
    by_scipy = stats.binomtest(k, n).proportion_ci(confidence, method="wilson")
    by_statsmodels = proportion_confint(k, n, alpha=1 - confidence, method="wilson")
    assert (got.low, got.high) == pytest.approx((by_scipy.low, by_scipy.high), abs=1e-12)
    assert (got.low, got.high) == pytest.approx(by_statsmodels, abs=1e-12)
    assert got.low <= got.value == k / n <= got.high


@pytest.mark.parametrize("n", [1, 8, 134])
def test_wilson_at_the_ends_is_z2_over_n_plus_z2(n: int) -> None:
    z2 = stats.norm.ppf(0.975) ** 2
    assert (wilson(0, n).low, wilson(0, n).high) == pytest.approx((0.0, z2 / (n + z2)), abs=1e-12)
    assert (wilson(n, n).low, wilson(n, n).high) == pytest.approx((n / (n + z2), 1.0), abs=1e-12)
    assert wilson(0, n).low == 0.0 and wilson(n, n).high == 1.0


def test_wilson_of_nothing_knows_nothing() -> None:
    got = wilson(0, 0)
    assert math.isnan(got.value) and (got.low, got.high) == (0.0, 1.0)
    with pytest.raises(ValueError, match="3 successes of 2"):
        wilson(3, 2)


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (5, 5), (1, 9), (12, 3), (0, 7)])
def test_mcnemar_equals_statsmodels_and_the_binomial_sum(only_a: int, only_b: int) -> None:
    a = np.array([1.0] * only_a + [0.0] * only_b + [1.0] * 6 + [0.0] * 4)
    b = np.array([0.0] * only_a + [1.0] * only_b + [1.0] * 6 + [0.0] * 4)
    got = mcnemar_exact(a, b)
    table = [[6, only_a], [only_b, 4]]
    n, k = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    assert (got.only_a, got.only_b) == (only_a, only_b)
    assert got.p == pytest.approx(min(1.0, 2 * tail))
    assert got.p == pytest.approx(float(mcnemar(table, exact=True).pvalue) if n else 1.0)


def test_mcnemar_refuses_means_over_samples() -> None:
    with pytest.raises(ValueError, match="0/1 outcome"):
        mcnemar_exact(np.array([0.5, 1.0]), np.array([1.0, 1.0]))


def outcomes(p: float, games: int, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).random(games) < p).astype(float)


def test_paired_bootstrap_agrees_with_scipy() -> None:
    a, b = outcomes(0.4, 134, 0), outcomes(0.55, 134, 1)
    got = paired_bootstrap(a, b)
    by_scipy = stats.bootstrap(
        (b - a,), np.mean, method="percentile", n_resamples=10_000, rng=np.random.default_rng(5)
    ).confidence_interval
    assert got.value == pytest.approx((b - a).mean())
    assert (got.low, got.high) == pytest.approx((by_scipy.low, by_scipy.high), abs=0.012)
    half = stats.norm.ppf(0.975) * (b - a).std() / math.sqrt(134)
    assert (got.low, got.high) == pytest.approx((got.value - half, got.value + half), abs=0.012)


def test_paired_bootstrap_of_a_model_with_itself_is_zero() -> None:
    a = outcomes(0.4, 50, 0)
    got = paired_bootstrap(a, a)
    assert (got.value, got.low, got.high) == (0.0, 0.0, 0.0)


def test_paired_bootstrap_repeats_and_turns_round() -> None:
    a, b = outcomes(0.3, 40, 0), outcomes(0.5, 40, 1)
    there, back = paired_bootstrap(a, b), paired_bootstrap(b, a)
    assert there == paired_bootstrap(a, b)
    assert (back.value, back.low, back.high) == pytest.approx((-there.value, -there.high, -there.low), abs=1e-12)


def test_paired_bootstrap_does_not_depend_on_the_size_of_its_passes(monkeypatch) -> None:
    from verl.agentopsd.evaluation import statistics

    a, b = outcomes(0.3, 40, 0), outcomes(0.5, 40, 1)
    whole = paired_bootstrap(a, b, resamples=500)
    monkeypatch.setattr(statistics, "_chunks", lambda resamples, games: [100] * 5)
    assert paired_bootstrap(a, b, resamples=500) == whole


def test_paired_bootstrap_needs_the_same_games() -> None:
    with pytest.raises(ValueError, match="same non-empty games"):
        paired_bootstrap(np.zeros(3), np.zeros(4))


def test_hierarchical_bootstrap_has_the_spread_of_seeds_and_games() -> None:
    """Seeds of model b differ by ±0.2 on every game; no game differs: the interval is that of a mean of two seeds."""
    a = np.tile([0.5], (2, 100))
    b = np.stack([np.full(100, 0.5), np.full(100, 0.9)])
    got = hierarchical_bootstrap(a, b, resamples=4000)
    assert got.value == pytest.approx(0.2)
    assert (got.low, got.high) == pytest.approx((0.0, 0.4))  # both draws the same seed: 1/4 + 1/4 of the resamples


def test_hierarchical_bootstrap_with_one_seed_is_the_paired_bootstrap() -> None:
    a, b = outcomes(0.4, 134, 0), outcomes(0.55, 134, 1)
    seeds = hierarchical_bootstrap(a[None], b[None], resamples=8000)
    games = paired_bootstrap(a, b)
    assert (seeds.value, seeds.low, seeds.high) == pytest.approx((games.value, games.low, games.high), abs=0.012)


def test_detectable_episodes_against_power_simulated_and_cohens_h() -> None:
    n = detectable_episodes(0.5, 0.6)
    assert n == 388  # Fleiss, Statistical Methods for Rates and Proportions: 50 % against 60 %, 80 % power
    by_h = NormalIndPower().solve_power(proportion_effectsize(0.6, 0.5), alpha=0.05, power=0.8)
    assert n == pytest.approx(by_h, rel=0.02)
    rng = np.random.default_rng(0)
    x, y = rng.binomial(388, 0.5, 20_000) / 388, rng.binomial(388, 0.6, 20_000) / 388
    pooled = (x + y) / 2
    found = np.abs(y - x) / np.sqrt(2 * pooled * (1 - pooled) / 388) > stats.norm.ppf(0.975)
    assert found.mean() == pytest.approx(0.8, abs=0.015)


def test_no_difference_is_never_detected() -> None:
    assert detectable_episodes(0.4, 0.4) == math.inf


def test_pass_at_k() -> None:
    assert pass_at_k(0, 8, 4) == 0 and pass_at_k(8, 8, 1) == 1
    assert pass_at_k(3, 8, 1) == pytest.approx(3 / 8)
    assert pass_at_k(3, 8, 2) == pytest.approx(1 - (5 / 8) * (4 / 7))
    assert pass_at_k(1, 4, 4) == 1
    with pytest.raises(ValueError, match="at least 5 samples"):
        pass_at_k(1, 4, 5)
