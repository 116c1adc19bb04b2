"""Intervals and tests for success rates: the unit is always the game, never a turn or a batch.

Closed forms where there is one; the bootstraps resample games (and training seeds) with a fixed random seed, so that
two people get the same table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Outcomes = NDArray[np.float64]
"""(games,) success per game: 0 or 1, or the mean over several samples of one game."""


@dataclass(frozen=True)
class Estimate:
    """A number and its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class McNemar:
    """Games that only one of two models won, and the exact two-sided p of that split under equal models."""

    only_a: int
    only_b: int
    p: float


def wilson(successes: float, n: int, confidence: float = 0.95) -> Estimate:
    """Wilson score interval of a proportion; ``(nan, 0, 1)`` for n = 0.

    ``successes`` may be fractional: with k samples per game, n counts games and a game adds its mean.
    """
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0)
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes of {n} episodes is not possible")
    z, p = normal_quantile((1 + confidence) / 2), successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Estimate(p, low, high)


def paired_bootstrap(
    a: Outcomes, b: Outcomes, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Estimate:
    """Mean of b - a over the same games, percentile interval over resampled games.

    Args:
        a, b: (games,) in the same order of games.
    """
    if a.shape != b.shape or a.ndim != 1 or not len(a):
        raise ValueError(f"paired outcomes need the same non-empty games, got shapes {a.shape} and {b.shape}")
    d = b - a
    rng = np.random.default_rng(seed)
    means = np.concatenate(
        [d[rng.integers(0, len(d), (size, len(d)))].mean(axis=1) for size in _chunks(resamples, len(d))]
    )
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(float(d.mean()), float(low), float(high))


def hierarchical_bootstrap(
    a: Outcomes, b: Outcomes, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Estimate:
    """Mean of b - a over seeds and games; every resample draws the seeds of each model and the games, which both share.

    The games of a panel are the same for all seeds, so a drawn game is drawn for every drawn seed.

    Args:
        a: (seeds of a, games); b: (seeds of b, games), the same games in the same order.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or not a.size or not b.size:
        raise ValueError(f"outcomes must be (seeds, games) over the same games, got shapes {a.shape} and {b.shape}")
    rng = np.random.default_rng(seed)

    def shares(size: int, n: int) -> NDArray[np.float64]:
        return rng.multinomial(n, np.full(n, 1 / n), size) / n  # how often each of n was drawn in n draws

    games = a.shape[1]
    means = np.concatenate(
        [
            ((shares(size, len(b)) @ b - shares(size, len(a)) @ a) * shares(size, games)).sum(axis=1)
            for size in _chunks(resamples, games)
        ]
    )
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Estimate(float(b.mean() - a.mean()), float(low), float(high))


def mcnemar_exact(a: Outcomes, b: Outcomes) -> McNemar:
    """McNemar's exact test on paired 0/1 outcomes (games,): a two-sided binomial test of the discordant games."""
    if a.shape != b.shape or not np.isin(a, (0, 1)).all() or not np.isin(b, (0, 1)).all():
        raise ValueError("McNemar's test needs one 0/1 outcome per game from each model, for the same games")
    from scipy.stats import binomtest

    only_a, only_b = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
    discordant = only_a + only_b
    return McNemar(only_a, only_b, float(binomtest(only_a, discordant, 0.5).pvalue) if discordant else 1.0)


def detectable_episodes(p_a: float, p_b: float, *, alpha: float = 0.05, power: float = 0.8) -> float:
    """Episodes per model at which two independent samples show the difference p_b - p_a; inf for no difference.

    The usual normal approximation of the two-sided two-proportion z-test (Fleiss, without continuity correction). A
    paired comparison on the same games needs fewer, so this is on the safe side.
    """
    if p_a == p_b:
        return math.inf
    z_alpha, z_power = normal_quantile(1 - alpha / 2), normal_quantile(power)
    mean = (p_a + p_b) / 2
    spread = z_alpha * math.sqrt(2 * mean * (1 - mean))
    spread += z_power * math.sqrt(p_a * (1 - p_a) + p_b * (1 - p_b))
    return float(math.ceil((spread / (p_b - p_a)) ** 2))


def pass_at_k(successes: int, n: int, k: int) -> float:
    """Unbiased pass@k of one game: 1 - C(n-c, k)/C(n, k) for c successes in n samples (arXiv 2107.03374)."""
    if not 0 < k <= n or not 0 <= successes <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples and at most as many successes, got {successes} of {n}")
    return 1 - math.comb(n - successes, k) / math.comb(n, k)


def normal_quantile(p: float) -> float:
    """Quantile of the standard normal."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(p)


def _chunks(resamples: int, games: int) -> list[int]:
    """Resamples per pass such that a pass holds at most about four million outcomes."""
    size = max(1, 4_000_000 // games)
    return [min(size, resamples - start) for start in range(0, resamples, size)]
