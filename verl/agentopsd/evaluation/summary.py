"""What a list of episodes says: success per split and task type with intervals, and how the policy behaved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from verl.agentopsd.evaluation.records import EpisodeRecord, Summary
from verl.agentopsd.evaluation.statistics import pass_at_k, wilson

LOOP = 3
"""This many equal commands in a row are a loop."""


def summarize(episodes: Iterable[EpisodeRecord], *, slow_turns: int | None = None) -> dict[str, Any]:
    """Success, behaviour and cost of the episodes, as a plain dict for JSON.

    Every episode weighs the same. Episodes lost to the environment are counted as ``errors`` and leave everything else.
    With several samples per game, intervals count games, and ``pass_at`` / ``avg_at`` are given.

    Args:
        slow_turns: episodes with more turns are counted as slow; the panel's own 99th percentile if ``None``.
    """
    episodes = list(episodes)
    valid = [episode for episode in episodes if not episode.env_error]
    result: dict[str, Any] = {
        "episodes": len(episodes),
        "errors": len(episodes) - len(valid),
        "success": success(valid),
        "per_split": _by(valid, lambda episode: episode.split),
        "per_task_type": _by(valid, lambda episode: episode.task_type),
        "behaviour": behaviour(valid, slow_turns=slow_turns),
        "tokens": {
            "prompt_mean": _mean([episode.prompt_tokens for episode in valid]),
            "action_mean": _mean([episode.action_tokens for episode in valid]),
            "response_mean": _mean([episode.response_tokens for episode in valid]),
            "action_total": sum(episode.action_tokens for episode in valid),
        },
    }
    samples = {len(group) for group in _samples(valid)}
    if samples and max(samples) > 1:
        k = min(samples)
        games = [(sum(won), len(won)) for won in _samples(valid)]
        result["samples"] = k
        result["avg_at"] = {str(k): _mean([won / n for won, n in games])}
        result["pass_at"] = {str(j): _mean([pass_at_k(won, n, j) for won, n in games]) for j in _powers(k)}
    return result


def finished(
    episodes: Sequence[EpisodeRecord],
    *,
    model: str,
    panel: str,
    panel_hash: str,
    sampling: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
    wall_seconds: float = 0.0,
    slow_turns: int | None = None,
) -> Summary:
    """The summary line that ends an evaluation's file.

    Raises:
        ValueError: no episodes, or episodes of several runs or steps, or with and without a skill.
    """
    runs = {(episode.run, episode.step, episode.skill) for episode in episodes}
    if len(runs) != 1:
        raise ValueError(f"one summary needs episodes of one run, step and prompt, got {sorted(runs) or 'none'}")
    run, step, skill = runs.pop()
    games = {episode.game_id for episode in episodes}
    return Summary(
        run=run,
        model=model,
        step=step,
        panel=panel,
        panel_hash=panel_hash,
        games=len(games),
        samples=max(Counter(episode.game_id for episode in episodes).values()),
        skill=skill,
        sampling=dict(sampling),
        results=summarize(episodes, slow_turns=slow_turns),
        versions=dict(versions or {}),
        wall_seconds=wall_seconds,
    )


def success(episodes: Sequence[EpisodeRecord]) -> dict[str, Any]:
    """Success rate over games with Wilson's 95 % interval; ``won`` and ``n`` count games."""
    games = _samples(episodes)
    won = math.fsum(sum(group) / len(group) for group in games)
    estimate = wilson(won, len(games))
    return {
        "rate": None if not games else estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "won": won,
        "n": len(games),
    }


def behaviour(episodes: Sequence[EpisodeRecord], *, slow_turns: int | None = None) -> dict[str, Any]:
    """How the policy played, per episode.

    ``loops``: share of episodes with a command given ``LOOP`` times or more in a row. ``invalid_streak``: the longest
    run of commands the game did not understand. ``recovery``: of the invalid commands that were followed by another
    turn, the share followed by a valid one.
    """
    runs = [[turn.command for turn in episode.turns] for episode in episodes]
    bad = [[not turn.valid for turn in episode.turns] for episode in episodes]
    after = [following for row in bad for failed, following in zip(row, row[1:], strict=False) if failed]
    turns = [episode.num_turns for episode in episodes]
    if slow_turns is None and turns:
        slow_turns = int(np.percentile(turns, 99, method="higher"))
    return {
        "turns_mean": _mean(turns),
        "turns_won_mean": _mean([episode.num_turns for episode in episodes if episode.won]),
        "slow_turns": slow_turns,
        "slow": _mean([n > (slow_turns or 0) for n in turns]),
        "invalid_mean": _mean([episode.invalid for episode in episodes]),
        "invalid_per_turn": _ratio(sum(episode.invalid for episode in episodes), sum(turns)),
        "malformed_mean": _mean([sum(not turn.well_formed for turn in episode.turns) for episode in episodes]),
        "truncated": _mean([episode.truncated for episode in episodes]),
        "loops": _mean([longest_run(commands) >= LOOP for commands in runs]),
        "invalid_streak_mean": _mean([_longest(row) for row in bad]),
        "invalid_streak_max": max((_longest(row) for row in bad), default=None),
        "recovery": _ratio(sum(not failed for failed in after), len(after)),
    }


def longest_run(items: Sequence[str]) -> int:
    """Length of the longest run of equal neighbours."""
    best = run = 0
    for i, item in enumerate(items):
        run = run + 1 if i and item == items[i - 1] else 1
        best = max(best, run)
    return best


def _longest(flags: Sequence[bool]) -> int:
    best = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        best = max(best, run)
    return best


def _samples(episodes: Sequence[EpisodeRecord]) -> list[list[bool]]:
    """The outcomes of each game, in the order of first appearance."""
    games: dict[tuple[int, str], list[bool]] = {}
    for episode in episodes:
        games.setdefault((episode.step, episode.game_id), []).append(episode.won)
    return list(games.values())


def _by(episodes: Sequence[EpisodeRecord], key: Callable[[EpisodeRecord], str]) -> dict[str, Any]:
    parts: dict[str, list[EpisodeRecord]] = {}
    for episode in episodes:
        parts.setdefault(key(episode), []).append(episode)
    return {name: success(parts[name]) for name in sorted(parts)}


def _powers(k: int) -> list[int]:
    return sorted({1, k, *(2**i for i in range(1, k.bit_length()) if 2**i <= k)})


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
