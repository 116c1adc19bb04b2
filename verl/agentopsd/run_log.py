"""What a run tells its user: metrics.jsonl, one line per update on the screen, and a curve that is redrawn."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from verl.agentopsd import trackers
from verl.agentopsd.checkpoints import write_atomically
from verl.agentopsd.diagnose import diagnose
from verl.agentopsd.evaluation.run_metrics import read_metrics

logger = logging.getLogger(__name__)


def plain_number(value: Any) -> float | None:
    """A finite float from a number or a one-element array or tensor; None for what JSON cannot hold as a number."""
    if isinstance(value, bool | str) or value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


class RunLog:
    """Stands in for verl's ``Tracking`` (which still gets every metric) and adds the run directory's own files.

    Args:
        tracking: verl's logger with the backends of ``trainer.logger``.
        run_dir: gets ``metrics.jsonl`` (one ``{"step": n, "data": {...}}`` per line) and ``success_curve.png``.
        total_steps: number of updates, for the progress bar.
        first_step: the last finished update; lines after it, left by an interrupted run, are dropped.
        on_logged: called with the step when its line is on disk.
    """

    def __init__(
        self,
        tracking: Any,
        run_dir: Path,
        total_steps: int,
        first_step: int,
        on_logged: Callable[[int], None] = lambda step: None,
    ):
        self.tracking = tracking
        self.run_dir = run_dir
        self._on_logged = on_logged
        self.path = run_dir / "metrics.jsonl"
        run_dir.mkdir(parents=True, exist_ok=True)
        self._drop_after(first_step)
        trackers.restore(tracking, first_step)
        self._file = self.path.open("a", encoding="utf-8")
        self._drawable = False
        self._warned: set[str] = set()
        # sys.__stdout__: upstream's own prints go to a file while a run is on (task_runner)
        self.console = Console(file=sys.__stdout__, soft_wrap=True)
        self._bar = Progress(
            TextColumn("[bold]updates"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[success]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("updates", total=total_steps, completed=first_step, success="")
        self._bar.start()

    def log(self, data: dict[str, Any], step: int) -> None:
        """Writes one step's metrics everywhere."""
        self.tracking.log(data=data, step=step)
        numeric = {key: number for key, value in data.items() if (number := plain_number(value)) is not None}
        self._file.write(json.dumps({"step": step, "data": numeric}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.console.print(summary_line(step, numeric), highlight=False)
        success = numeric.get("group/success_rate")
        self._bar.update(
            self._task, completed=step, success="" if success is None else f"rollout success {success:.0%}"
        )
        if "val/success_rate" in numeric or "group/success_rate" in numeric:
            self._drawable = True
        if "val/success_rate" in numeric:
            self._draw()
            self._warn()
        self._on_logged(step)

    def finish(self, exit_code: int = 0) -> None:
        """Closes the files and the progress bar; called by the runner at the end, whatever happened."""
        self._bar.stop()
        self._draw()
        self._warn()
        self._file.close()
        self.tracking.finish(exit_code=exit_code)

    def _draw(self) -> None:
        if not self._drawable:
            return
        try:
            from verl.agentopsd.evaluation.plots import success_curve

            success_curve(self.run_dir)
        except Exception as error:  # a picture must not end a run
            logger.warning("success_curve.png was not drawn: %s", error)

    def _warn(self) -> None:
        """What the metrics say in words, each kind of finding once."""
        if not self._drawable:
            return
        for finding in diagnose(read_metrics(self.run_dir)):
            if finding.code not in self._warned:
                self._warned.add(finding.code)
                self.console.print(f"warning: {finding}", style="yellow", highlight=False, markup=False)

    def _drop_after(self, step: int) -> None:
        if not self.path.exists():
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        # a run that starts from nothing keeps nothing: its validation before the first update is step 0 again
        kept = [line for line in lines if (own := _step_of(line)) is not None and own <= step and step > 0]
        if len(kept) < len(lines):
            write_atomically(self.path, "".join(line + "\n" for line in kept))


def _step_of(line: str) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def summary_line(step: int, data: dict[str, float]) -> str:
    """The numbers a person follows, in one line."""
    parts = [f"update {step:4d}" if "group/success_rate" in data else f"after update {step:4d}"]

    def add(label: str, key: str, form: str) -> None:
        if key in data:
            parts.append(f"{label} {data[key]:{form}}")

    add("success", "group/success_rate", ".3f")
    if data.get("env/errors"):
        add("lost to the environment", "env/errors", ".0f")
    add("turns", "env/turns_mean", ".1f")
    add("invalid", "env/invalid_frac", ".3f")
    add("zero-adv", "group/zero_adv_frac", ".2f")
    add("|gap|", "teacher/gap_abs_mean", ".3f")
    add("saturated", "credit/saturated_frac", ".2f")
    add("validation success", "val/success_rate", ".3f")
    add("n", "val/episodes", ".0f")
    add("with skill", "val_with_skill/success_rate", ".3f")
    if "timing_s/step" in data:
        stages = {
            "gen": "gen",
            "old_log_prob": "old",
            "ref": "ref",
            "adv": "adv",
            "update_actor": "update",
            "update_weights": "sync",
        }
        shares = " ".join(
            f"{name} {data[f'timing_s/{key}']:.1f}" for key, name in stages.items() if f"timing_s/{key}" in data
        )
        parts.append(f"{data['timing_s/step']:.1f} s ({shares})")
    return "  ".join(parts)
