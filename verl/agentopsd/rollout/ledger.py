"""The tokens of one episode: what the policy sampled, what it was shown, and which is which.

The ledger can only grow. Context (the prompt, observations, template tokens) and actions (the ids that the server
sampled) are appended as they come and nothing is ever decoded and encoded again, so three properties hold by
construction:

- the ids that are trained on are the ids that were sampled,
- the action mask is 1 exactly on sampled ids,
- the turn spans are ordered, disjoint and cover the mask exactly.

``check_row`` states the same properties for a row that comes from elsewhere (a record, a queue, another process).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

Span = tuple[int, int]
"""``[start, end)`` of one turn's action, counted from the first response token."""


class RowError(ValueError):
    """A row breaks the contract between prompt, response, mask, spans and log-probabilities; ``field`` says where."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class Trajectory:
    """One finished episode in tokens. T = response length, K = number of turns.

    Attributes:
        prompt_ids: everything before the first action.
        response_ids: (T,) actions and the context between them.
        action_mask: (T,) 1 on sampled ids, else 0.
        spans: (K,) one span per turn, in response coordinates.
        logprobs: (T,) log-probability of each sampled id when it was sampled, 0.0 on context; None if the server gave
            none.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    action_mask: tuple[int, ...]
    spans: tuple[Span, ...]
    logprobs: tuple[float, ...] | None


class TokenLedger:
    """Append-only record of one episode's tokens."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise ValueError("an episode needs a prompt of at least one token")
        self._prompt_ids = list(prompt_ids)
        self._response_ids: list[int] = []
        self._action_mask: list[int] = []
        self._spans: list[Span] = []
        self._logprobs: list[float] = []
        self._has_logprobs: bool | None = None

    def append_context(self, ids: Sequence[int]) -> None:
        """Appends tokens that the policy was shown: an observation, role headers, an end-of-turn it did not sample."""
        self._response_ids.extend(ids)
        self._action_mask.extend([0] * len(ids))
        self._logprobs.extend([0.0] * len(ids))

    def append_action(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> Span:
        """Appends the ids that the policy sampled in one turn, and returns their span.

        Raises:
            ValueError: no ids, a log-probability missing or not finite, or only some turns with log-probabilities.
        """
        if not ids:
            raise ValueError("an action has at least one token")
        if self._has_logprobs not in (None, logprobs is not None):
            raise ValueError("either all turns of an episode have log-probabilities or none has")
        if logprobs is not None:
            if len(logprobs) != len(ids):
                raise ValueError(f"{len(ids)} sampled tokens came with {len(logprobs)} log-probabilities")
            if not all(math.isfinite(value) for value in logprobs):
                raise ValueError("a sampled token has a log-probability that is not finite")
        self._has_logprobs = logprobs is not None
        span = (len(self._response_ids), len(self._response_ids) + len(ids))
        self._response_ids.extend(ids)
        self._action_mask.extend([1] * len(ids))
        self._logprobs.extend(logprobs if logprobs is not None else [0.0] * len(ids))
        self._spans.append(span)
        return span

    @property
    def all_ids(self) -> list[int]:
        """A new list with the prompt and the response so far: what the server continues from."""
        return self._prompt_ids + self._response_ids

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return tuple(self._prompt_ids)

    @property
    def response_ids(self) -> tuple[int, ...]:
        return tuple(self._response_ids)

    @property
    def response_length(self) -> int:
        return len(self._response_ids)

    @property
    def action_mask(self) -> tuple[int, ...]:
        return tuple(self._action_mask)

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)

    @property
    def logprobs(self) -> tuple[float, ...] | None:
        """None if actions came without log-probabilities; zeros before the first action."""
        return None if self._has_logprobs is False else tuple(self._logprobs)

    def freeze(self) -> Trajectory:
        """The episode so far, immutable."""
        return Trajectory(self.prompt_ids, self.response_ids, self.action_mask, self.spans, self.logprobs)


def check_row(
    prompt_ids: ArrayLike,
    response_ids: ArrayLike,
    action_mask: ArrayLike,
    spans: Sequence[Sequence[int]],
    logprobs: ArrayLike | None,
    *,
    game_id: str,
) -> None:
    """Checks one row without padding against the contract; sequences, arrays or CPU tensors.

    Raises:
        RowError: naming the game and the field.
    """

    def require(holds: bool, field: str, problem: str) -> None:
        if not holds:
            raise RowError(f"game {game_id}: {field}: {problem}", field)

    mask, length = np.asarray(action_mask), len(np.asarray(response_ids))
    require(len(np.asarray(prompt_ids)) > 0, "prompt_ids", "empty")
    require(length > 0, "response_ids", "empty")
    require(len(mask) == length, "action_mask", f"{len(mask)} entries for {length} response tokens")
    require(bool(((mask == 0) | (mask == 1)).all()), "action_mask", "an entry is neither 0 nor 1")

    covered = np.zeros(length, dtype=bool)
    previous_end = 0
    for turn, (start, end) in enumerate(spans):
        require(start < end, "spans", f"turn {turn} has the empty span [{start}, {end})")
        require(start >= previous_end, "spans", f"turn {turn} starts at {start}, before {previous_end}")
        require(end <= length, "spans", f"turn {turn} ends at {end}, the response has {length} tokens")
        covered[start:end] = True
        previous_end = end
    wrong = np.flatnonzero(covered != (mask == 1))
    require(not len(wrong), "spans", f"spans and action_mask disagree at response token {_first(wrong)}")

    if logprobs is not None:
        values = np.asarray(logprobs, dtype=np.float64)
        require(len(values) == length, "logprobs", f"{len(values)} entries for {length} response tokens")
        require(bool(np.isfinite(values).all()), "logprobs", "an entry is not finite")
        stray = np.flatnonzero((mask == 0) & (values != 0.0))
        require(not len(stray), "logprobs", f"context token {_first(stray)} has a log-probability other than 0.0")


def _first(positions: np.ndarray) -> int | None:
    return int(positions[0]) if len(positions) else None
