"""What the teacher's reading costs of an update when no group is trivial, and when half of them are.

How many rows the teacher reads depends on the games that were won, so that a run passes through many numbers: its
seconds are fitted as a line through tokens read, and the line is taken at all rows and at half of them. Against: the
same updates without their teacher. Beside it what one forward pass over these tokens costs at the speed of the pass for
the old log-probs, which is measured in the same updates and has the entropies too: the teacher cannot do with less than
a pass, and with less than this only by leaving those out.

    python -m benchmarks.teacher_share                  # a run of its own, the CPU default
    python -m benchmarks.teacher_share --run RUN_DIR    # of a run that was made
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks.harness import machine, number, parser, report, table


def played(folder: Path, updates: int) -> Path:
    """A run of the CPU default without validation and checkpoints.

    Raises:
        RuntimeError: the run failed; with the end of its output.
    """
    command = [sys.executable, "-m", "verl.agentopsd.main", f"run_dir={folder / 'run'}", "trainer.test_freq=-1"]
    command += [f"trainer.total_training_steps={updates}", "trainer.val_before_train=false", "trainer.save_freq=-1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-3000:])
    return folder / "run"


def updates_of(run_dir: Path) -> list[dict[str, float]]:
    """Metrics of every update after the first in which the teacher read something."""
    rows = [json.loads(line)["data"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if "timing_s/step" in row and "teacher/seconds" in row]
    return [row for row in updates[1:] if row["teacher/rows_scored"]]


def shares(updates: list[dict[str, float]]) -> dict[str, Any]:
    """The line, and the shares at all rows and at half of them."""

    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in updates])

    if len(updates) < 3 or len({row["teacher/tokens"] for row in updates}) < 2:
        raise SystemExit("a line needs three updates in which the teacher read different numbers of tokens")
    tokens, seconds, scored = column("teacher/tokens"), column("teacher/seconds"), column("teacher/rows_scored")
    line = stats.linregress(tokens, seconds)
    rest = float(np.median(column("timing_s/step") - seconds))
    all_rows = float(scored[0] + updates[0]["teacher/rows_skipped"])
    per_row = float(np.median(tokens / scored))
    old = float(np.median(column("timing_s/old_log_prob") / column("perf/total_num_tokens")))
    found: dict[str, Any] = {
        "updates": len(updates),
        "rows": all_rows,
        "tokens_per_row": per_row,
        "seconds_per_1000_tokens": 1000 * line.slope,
        "seconds_at_zero": line.intercept,
        "r_squared": line.rvalue**2,
        "rest_of_the_update": rest,
    }
    for name, rows in {"none trivial": all_rows, "half trivial": all_rows / 2}.items():
        read = rows * per_row
        teacher = float(line.intercept + line.slope * read)
        found[name] = {
            "rows": rows,
            "seconds": teacher,
            "interval": float(stats.t.ppf(0.975, len(tokens) - 2)) * standard_error(tokens, seconds, line, read),
            "share": teacher / rest,
            "one_pass_share": old * read / rest,
        }
    return found


def standard_error(x: np.ndarray, y: np.ndarray, line: Any, at: float) -> float:
    """Of the line's value at ``at``."""
    residuals = y - (line.intercept + line.slope * x)
    variance = float(residuals @ residuals) / (len(x) - 2)
    return float(np.sqrt(variance * (1 / len(x) + (at - x.mean()) ** 2 / ((x - x.mean()) ** 2).sum())))


def main() -> None:
    made = parser("teacher_share", __doc__)
    made.add_argument("--run", type=Path, help="a run directory with metrics.jsonl, instead of a run of its own")
    made.add_argument("--updates", type=int, default=12, help="of its own run (default: %(default)s)")
    options = made.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory(prefix="agentopsd-teacher-") as folder:
        run_dir = options.run or played(Path(folder), 5 if options.quick else options.updates)
        found = shares(updates_of(run_dir))
    lines = [
        [
            name,
            int(found[name]["rows"]),
            f"{number(found[name]['seconds'])} ± {number(found[name]['interval'])} s",
            f"{found[name]['share']:.1%}",
            f"{found[name]['one_pass_share']:.1%}",
        ]
        for name in ("none trivial", "half trivial")
    ]
    print(table(["groups", "rows read", "teacher", "of the rest of the update", "one pass like the old one's"], lines))
    print(
        f"{found['updates']} updates; {number(found['seconds_per_1000_tokens'])} s per 1,000 tokens and "
        f"{number(found['seconds_at_zero'])} s at none (R² {found['r_squared']:.2f}); "
        f"{number(found['tokens_per_row'])} tokens a row; the rest: {number(found['rest_of_the_update'])} s an update"
    )
    report(options, "teacher_share", before, found)


if __name__ == "__main__":
    main()
