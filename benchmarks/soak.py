"""A long run with injected faults: does memory stay flat, is any episode lost or written twice?

    python -m benchmarks.soak --updates 200 --fault-rate 0.01 --kills 4 --out soak

Trains the tiny model on the CPU with environments that fail at a set rate. At random moments of the first half a
process of the run is killed (the driver, the rollout engine, an agent-loop worker, the learner, or the driver by
SIGTERM), and the same command is given again. After the last update, or when the time is over, SIGTERM; then what is
left is looked at: one record per episode, one line per update, the memory of every process since the last start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
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
    names: dict[int, str] = field(default_factory=dict)
    by_process: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def sample(self, root: psutil.Process, now: float) -> None:
        """One look at ``root`` and everything below it."""
        self.seconds.append(now)
        for process in [root, *root.children(recursive=True)]:
            try:
                name = self.names.setdefault(process.pid, name_of(process))  # Ray's titles change with the call
                self.by_process[name].append((now, process.memory_full_info().uss / 2**20))
            except psutil.Error:
                continue

    def table(self) -> list[tuple[str, float, float, float, float]]:
        """Name, MiB after the warm-up, half-way and at the end (means over a fifth of the rest each), and MiB per hour
        of the second half: a cache that fills, or an allocator that settles, slows down.
        """
        rows = []
        begin = self.seconds[0] + WARM_UP * (self.seconds[-1] - self.seconds[0])
        for name, samples in sorted(self.by_process.items()):
            after = [(when, mib) for when, mib in samples if when >= begin]
            if len(after) < 10:
                continue
            fifth = len(after) // 5
            parts = (after[:fifth], after[2 * fifth : 3 * fifth], after[-fifth:])
            first, middle, last = (sum(mib for _, mib in part) / fifth for part in parts)
            hours = (after[-1][0] - after[0][0]) * 0.4 / 3600
            rows.append((name, first, middle, last, (last - middle) / hours))
        return sorted(rows, key=lambda row: -row[3])

    def write(self, path: Path) -> None:
        """Every sample as CSV, and beside it a picture of the processes that changed."""
        import matplotlib
        import pandas

        matplotlib.use("Agg")
        from matplotlib import pyplot

        samples = [(name, when, mib) for name, found in self.by_process.items() for when, mib in found]
        frame = pandas.DataFrame(samples, columns=["process", "seconds", "mib"])
        frame["seconds"] -= self.seconds[0]
        frame.to_csv(path, index=False, float_format="%.2f")
        figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        for name, first, *_, last, _ in self.table():
            if abs(last - first) >= 2:
                own = frame[frame.process == name]
                axis.plot(own.seconds / 60, own.mib - first, label=name, linewidth=1)
        axis.set_xlabel("minutes since the last start")
        axis.set_ylabel("MiB beside the level after the warm-up")
        axis.spines[["top", "right"]].set_visible(False)
        if axis.lines:
            axis.legend(fontsize="small", frameon=False)
        figure.savefig(path.with_suffix(".png"), dpi=130)


def name_of(process: psutil.Process) -> str:
    """What the process is, with its id, since there may be several of a kind."""
    command = process.cmdline()
    title = command[0] if command and command[0].startswith("ray::") else " ".join(command[:3])
    for part in ("gcs_server", "raylet", "verl.agentopsd.main", "dashboard", "log_monitor", "runtime_env"):
        if part in " ".join(command):
            title = part
            break
    return f"{title.split(' ')[0].rsplit('/', 1)[-1][:40]} ({process.pid})"


VICTIMS = {"driver": "", "engine": "VLLM::EngineCore", "player": "AgentLoopWorker", "learner": "WorkerDict"}
"""Who is killed -> what its command line has in it."""
ORDERLY = "SIGTERM"


@dataclass(frozen=True)
class Plan:
    """When the run is struck: the number of completed updates after which, and the victim."""

    updates: int
    blows: list[tuple[int, str]]

    @classmethod
    def drawn(cls, updates: int, kills: int, seed: int) -> Plan:
        """Every victim once before any comes twice; moments in the first half, each in a part of its own."""
        draw = random.Random(seed)
        kinds = [*VICTIMS, ORDERLY]
        victims = [kind for _ in range(-(-kills // len(kinds))) for kind in draw.sample(kinds, len(kinds))][:kills]
        slots = [round((number + 0.2 + 0.6 * draw.random()) * updates / 2 / max(kills, 1)) for number in range(kills)]
        return cls(updates, list(zip(slots, victims, strict=True)))


def updates_of(run_dir: Path) -> int:
    """The last completed update."""
    metrics = run_dir / "metrics.jsonl"
    return max(read_metrics(run_dir).steps, default=0) if metrics.is_file() and metrics.stat().st_size else 0


def strike(process: subprocess.Popen[bytes], victim: str) -> None:
    """One blow; raises when the victim is not there."""
    if victim in ("driver", ORDERLY):
        process.send_signal(signal.SIGTERM if victim == ORDERLY else signal.SIGKILL)
        return
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if VICTIMS[victim] in " ".join(child.cmdline()):
                child.kill()
                return
    raise RuntimeError(f"no {victim} among the processes of the run")


def soak(run_dir: Path, plan: Plan, minutes: float, rate: float, every: float) -> tuple[Memory, list[str]]:
    """Runs until ``plan.updates`` updates are complete or ``minutes`` are over.

    Returns:
        The memory since the last start, and a line for every blow: victim, moment, exit code.
    """
    environment = os.environ | {"VERL_USE_EXTERNAL_MODULES": "benchmarks.faulty_env", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "verl.agentopsd.main", *SETTINGS, f"+env.fault_rate={rate}", f"run_dir={run_dir}"]
    blows, told, over = list(plan.blows), [], time.monotonic() + minutes * 60
    with (run_dir.parent / f"{run_dir.name}-output.log").open("w") as log:
        while True:
            memory = Memory()
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=run_dir.parent
            )
            root, resumed = psutil.Process(process.pid), updates_of(run_dir)
            struck = last = ""
            while process.poll() is None:
                time.sleep(every)
                done = updates_of(run_dir)
                if last or struck:
                    continue
                if done > resumed:
                    memory.sample(root, time.monotonic())
                if done >= plan.updates or time.monotonic() > over:
                    last = ORDERLY
                    process.send_signal(signal.SIGTERM)
                elif blows and done >= max(blows[0][0], resumed + 1):
                    _, struck = blows.pop(0)
                    told.append(f"{struck} after update {done}")
                    print(f"{time.strftime('%H:%M:%S')} {told[-1]}", flush=True)
                    strike(process, struck)
            code = process.wait(timeout=300)
            if last:
                assert code == 0, f"the run ended with {code}, see {log.name}"
                return memory, told
            expected = {"": None, "driver": -signal.SIGKILL, ORDERLY: 0}.get(struck, 1)
            assert code == expected, f"the run ended with {code} after a blow at {struck or 'nobody'}, see {log.name}"


def findings(run_dir: Path) -> dict[str, int]:
    """What was written, counted; raises when an episode is lost or there twice."""
    steps = sorted(read_metrics(run_dir).steps)
    assert steps == list(range(1, len(steps) + 1)), "an update's line is missing"
    keys: Counter[tuple[int, str, int]] = Counter()
    lost = set()
    for file in sorted((run_dir / "rollouts").glob("*.jsonl")):
        for record in read_records(file):
            keys[record.step, record.group, record.sample] += 1
            if record.env_error:
                lost.add((record.step, record.game_id, record.sample))
    expected = {step: GAMES * SAMPLES for step in steps}
    assert Counter(step for step, _, _ in keys) == expected, "an update has too few or too many episodes"
    assert set(keys.values()) == {1}, "an episode was written twice"
    lines = [json.loads(line) for line in (run_dir / "env-errors.jsonl").read_text().splitlines()]
    # an update that was repeated after a blow lost the same episodes again
    named = {(line["step"], line["game_id"], line["sample"]) for line in lines if line["step"] <= steps[-1]}
    assert named == lost, "an episode lost to the environment is not in env-errors.jsonl"
    assert latest_step(run_dir / "checkpoints") == steps[-1], "SIGTERM did not save the last update"
    return {"updates": len(steps), "episodes": len(keys), "lost to injected faults": len(lost)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=90, help="at most, without the last save")
    parser.add_argument("--fault-rate", type=float, default=0.01, help="per reset and per step of an environment")
    parser.add_argument("--kills", type=int, default=0, help="how many times a process of the run is killed")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--every", type=float, default=5, help="seconds between two looks at the memory")
    parser.add_argument("--out", type=Path, default=Path("soak"), help="run directory; must not exist")
    options = parser.parse_args()
    run_dir = options.out.absolute()
    if run_dir.exists():
        parser.error(f"{run_dir} exists")
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    plan = Plan.drawn(options.updates, options.kills, options.seed)
    began = time.monotonic()
    memory, blows = soak(run_dir, plan, options.minutes, options.fault_rate, options.every)
    found = findings(run_dir)
    minutes = (time.monotonic() - began) / 60
    print(f"{minutes:.1f} min, " + ", ".join(f"{count} {name}" for name, count in found.items()))
    print(f"blows: {'; '.join(blows) or 'none'}")
    print(f"memory over the last {(memory.seconds[-1] - memory.seconds[0]) / 60:.1f} min, since the last start")
    print("| process | MiB after warm-up | half-way | at the end | MiB per hour, second half |")
    print("|---|---|---|---|---|")
    for name, first, middle, last, slope in memory.table():
        print(f"| {name} | {first:.0f} | {middle:.0f} | {last:.0f} | {slope:+.0f} |")
    samples = run_dir.with_name(f"{run_dir.name}-memory.csv")
    memory.write(samples)
    print(f"every sample: {samples}, a picture: {samples.with_suffix('.png')}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
