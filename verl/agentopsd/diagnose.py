"""Warnings in words from a run's metrics: ``python -m verl.agentopsd.diagnose RUN_DIR``.

Each check looks at the latest steps (a window, so that one odd update does not cry wolf) and says what was seen, with
the number, and what to do. The same warnings go into the log of a run and to the top of its report.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl.agentopsd.evaluation.run_metrics import RunError, RunMetrics, read_metrics


@dataclass(frozen=True)
class Limits:
    """From where on a metric is worth a warning.

    ``logprob_gap`` in nats, mean over tokens; ``rise`` is a change between the first and the last window of a run.
    """

    window: int = 5
    success: float = 0.01
    gap: float = 1e-4
    saturated: float = 0.5
    at_bound: float = 0.5
    logprob_gap: float = 0.02
    straggler: float = 3.0
    invalid_rise: float = 0.05
    reward_rise: float = 0.02
    env_errors: float = 0.0


@dataclass(frozen=True)
class Finding:
    """One finding: a stable ``code``, the steps it is about, and a sentence or two."""

    code: str
    first_step: int
    last_step: int
    text: str

    def __str__(self) -> str:
        steps = (
            f"step {self.last_step}"
            if self.first_step == self.last_step
            else f"steps {self.first_step}-{self.last_step}"
        )
        return f"{steps}: {self.text}"


def diagnose(metrics: RunMetrics, limits: Limits | None = None, *, up_to: int | None = None) -> list[Finding]:
    """All warnings about the latest steps of a run, the gravest first.

    Args:
        metrics: of the run.
        up_to: judge the run as it was after this step.
    """
    limits = limits or Limits()
    if up_to is not None:
        metrics = RunMetrics(metrics.path, {step: data for step, data in metrics.steps.items() if step <= up_to})
    found = (check(metrics, limits) for check in CHECKS)
    return [finding for finding in found if finding is not None]


def no_signal(metrics: RunMetrics, limits: Limits) -> Finding | None:
    """Every group of the last updates had zero advantage."""
    steps, zero = _latest(metrics, "group/zero_adv_frac", limits)
    if not steps or min(zero) < 1.0:
        return None
    fail, won = (_mean(metrics, f"group/zero_adv_frac_all_{kind}", limits) for kind in ("fail", "success"))
    cause = "all groups failed in every episode" if (fail or 0) >= (won or 0) else "all groups won every episode"
    remedy = (
        "warm-start the policy (SFT) or take easier games and more episodes per game"
        if (fail or 0) >= (won or 0)
        else "the games are solved: take harder ones, or stop"
    )
    return Finding("no_signal", steps[0], steps[-1], f"nothing was learnt: {cause}, so every advantage is 0; {remedy}.")


def no_success(metrics: RunMetrics, limits: Limits) -> Finding | None:
    """Hardly an episode is won."""
    steps, success = _latest(metrics, "group/success_rate", limits)
    if not steps or np.mean(success) >= limits.success:
        return None
    text = f"success is {np.mean(success):.2%}: there is next to nothing to learn from; warm-start the policy first."
    return Finding("no_success", steps[0], steps[-1], text)


def skill_unseen(metrics: RunMetrics, limits: Limits) -> Finding | None:
    """The teacher's log-probs are the student's."""
    steps, gap = _latest(metrics, "teacher/gap_abs_mean", limits)
    if not steps or np.mean(gap) > limits.gap:
        return None
    text = (
        f"the teacher's gap is {np.mean(gap):.1e} nats per token: does it see the skill? Check that the "
        "teacher's prompt holds the skill text and that its log-probs are its own."
    )
    return Finding("skill_unseen", steps[0], steps[-1], text)


def skill_missing(metrics: RunMetrics, limits: Limits) -> Finding | None:
    """Games were scored without a skill of their own."""
    steps, count = _latest(metrics, "teacher/skill_fallbacks", limits)
    rows = _mean(metrics, "teacher/rows_scored", limits)
    if not steps or not any(count):
        return None
    of = f" of {rows:.0f} scored rows" if rows else ""
    text = f"{np.mean(count):.0f}{of} per update had no skill of their own task type; add the missing skill files."
    return Finding("skill_missing", steps[0], steps[-1], text)


def saturated(metrics: RunMetrics, limits: Limits) -> Finding | None:
    """Beliefs sit at 0 or 1, where evidence no longer moves them."""
    steps, share = _latest(metrics, "credit/saturated_frac", limits)
    if not steps or np.mean(share) < limits.saturated:
        return None
    belief, evidence = (_mean(metrics, f"credit/{name}", limits) for name in ("belief_last_mean", "evidence_mean"))
    seen = f" (mean last belief {belief:.2f})" if belief is not None else ""
    seen += f"; mean evidence is {evidence:+.2f} a turn" if evidence is not None else ""
    text = (
        f"the belief is saturated in {np.mean(share):.0%} of the turns{seen}: later turns hardly count. "
        "Try agentopsd.evidence=centered or clip, or a smaller agentopsd.gamma."
    )
    return Finding("saturated", steps[0], steps[-1], text)


def at_bound(metrics: RunMetrics, limits: Limits) -> Finding | None:
    """Most weights are clipped."""
    steps, share = _latest(metrics, "credit/weight_clip_frac", limits)
    if not steps or np.mean(share) < limits.at_bound:
        return None
    text = (
        f"{np.mean(share):.0%} of the turns have a weight at its bound: the weights say little more than better or "
        "worse. A larger agentopsd.bound with a smaller agentopsd.lambda keeps the reach and makes finer steps."
    )
    return Finding("at_bound", steps[0], steps[-1], text)


def reward_without_success(metrics: RunMetrics, limits: Limits) -> Finding | None:
    """Reward rises, success does not: something else is being rewarded."""
    reward, success = (_change(metrics, f"group/{name}", limits) for name in ("reward_mean", "success_rate"))
    spread = metrics.series("group/reward_std")[1]
    if reward is None or success is None or not spread:
        return None
    unit = max(float(np.mean(spread)), 1e-9)
    if reward.change <= max(limits.reward_rise, 0.1 * unit) or success.change > 0:
        return None
    text = (
        f"reward rose by {reward.change:.2f} while success went from {success.before:.1%} to {success.after:.1%}: "
        "look for a shaping term that is farmed."
    )
    return Finding("reward_without_success", reward.first_step, reward.last_step, text)


def rollout_differs(metrics: RunMetrics, limits: Limits) -> Finding | None:
    """Sampler and actor disagree about the sampled tokens."""
    steps, gap = _latest(metrics, "rollout/logprob_gap_abs_mean", limits)
    if not steps or np.mean(gap) <= limits.logprob_gap:
        return None
    worst = _mean(metrics, "rollout/logprob_gap_abs_max", limits)
    text = (
        f"rollout and actor log-probs differ by {np.mean(gap):.3f} nats per token"
        + (f" (up to {worst:.2f})" if worst is not None else "")
        + f", the budget is {limits.logprob_gap}: check that the weights arrived, the precision and the temperature."
    )
    return Finding("rollout_differs", steps[0], steps[-1], text)


def stragglers(metrics: RunMetrics, limits: Limits) -> Finding | None:
    """The rollout waits for a few slow episodes."""
    steps, ratio = _latest(metrics, "rollout/straggler_ratio", limits)
    if not steps or np.mean(ratio) <= limits.straggler:
        return None
    text = (
        f"the slowest episode takes {np.mean(ratio):.1f} times the mean: the other devices wait for it. "
        "Lower env.max_turns or env.max_action_tokens, or look for a slow environment."
    )
    return Finding("stragglers", steps[0], steps[-1], text)


def invalid_rising(metrics: RunMetrics, limits: Limits) -> Finding | None:
    """The policy forgets what the game understands."""
    invalid = _change(metrics, "env/invalid_frac", limits)
    if invalid is None or invalid.change <= limits.invalid_rise:
        return None
    text = (
        f"invalid actions rose from {invalid.before:.1%} to {invalid.after:.1%} of the turns: read a few episodes; "
        "a smaller learning rate or a stronger KL term keeps the format."
    )
    return Finding("invalid_rising", invalid.first_step, invalid.last_step, text)


def environment_fails(metrics: RunMetrics, limits: Limits) -> Finding | None:
    """Episodes are lost to the environment."""
    steps, errors = _latest(metrics, "env/errors", limits)
    if not steps or sum(errors) <= limits.env_errors * len(errors):
        return None
    text = (
        f"{sum(errors):.0f} episodes were lost to the environment: they count for nothing. "
        "The episodes' env_error says why."
    )
    return Finding("environment_fails", steps[0], steps[-1], text)


Check = Callable[[RunMetrics, Limits], Finding | None]
CHECKS: tuple[Check, ...] = (
    no_signal,
    no_success,
    skill_unseen,
    skill_missing,
    rollout_differs,
    reward_without_success,
    environment_fails,
    saturated,
    at_bound,
    invalid_rising,
    stragglers,
)


@dataclass(frozen=True)
class _Change:
    before: float
    after: float
    first_step: int
    last_step: int

    @property
    def change(self) -> float:
        return self.after - self.before


def _latest(metrics: RunMetrics, name: str, limits: Limits) -> tuple[list[int], list[float]]:
    """The last window of a metric; empty if it was not logged at the latest update (its warning would be stale)."""
    steps, values = metrics.series(name)
    updates, _ = metrics.series("group/success_rate")
    if not steps or (updates and steps[-1] < updates[-1]):
        return [], []
    return steps[-limits.window :], values[-limits.window :]


def _mean(metrics: RunMetrics, name: str, limits: Limits) -> float | None:
    _, values = _latest(metrics, name, limits)
    return float(np.mean(values)) if values else None


def _change(metrics: RunMetrics, name: str, limits: Limits) -> _Change | None:
    """From the mean of the first window to the mean of the last; ``None`` while the two overlap."""
    steps, values = metrics.series(name)
    if len(values) < 2 * limits.window:
        return None
    before, after = float(np.mean(values[: limits.window])), float(np.mean(values[-limits.window :]))
    return _Change(before, after, steps[0], steps[-1])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl.agentopsd.diagnose", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="directory of a run, holds metrics.jsonl")
    parser.add_argument("--window", type=int, default=Limits.window, help="how many of the latest steps are judged (5)")
    args = parser.parse_args(argv)
    try:
        metrics = read_metrics(args.run_dir)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    warnings = diagnose(metrics, Limits(window=max(1, args.window)))
    for finding in warnings:
        print(f"warning: {finding}")
    if not warnings:
        print(f"nothing to warn about in the latest of {len(metrics.steps)} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
