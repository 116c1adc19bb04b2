"""Episodes as a page can hold ten thousand of them: a table of columns, and details in compressed chunks.

Every block is JSON, gzip, base64. The browser opens the table at once and a chunk when one of its episodes is chosen,
so the page's tree does not grow with the number of episodes.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from verl.agentopsd.evaluation.records import EpisodeRecord, Turn
from verl.agentopsd.evaluation.run_metrics import RunMetrics
from verl.agentopsd.report.tokens import TokenTexts

EPISODES_PER_CHUNK = 64
BYTES_PER_CHUNK = 2_000_000
TEXT_COLUMNS = ("phase", "split", "task_type", "game_id", "group")
NUMBER_COLUMNS: dict[str, Callable[[EpisodeRecord], float | int | None]] = {
    "step": lambda episode: int(episode.step),
    "won": lambda episode: int(bool(episode.won)),
    "truncated": lambda episode: int(bool(episode.truncated)),
    "error": lambda episode: int(bool(episode.env_error)),
    "turns": lambda episode: number(episode.num_turns),
    "invalid": lambda episode: number(episode.invalid),
    "advantage": lambda episode: number(episode.advantage),
    "rate": lambda episode: number(episode.success_rate),
    "dB": lambda episode: max(_credited(episode, "dB"), key=abs, default=None),
    "w_min": lambda episode: min(_credited(episode, "w"), default=None),
    "w_max": lambda episode: max(_credited(episode, "w"), default=None),
}
"""Columns of numbers and how an episode gives them; 0 or 1 for what is true or false."""

NUMBERS_OF_AN_EPISODE = (
    *("reward", "prior", "sample", "weights_version", "prompt_tokens", "action_tokens", "response_tokens"),
    *("seconds", "env_seconds", "gen_seconds"),
)
NUMBERS_OF_A_TURN = (
    *("e", "B", "dB", "w", "advantage"),
    *("logprob_sum", "teacher_logprob_sum", "rollout_logprob_sum"),
)


def block(data: Any) -> str:
    """JSON, gzip, base64: characters that mean nothing to HTML; the same data give the same text."""
    return _compress(json.dumps(data, allow_nan=False, separators=(",", ":")).encode("ascii"))


def _no_rows() -> dict[str, list[Any]]:
    return {name: [] for name in (*TEXT_COLUMNS, *NUMBER_COLUMNS)}


@dataclass
class Pack:
    """Collects episodes one by one.

    Attributes:
        columns: one list per column of the table; texts as numbers into ``texts``.
        details, gaps: the chunks written so far, in the same order; a chunk of gaps is "" where no gaps were kept.
        sizes: episodes of each chunk.
    """

    token_gaps: bool = True
    tokens: TokenTexts | None = None
    columns: dict[str, list[Any]] = field(default_factory=_no_rows)
    texts: dict[str, dict[str, int]] = field(default_factory=lambda: {name: {} for name in TEXT_COLUMNS})
    details: list[str] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    _open: list[str] = field(default_factory=list)
    _open_gaps: list[Any] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(self.sizes) + len(self._open)

    def add(self, episode: EpisodeRecord) -> None:
        """Raises TypeError or ValueError, and keeps nothing, for an episode whose fields are of the wrong kind."""
        detail = json.dumps(_detail(episode, self.token_gaps), allow_nan=False, separators=(",", ":"))
        row = {name: str(getattr(episode, name)) for name in TEXT_COLUMNS}
        numbers = {name: read(episode) for name, read in NUMBER_COLUMNS.items()}
        gaps = [self._gaps(turn) for turn in episode.turns] if self.token_gaps else []
        for name, text in row.items():
            self.columns[name].append(self.texts[name].setdefault(text, len(self.texts[name])))
        for name, number in numbers.items():
            self.columns[name].append(number)
        self._open.append(detail)
        self._open_gaps.append(gaps)
        if len(self._open) >= EPISODES_PER_CHUNK or sum(map(len, self._open)) >= BYTES_PER_CHUNK:
            self.close_chunk()

    def add_all(self, episodes: Iterable[EpisodeRecord], notes: list[str]) -> None:
        """Adds all; those that cannot be shown are counted in a note that names the first."""
        left_out, first = 0, ""
        for episode in episodes:
            try:
                self.add(episode)
            except (TypeError, ValueError, AttributeError) as error:
                left_out += 1
                first = first or f"step {episode.step}, {episode.game_id}: {error}"
        self.close_chunk()
        if left_out:
            count = "one episode was" if left_out == 1 else f"{left_out} episodes were"
            notes.append(f"{count} left out, for a field is of the wrong kind ({first}).")

    def close_chunk(self) -> None:
        if not self._open:
            return
        self.details.append(_compress(f"[{','.join(self._open)}]".encode("ascii")))
        kept = any(gap for gaps in self._open_gaps for gap in gaps)
        self.gaps.append(block(self._open_gaps) if kept else "")
        self.sizes.append(len(self._open))
        self._open, self._open_gaps = [], []

    def table(self) -> dict[str, Any]:
        """What the browser needs to list, filter and sort."""
        return {
            "n": sum(self.sizes),
            "columns": self.columns,
            "texts": {name: list(known) for name, known in self.texts.items()},
            "sizes": self.sizes,
        }

    def _gaps(self, turn: Turn) -> dict[str, Any] | None:
        """A turn's gaps to a thousandth of a nat, and its tokens' texts where their number agrees."""
        if not turn.gaps:
            return None
        found: dict[str, Any] = {"gaps": [_thousandths(gap) for gap in turn.gaps]}
        if self.tokens is not None and (texts := self.tokens.split(turn.text, len(turn.gaps))):
            found["texts"] = texts
        return found


def metrics_data(metrics: RunMetrics | None) -> dict[str, Any]:
    """All metrics as columns over the steps; ``null`` where a step has no value."""
    if metrics is None:
        return {"steps": [], "series": {}}
    return {
        "steps": list(metrics.steps),
        "series": {name: [number(data.get(name)) for _, data in metrics] for name in metrics.names()},
    }


def number(value: Any, digits: int = 6) -> float | int | None:
    """A finite number to so many significant digits, or ``None``; whole numbers become integers."""
    if type(value) not in (int, float) or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


def _thousandths(gap: Any) -> float | None:
    return round(gap, 3) if type(gap) in (int, float) and math.isfinite(gap) else None


def _compress(data: bytes) -> str:
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode("ascii")


def _credited(episode: EpisodeRecord, name: str) -> list[float]:
    return [value for turn in episode.turns if (value := number(getattr(turn, name))) is not None]


def _detail(episode: EpisodeRecord, gaps: bool) -> dict[str, Any]:
    return {
        "messages": [[str(m.get("role", "")), str(m.get("content", ""))] for m in episode.messages],
        "turns": [_turn(turn, gaps) for turn in episode.turns],
        "truncated_by": str(episode.truncated_by),
        "env_error": str(episode.env_error),
        "skill": bool(episode.skill),
        "seed": str(episode.seed),
        **{name: number(getattr(episode, name)) for name in NUMBERS_OF_AN_EPISODE},
    }


def _turn(turn: Turn, gaps: bool) -> dict[str, Any]:
    command, text = str(turn.command), str(turn.text)
    shown: dict[str, Any] = {
        "command": command,
        "observation": str(turn.observation),
        "valid": int(bool(turn.valid)),
        "well_formed": int(bool(turn.well_formed)),
        "tokens": number(turn.tokens),
        "gaps": int(gaps and bool(turn.gaps)),
    }
    if text != command:
        shown["text"] = text
    for name in NUMBERS_OF_A_TURN:
        if (value := number(getattr(turn, name))) is not None:
            shown[name] = value
    return shown
