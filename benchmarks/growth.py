"""How an update's own work grows: teacher pass, credit, and the policy's forward and backward pass.

One dimension at a time (episodes per game, turns, tokens per turn) around 8 games × 8 episodes × 12 turns × 24 tokens,
with the shipped model in plain torch on one core, in processor time, so that other work on the machine counts little.
The time is compared with a straight line through the smallest and the largest measurement: ``worst`` is the largest
distance between. Attention grows with the square of a row, so turns and tokens per turn bend upwards a little. Ray's
and vLLM's share, and the growth with workers, need the whole stack and are not in here.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness import ROOT, machine, number, parser, report, table
from verl.agentopsd.credit import CreditConfig, agentopsd_credit
from verl.agentopsd.models.tiny import TINY_ALFWORLD, TinyLM

BASE = {"episodes per game": 8, "turns": 12, "tokens per turn": 24}
GAMES, SAMPLED, MICRO_TOKENS = 8, 8, 4000
GRID = {"episodes per game": (4, 8, 12, 16), "turns": (6, 12, 24, 36), "tokens per turn": (12, 24, 36, 48)}


def update_seconds(model: TinyLM, rows: int, turns: int, per_turn: int) -> float:
    """Processor seconds of one update over ``rows`` episodes."""
    generator = torch.Generator().manual_seed(0)
    length = turns * per_turn
    ids = torch.randint(model.config.vocab_size, (rows, length), generator=generator)
    turn_ids = torch.arange(length).div(per_turn, rounding_mode="floor").expand(rows, length).clone()
    turn_ids[:, torch.arange(length) % per_turn >= SAMPLED] = -1
    turn_ids[:, 0] = -1
    mask = turn_ids >= 0
    size = max(1, MICRO_TOKENS // length)
    started = time.process_time()
    gaps = torch.zeros(rows, length)
    for start in range(0, rows, size):
        part = slice(start, start + size)
        with torch.no_grad():
            gaps[part][mask[part]] = model.log_probs(ids[part], mask[part])
    weights = agentopsd_credit(
        torch.randn(rows, generator=generator), gaps, turn_ids, torch.full((rows,), 0.5), CreditConfig()
    )
    for start in range(0, rows, size):
        part = slice(start, start + size)
        scored = model.log_probs(ids[part], mask[part])
        (-(scored * weights.advantages[part][mask[part]]).mean()).backward()
    model.zero_grad()
    return time.process_time() - started


def worst_distance(sizes: tuple[int, ...], seconds: list[float]) -> float:
    """Largest relative distance from the line through the first and the last point."""
    slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    line = [seconds[0] + slope * (size - sizes[0]) for size in sizes]
    return max(abs(found / expected - 1) for found, expected in zip(seconds, line, strict=True))


def draw(curves: dict[str, tuple[tuple[int, ...], list[float]]], path: Path) -> None:
    """The figure of docs/performance.md."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(9, 2.8), sharey=True, layout="constrained")
    for axis, (name, (sizes, seconds)) in zip(axes, curves.items(), strict=True):
        axis.plot(sizes, seconds, "o-", color="#1f5fa8", linewidth=1.6, markersize=4)
        axis.plot([sizes[0], sizes[-1]], [seconds[0], seconds[-1]], ":", color="#888888", linewidth=1)
        axis.set_xlabel(name)
        axis.set_xticks(sizes)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("processor seconds per update")
    figure.savefig(path, dpi=160)


def main() -> None:
    made = parser("growth", __doc__, repeats=5)
    made.add_argument("--figure", type=Path, default=ROOT / "docs" / "growth.png", help="default: %(default)s")
    options = made.parse_args()
    if options.quick and options.figure == made.get_default("figure"):
        options.figure = Path(tempfile.gettempdir()) / "agentopsd-quick-growth.png"
    before = machine()
    torch.set_num_threads(1)
    model = TinyLM.from_pretrained(TINY_ALFWORLD)
    points = [(name, size) for name, sizes in GRID.items() for size in sizes]
    found: dict[tuple[str, int], list[float]] = {point: [] for point in points}
    for number_of_round in range(1 + (1 if options.quick else options.repeats)):
        for name, size in points:
            shape = {**BASE, name: size}
            seconds = update_seconds(
                model, GAMES * shape["episodes per game"], shape["turns"], shape["tokens per turn"]
            )
            if number_of_round:
                found[name, size].append(seconds)
    curves = {name: (sizes, [statistics.median(found[name, size]) for size in sizes]) for name, sizes in GRID.items()}
    worst = {name: worst_distance(sizes, seconds) for name, (sizes, seconds) in curves.items()}
    rows = [
        [name, " ".join(map(str, sizes)), " ".join(number(value) for value in seconds), f"{worst[name]:.0%}"]
        for name, (sizes, seconds) in curves.items()
    ]
    print(table(["grows", "sizes", "processor seconds", "worst"], rows))
    draw(curves, options.figure)
    report(options, "growth", before, {"curves": curves, "worst": worst, "figure": options.figure.name})


if __name__ == "__main__":
    main()
