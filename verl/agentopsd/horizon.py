"""The horizon curriculum: how many turns a training episode may have, by the number of finished updates.

``env.max_turns_schedule=[[0,10],[50,20],[100,30]]``: 10 turns in updates 1 to 50, 20 in updates 51 to 100, 30 after
them. The horizon is a function of the update alone, so a resumed run continues it without any saved state. Validation
and evaluation always play ``env.max_turns``, or their curves would measure the curriculum; that key also sets the
lengths, so no stage may exceed it. A list rather than a mapping, because Hydra replaces a list that is overridden but
merges mappings, and a preset's stages would stay between one's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

EXAMPLE = "[[0,10],[50,20],[100,30]]"


def max_turns_at(schedule: Sequence[Sequence[int]], finished_updates: int, max_turns: int) -> int:
    """Turns that an episode may have once ``finished_updates`` updates are done; ``max_turns`` without a schedule."""
    reached = [turns for start, turns in schedule if start <= finished_updates]
    return int(reached[-1]) if reached else int(max_turns)


def schedule_problem(schedule: Any, max_turns: int) -> str | None:
    """Why a schedule cannot work, or None.

    Args:
        schedule: a list of ``[finished updates, turns]``, as plain Python values.
        max_turns: ``env.max_turns``.
    """
    key = f"env.max_turns_schedule={schedule}"
    if not isinstance(schedule, list) or not all(_is_pair(stage) for stage in schedule):
        return f"{key}: must be a list of [finished updates, turns] in whole numbers, for example {EXAMPLE}"
    if not schedule:
        return None
    starts, turns = zip(*schedule, strict=True)
    if starts[0] != 0:
        return f"{key}: the first stage must start at 0 finished updates, or the first updates have no horizon"
    if any(after <= before for before, after in zip(starts, starts[1:], strict=False)):
        return f"{key}: the stages must start at increasing numbers of updates"
    if min(turns) < 1:
        return f"{key}: an episode needs at least 1 turn"
    if max(turns) > max_turns:
        return (
            f"{key}: a stage has {max(turns)} turns, more than env.max_turns={max_turns}, for which the lengths are "
            f"set and which validation plays: raise env.max_turns (and data.max_response_length) or lower the stage"
        )
    return None


def describe(schedule: Sequence[Sequence[int]], max_turns: int) -> str:
    """``30 turns``, or ``10 turns, 20 from update 51, 30 from update 101``."""
    first, *later = [*schedule] or [(0, max_turns)]
    return ", ".join([f"{first[1]} turns", *(f"{turns} from update {start + 1}" for start, turns in later)])


def _is_pair(stage: Any) -> bool:
    return isinstance(stage, list) and len(stage) == 2 and all(type(number) is int for number in stage)
