"""The success curve of a run: ``python -m verl.agentopsd.evaluation.plots RUN_DIR [--out FILE]``.

Success of the training rollouts at every update; validation success with Wilson's 95 % interval where it was measured.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.agentopsd.evaluation.records import RecordError, read_records
from verl.agentopsd.evaluation.run_metrics import RunError, RunMetrics, read_metrics
from verl.agentopsd.evaluation.statistics import wilson

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

INK, MUTED, GRID = "#1f2430", "#6b7280", "#e5e7eb"
TRAIN, VALIDATION = "#9aa5b8", "#0f62fe"
PALETTE = ("#0f62fe", "#d9480f", "#2b8a3e", "#862e9c", "#b08900", "#0b7285")


@dataclass(frozen=True)
class Point:
    """Validation success at one step over ``n`` games."""

    step: int
    rate: float
    low: float
    high: float
    n: int


def validation_points(run_dir: Path, metrics: RunMetrics | None) -> list[Point]:
    """Validated steps of a run from its metrics; from ``validation/*.jsonl`` where the metrics have none."""
    points = []
    for step, data in metrics or ():
        if "val/success_rate" in data and data.get("val/episodes"):
            n = int(data["val/episodes"])
            points.append(_point(step, data["val/success_rate"] * n, n))
    if points:
        return points
    for file in sorted((run_dir / "validation").glob("*.jsonl")):
        try:
            episodes = [e for e in read_records(file) if not e.env_error and not e.skill]
        except RecordError as error:
            logger.warning("left out of the curve: %s", error)
            continue
        if episodes:
            points.append(_point(episodes[0].step, sum(episode.won for episode in episodes), len(episodes)))
    return sorted(points, key=lambda point: point.step)


def success_curve(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Draws ``RUN_DIR/success_curve.png`` (or ``out``) and returns its path.

    Raises:
        RunError: the run has neither rollout nor validation success yet.
    """
    run_dir = Path(run_dir)
    metrics = read_metrics(run_dir)
    steps, success = metrics.series("group/success_rate")
    points = validation_points(run_dir, metrics)
    if not steps and not points:
        raise RunError(f"{metrics.path} holds no success rate yet: the run has not finished an update")

    figure, axes = new_figure(7.2, 4.3)
    if steps:
        _rollouts(axes, steps, success)
    if points:
        _validation(axes, points)
    axes.set_xlabel("policy updates")
    rate_axis(axes)
    last = max([*steps, *(point.step for point in points)])
    axes.set_xlim(-0.02 * max(last, 1), 1.03 * max(last, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    headline(axes, run_dir.resolve().name, _caption(points, steps))
    axes.legend(loc="best", facecolor="white", edgecolor="none", framealpha=0.9, fontsize=9, labelcolor=INK)
    return save(figure, Path(out) if out else run_dir / "success_curve.png")


def _rollouts(axes: Axes, steps: Sequence[int], success: Sequence[float]) -> None:
    window = 5
    smooth = len(steps) >= 2 * window
    axes.plot(
        steps,
        success,
        color=TRAIN,
        linewidth=0 if smooth else 1.6,
        marker="o",
        markersize=3.5,
        alpha=0.75 if smooth else 1.0,
        label=None if smooth else "training rollouts",
    )
    if smooth:
        padded = np.pad(np.asarray(success, dtype=float), window // 2, constant_values=np.nan)
        mean = np.nanmean(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1)
        axes.plot(
            steps, mean, color="#64708a", linewidth=1.8, label=f"training rollouts (dots), mean of {window} updates"
        )


def _validation(axes: Axes, points: Sequence[Point]) -> None:
    from matplotlib.patheffects import withStroke

    steps, rates = [point.step for point in points], [point.rate for point in points]
    below = [max(0.0, point.rate - point.low) for point in points]
    above = [max(0.0, point.high - point.rate) for point in points]
    axes.errorbar(
        steps,
        rates,
        yerr=[below, above],
        color=VALIDATION,
        linewidth=2.2,
        marker="o",
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=1,
        elinewidth=1.4,
        capsize=3.5,
        zorder=3,
        label="validation without skill, 95 % interval",
    )
    for point in {points[0].step: points[0], points[-1].step: points[-1]}.values():
        axes.annotate(
            f"{point.rate:.0%}",
            (point.step, point.high),
            textcoords="offset points",
            xytext=(0, 6),
            ha="center",
            color=VALIDATION,
            fontsize=10,
            fontweight="bold",
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )


def _caption(points: Sequence[Point], steps: Sequence[int]) -> str:
    parts = []
    if points:
        first, last = points[0], points[-1]
        games = f"{last.n} games" if len({point.n for point in points}) == 1 else "games"
        if first.step == last.step:
            parts.append(f"validation success {last.rate:.1%} on {games}")
        else:
            parts.append(f"validation success {first.rate:.1%} → {last.rate:.1%} on {games}")
    if steps:
        parts.append(f"{len(steps)} updates")
    return ", ".join(parts)


def _point(step: int, won: float, n: int) -> Point:
    estimate = wilson(min(max(won, 0.0), n), n)
    return Point(step, estimate.value, estimate.low, estimate.high, n)


def new_figure(width: float, height: float, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure without a display, in the look that all our figures share."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, **options)
    for one in np.atleast_1d(axes):
        one.spines[["top", "right", "left"]].set_visible(False)
        one.spines["bottom"].set_color(MUTED)
        one.tick_params(colors=MUTED, labelcolor=INK, labelsize=9, length=0)
        one.grid(axis="y", color=GRID, linewidth=0.9)
        one.set_axisbelow(True)
        one.xaxis.label.set(color=INK, fontsize=10)
        one.yaxis.label.set(color=INK, fontsize=10)
    return figure, axes


def rate_axis(axes: Axes) -> None:
    """A success rate on the y axis: 0 to 100 %."""
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(0, 1.04)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def headline(axes: Axes, title: str, caption: str) -> None:
    """A bold title with one muted line under it, both flush left."""
    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=24)
    axes.text(0, 1.025, caption, transform=axes.transAxes, color=MUTED, fontsize=9.5, va="bottom")


def save(figure: Figure, path: Path) -> Path:
    """Writes the PNG in one move, so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.part")
    figure.savefig(unfinished, format="png")
    unfinished.replace(path)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl.agentopsd.evaluation.plots", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="directory of a run, holds metrics.jsonl")
    parser.add_argument("--out", type=Path, help="the PNG; RUN_DIR/success_curve.png if not given")
    args = parser.parse_args(argv)
    try:
        print(success_curve(args.run_dir, args.out))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
