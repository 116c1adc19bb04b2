"""One update on the CPU default, with the method and without it, on the same episodes; and against plain torch.

Starts ``python -m verl.agentopsd.main`` twice: ``adv_estimator=agentopsd`` with lambda 0, and ``grpo``. With lambda 0
the teacher rereads and the credit is computed, but the advantages are GRPO's bit for bit, so that both runs play the
same episodes and train on the same numbers (the episodes are compared). Medians over the updates after the first; the
difference, stage by stage, is what the method costs. ``--plain`` runs ``benchmarks/plain_torch_rl.py`` beside them.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Sample, machine, number, parser, report, table

STAGES = {
    "rollout": "timing_s/gen",
    "old log-probs": "timing_s/old_log_prob",
    "advantage": "timing_s/adv",
    "of it the teacher": "teacher/seconds",
    "update": "timing_s/update_actor",
    "weight sync": "timing_s/update_weights",
    "whole step": "timing_s/step",
}
SIDES = {
    "agentopsd": ["algorithm.adv_estimator=agentopsd", "agentopsd.lambda=0"],
    "grpo": ["algorithm.adv_estimator=grpo"],
}


def run(name: str, updates: int, folder: Path, overrides: list[str]) -> list[dict[str, float]]:
    """Metrics of each update.

    Raises:
        RuntimeError: the run failed; with the end of its output.
    """
    command = [sys.executable, "-m", "verl.agentopsd.main", f"run_dir={folder / name}", *SIDES[name]]
    command += [f"trainer.total_training_steps={updates}", "trainer.val_before_train=false", "trainer.test_freq=-1"]
    command += ["trainer.save_freq=-1", *overrides]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {(done.stdout + done.stderr)[-3000:]}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [row["data"] for row in rows if "timing_s/step" in row["data"]]


def answers(folder: Path, name: str, update: int) -> list[list[str]]:
    """What was said in each episode of an update."""
    from verl.agentopsd.evaluation.records import read_records

    records = read_records(folder / name / "rollouts" / f"{update:06d}.jsonl").episodes
    return [[turn.text for turn in one.turns] for one in records]


def plain(updates: int, folder: Path, method: str) -> dict[str, float]:
    """Median seconds of sampling and of a whole update of the loop in plain torch."""
    out = folder / f"plain-{method}.json"
    script = ROOT / "benchmarks" / "plain_torch_rl.py"
    command = [sys.executable, str(script), "--method", method, "--updates", str(updates)]
    command += ["--eval-every", str(10**6), "--out", str(out)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    rows = json.loads(out.read_text())["updates"][1:]
    return {name: statistics.median(row[f"{name}_s"] for row in rows) for name in ("sampling", "total")}


def main() -> None:
    made = parser("update", __doc__)
    made.add_argument("--updates", type=int, default=6, help="per run; the first is left out (default: %(default)s)")
    made.add_argument("--plain", action="store_true", help="also the loop in plain torch")
    made.add_argument("overrides", nargs="*", help="KEY=VALUE of the main command, for both sides")
    options = made.parse_args()
    before = machine()
    updates = 2 if options.quick else options.updates
    with tempfile.TemporaryDirectory(prefix="agentopsd-update-") as name:
        folder = Path(name)
        metrics = {side: run(side, updates, folder, options.overrides) for side in SIDES}
        for update in range(1, updates + 1):
            assert answers(folder, "agentopsd", update) == answers(folder, "grpo", update), f"update {update} differs"
        loop = plain(updates, folder, "agentopsd") if options.plain else None
    result: dict[str, Any] = {"updates": updates}
    rows = []
    for stage, key in STAGES.items():
        ours, theirs = ([row.get(key, 0.0) for row in metrics[side][1:]] for side in SIDES)
        result[stage] = {"agentopsd": Sample(tuple(ours)), "grpo": Sample(tuple(theirs))}
        a, b = statistics.median(ours), statistics.median(theirs)
        rows.append([stage, a, b, number(a / b) if b else ""])
    scored = statistics.median(row["teacher/rows_scored"] for row in metrics["agentopsd"][1:])
    skipped = statistics.median(row["teacher/rows_skipped"] for row in metrics["agentopsd"][1:])
    result |= {"rows_scored": scored, "rows_skipped": skipped, "plain_torch_seconds": loop}
    print(table(["stage", "AgentOPSD s", "GRPO s", "ratio"], rows))
    print(f"the teacher read {scored:.0f} of {scored + skipped:.0f} rows (median)")
    if loop:
        rest = loop["total"] - loop["sampling"]
        print(f"plain torch: {loop['total']:.1f} s an update: {loop['sampling']:.1f} s sampling, {rest:.1f} s learning")
    report(options, "update", before, result)


if __name__ == "__main__":
    main()
