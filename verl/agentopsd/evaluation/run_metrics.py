"""Reads a run's ``metrics.jsonl``: a ``{"step": int, "data": {name: number}}`` per line, as verl's file logger does."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)


class RunError(ValueError):
    """A run directory that cannot be read; the message names the path and the remedy."""


@dataclass(frozen=True)
class RunMetrics:
    """The metrics of a run by step, ascending; only finite numbers."""

    path: Path
    steps: dict[int, dict[str, float]]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps at which a metric has a value, and the values."""
        points = [(step, data[name]) for step, data in self.steps.items() if name in data]
        return [step for step, _ in points], [value for _, value in points]

    def names(self, prefix: str = "") -> list[str]:
        """Names of all metrics that start with ``prefix``, sorted."""
        return sorted({name for data in self.steps.values() for name in data if name.startswith(prefix)})

    def __iter__(self) -> Iterator[tuple[int, dict[str, float]]]:
        return iter(self.steps.items())


def read_metrics(run: str | Path) -> RunMetrics:
    """Reads ``RUN_DIR/metrics.jsonl`` (or that file itself).

    Lines of the same step are merged, the later one wins. Numbers that are not finite are left out with a warning, and
    so is a torn last line.

    Raises:
        RunError: no such file, no step in it, or a line in the middle that is not such an object.
    """
    path = Path(run)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise RunError(f"{path} does not exist: give the directory of a run, which holds metrics.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    steps: dict[int, dict[str, float]] = {}
    dropped: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            step, data = int(entry["step"]), dict(entry["data"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and not line.endswith(b"\n"):
                logger.warning("%s:%d: the last line is torn and left out", path, number)
                break
            raise RunError(f"{path}:{number}: not a line of metrics ({error!r}); mend or remove it") from None
        kept = steps.setdefault(step, {})
        for name, value in data.items():
            if isinstance(value, int | float) and math.isfinite(value):
                kept[name] = float(value)
            else:
                dropped.add(name)
    if dropped:
        logger.warning("%s: values that are not finite numbers are left out: %s", path, ", ".join(sorted(dropped)[:8]))
    if not steps:
        raise RunError(f"{path} holds no step yet: the run has not finished an update")
    return RunMetrics(path, dict(sorted(steps.items())))
