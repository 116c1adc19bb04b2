"""A long run with injected faults: does memory stay flat, is any episode lost or written twice?

    python -m benchmarks.soak --minutes 20 --fault-rate 0.01 --out soak

Trains the tiny model on the CPU with environments that fail at a set rate, ends it with SIGTERM when the time is over,
and looks at what is left: one record per episode, one line per update, the memory of every process over time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from verl.agentopsd.checkpoints import latest_step
from verl.agentopsd.evaluation.records import read_records
from verl.agentopsd.evaluation.run_metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
GAMES, SAMPLES = 4, 4
SETTINGS = [
    *("model=tiny", "device=cpu", f"data.train_batch_size={GAMES}", f"actor_rollout_ref.rollout.n={SAMPLES}"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=2", "hardware.cpu_micro_batch=4", "env.max_turns=12"),
    *("trainer.total_training_steps=100000", "trainer.test_freq=-1", "trainer.val_before_train=false"),
    *(
        "trainer.save_freq=10",
        "trainer.max_actor_ckpt_to_keep=2",
        "env.name=alfworld_faulty",
        "env.max_error_share=0.9",
    ),
]
WARM_UP = 0.3
"""Share of the run that is not looked at: pools and caches fill."""


@dataclass
class Memory:
    """Private memory of each kind of process over time, in MiB."""

    seconds: list[float] = field(default_factory=list)
    by_process: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def sample(self, root: psutil.Process, now: float) -> None:
        """One look at ``root`` and everything below it."""
        self.seconds.append(now)
        for process in [root, *root.children(recursive=True)]:
            try:
                self.by_process[name_of(process)].append((now, process.memory_full_info().uss / 2**20))
            except psutil.Error:
                continue

    def table(self) -> list[tuple[str, float, float, float]]:
        """Name, MiB after the warm-up, MiB at the end (means over a fifth of the rest each), MiB per hour."""
        rows = []
        begin = self.seconds[0] + WARM_UP * (self.seconds[-1] - self.seconds[0])
        for name, samples in sorted(self.by_process.items()):
            after = [(when, mib) for when, mib in samples if when >= begin]
            if len(after) < 10:
                continue
            fifth = len(after) // 5
            first, last = (sum(mib for _, mib in part) / fifth for part in (after[:fifth], after[-fifth:]))
            hours = (after[-1][0] - after[0][0]) * 0.8 / 3600
            rows.append((name, first, last, (last - first) / hours))
        return sorted(rows, key=lambda row: -row[2])


def name_of(process: psutil.Process) -> str:
    """What the process is, with its id, since there may be several of a kind."""
    command = process.cmdline()
    title = command[0] if command and command[0].startswith("ray::") else " ".join(command[:3])
    for part in ("gcs_server", "raylet", "verl.agentopsd.main", "dashboard", "log_monitor", "runtime_env"):
        if part in " ".join(command):
            title = part
            break
    return f"{title.split(' ')[0].rsplit('/', 1)[-1][:40]} ({process.pid})"


def soak(run_dir: Path, minutes: float, rate: float, every: float) -> tuple[Memory, int]:
    """Runs for ``minutes``, counted from the first update; returns the memory and the exit code."""
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "benchmarks.faulty_env", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "verl.agentopsd.main", *SETTINGS, f"+env.fault_rate={rate}", f"run_dir={run_dir}"]
    memory, began = Memory(), None
    with (run_dir.parent / f"{run_dir.name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=run_dir.parent)
        root = psutil.Process(process.pid)
        while process.poll() is None:
            time.sleep(every)
            metrics = run_dir / "metrics.jsonl"
            if began is None:
                began = time.monotonic() if metrics.is_file() and metrics.stat().st_size else None
                continue
            memory.sample(root, time.monotonic() - began)
            if time.monotonic() - began > minutes * 60:
                process.send_signal(signal.SIGTERM)
                break
        return memory, process.wait(timeout=300)


def findings(run_dir: Path) -> dict[str, int]:
    """What was written, counted; raises when an episode is lost or there twice."""
    steps = sorted(read_metrics(run_dir).steps)
    assert steps == list(range(1, len(steps) + 1)), "an update's line is missing"
    keys: Counter[tuple[int, str, int]] = Counter()
    lost = 0
    for file in sorted((run_dir / "rollouts").glob("*.jsonl")):
        for record in read_records(file):
            keys[record.step, record.group, record.sample] += 1
            lost += bool(record.env_error)
    expected = {step: GAMES * SAMPLES for step in steps}
    assert Counter(step for step, _, _ in keys) == expected, "an update has too few or too many episodes"
    assert set(keys.values()) == {1}, "an episode was written twice"
    named = [json.loads(line) for line in (run_dir / "env-errors.jsonl").read_text().splitlines()]
    assert len(named) == lost, "an episode lost to the environment is not in env-errors.jsonl"
    assert latest_step(run_dir / "checkpoints") == steps[-1], "SIGTERM did not save the last update"
    return {"updates": len(steps), "episodes": len(keys), "lost to injected faults": lost}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--fault-rate", type=float, default=0.01, help="per reset and per step of an environment")
    parser.add_argument("--every", type=float, default=5, help="seconds between two looks at the memory")
    parser.add_argument("--out", type=Path, default=Path("soak"))
    options = parser.parse_args()
    run_dir = options.out.absolute()
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    memory, code = soak(run_dir, options.minutes, options.fault_rate, options.every)
    assert code == 0, f"the run ended with {code}, see {run_dir}.log"
    found = findings(run_dir)
    print(f"{memory.seconds[-1] / 60:.1f} min, " + ", ".join(f"{count} {name}" for name, count in found.items()))
    print("| process | MiB after warm-up | MiB at the end | MiB per hour |\n|---|---|---|---|")
    for name, first, last, slope in memory.table():
        print(f"| {name} | {first:.0f} | {last:.0f} | {slope:+.0f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
