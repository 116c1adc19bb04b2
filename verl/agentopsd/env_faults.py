"""What a run does about episodes that the environment lost: names and counts them, stops when they are too many."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.agentopsd.episodes import Episode

FILE_NAME = "env-errors.jsonl"


class EnvironmentsFailed(RuntimeError):
    """More episodes of an update were lost to the environment than ``env.max_error_share`` allows."""


def report_faults(episodes: Sequence[Episode], *, step: int, max_share: float, run_dir: Path) -> None:
    """Appends every lost episode to ``run_dir/env-errors.jsonl``: step, game, sample, turn, error and trace.

    Lost episodes stay out of every statistic (I9). A few are the price of real environments; many mean that something
    is broken, and training on the rest would be training on a selection.

    Args:
        max_share: ``env.max_error_share``; 1 tolerates everything but the loss of all episodes.

    Raises:
        EnvironmentsFailed: with the first game and its trace.
    """
    lost = [episode for episode in episodes if not episode.valid]
    if not lost:
        return
    lines = "".join(json.dumps(_line(episode, step), ensure_ascii=False) + "\n" for episode in lost)
    with (run_dir / FILE_NAME).open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # torn by a kill: what follows must not stand in the same line
                file.write(b"\n")
        file.write(lines.encode())
    share = len(lost) / len(episodes)
    if share > max_share or share == 1:
        first = lost[0].facts
        trace = first.get("env_trace", "")
        allowed = f"more than env.max_error_share={max_share:g} allows" if share > max_share else "none is left"
        raise EnvironmentsFailed(
            f"update {step}: {len(lost)} of {len(episodes)} episodes were lost to the environment, {allowed} (all in "
            f"{run_dir / FILE_NAME}). The first, {first['game_id']}: {first['env_error']}"
            + (f"\n{trace.rstrip()}" if trace else "")
        )


def _line(episode: Episode, step: int) -> dict[str, str | int]:
    facts = episode.facts
    return {
        "step": step,
        "game_id": facts["game_id"],
        "sample": episode.sample,
        "turn": len(facts["turns"]),
        "error": facts["env_error"],
        "trace": facts.get("env_trace", ""),
    }
