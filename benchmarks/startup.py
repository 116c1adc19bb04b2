"""From the command to the first finished update on the CPU default: when, and what every process did meanwhile.

Starts ``python -m verl.agentopsd.main`` with the CPU defaults, watches the processes that descend from it and stops it
after the first update. The table has one line per process: when it appeared, when it was first idle for a second, the
processor time until the first update, and its memory at the end (proportional set size). ``--repeats`` repeats the
start; with ``--against PYTHON`` every run is followed by one with that interpreter, of an environment that has another
version installed, for a ratio on the same machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import Sample, machine, number, parser, ratio, report, spread, table

PERIOD = 0.1
IDLE_SHARE = 0.2


@dataclass
class Watched:
    """One process; times in seconds after the command."""

    name: str
    appeared: float
    cpu: float = 0.0
    pss_mib: float = 0.0
    history: list[tuple[float, float]] = field(default_factory=list)

    def first_idle(self) -> float:
        """When it had, for the first time, used less than a fifth of a core for a second."""
        for index, (moment, cpu) in enumerate(self.history):
            later = next((one for one in self.history[index:] if one[0] >= moment + 1.0), None)
            if later is not None and later[1] - cpu < IDLE_SHARE * (later[0] - moment):
                return moment
        return self.history[-1][0] if self.history else self.appeared


def watch(overrides: list[str], python: str = sys.executable, limit: float = 600.0) -> dict[str, Any]:
    """One start. Returns seconds to the plan, to the first update and to the end, and the processes.

    Raises:
        RuntimeError: the run ended or ``limit`` seconds passed before the first update; with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="agentopsd-start-") as folder:
        log, run_dir = Path(folder) / "log", Path(folder) / "run"
        command = [python, "-m", "verl.agentopsd.main", f"run_dir={run_dir}", *overrides]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with log.open("w") as output:
            started = time.perf_counter()
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
            )
            try:
                found = _follow(process, log, run_dir / "metrics.jsonl", started, limit)
            finally:
                _stop(process)
        return found


def _follow(process: subprocess.Popen, log: Path, metrics: Path, started: float, limit: float) -> dict[str, Any]:
    watched: dict[int, Watched] = {}
    plan: float | None = None
    known: dict[int, psutil.Process] = {}
    while True:
        now = time.perf_counter() - started
        _look(process.pid, now, watched, known)
        if plan is None and "updates" in log.read_text(errors="replace"):
            plan = now
        # the first line of metrics is validation's when there is one
        if metrics.exists() and any('"step": 1,' in line or '"step":1,' in line for line in metrics.open()):
            break
        if process.poll() is not None or now > limit:
            raise RuntimeError(f"no update after {now:.0f} s: {log.read_text(errors='replace')[-3000:]}")
        time.sleep(PERIOD)
    for pid, one in watched.items():
        with contextlib.suppress(psutil.Error, OSError):
            one.pss_mib = known[pid].memory_full_info().pss / 2**20
    ordered = sorted(watched.values(), key=lambda one: one.appeared)
    return {
        "plan": plan or 0.0,
        "first_update": now,
        "cpu": sum(one.cpu for one in ordered),
        "processes": [
            {
                "name": one.name,
                "appeared": round(one.appeared, 2),
                "first_idle": round(one.first_idle(), 2),
                "cpu": round(one.cpu, 2),
                "pss_mib": round(one.pss_mib),
            }
            for one in ordered
        ],
        "stages": _stages(metrics),
    }


def _look(pid: int, now: float, watched: dict[int, Watched], known: dict[int, psutil.Process]) -> None:
    with contextlib.suppress(psutil.Error):
        root = known.setdefault(pid, psutil.Process(pid))
        for one in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                times = one.cpu_times()
                entry = watched.setdefault(one.pid, Watched(_title(one), now))
                known.setdefault(one.pid, one)
                entry.name = _title(one)
                entry.cpu = times.user + times.system
                entry.history.append((now, entry.cpu))


def _title(process: psutil.Process) -> str:
    words = process.cmdline()
    if not words:
        return process.name()
    if words[0].startswith("ray::"):
        return words[0]
    if "verl.agentopsd.main" in words or words[-1:] == ["driver"]:
        return "driver"
    script = next((Path(word).name for word in words[1:] if word.endswith(".py")), Path(words[0]).name)
    return script


def _stages(metrics: Path) -> dict[str, float]:
    """Seconds of the stages of the first update, as the run recorded them."""
    import json

    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    first = next(row["data"] for row in rows if row["step"] == 1)
    return {name: value for name, value in first.items() if name.startswith("timing_s/")}


def _stop(process: subprocess.Popen) -> None:
    with contextlib.suppress(psutil.Error, ProcessLookupError):
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.kill()


def main() -> None:
    made = parser("startup", __doc__, repeats=3)
    made.add_argument("--against", type=Path, help="Python of another installation, started in turns with this one")
    made.add_argument("overrides", nargs="*", help="KEY=VALUE of the main command")
    options = made.parse_args()
    before = machine()
    runs: dict[str, list[dict[str, Any]]] = {"now": [], **({"before": []} if options.against else {})}
    for _ in range(1 if options.quick else options.repeats):
        for side, collected in runs.items():
            collected.append(watch(options.overrides, sys.executable if side == "now" else str(options.against)))
            print(side, {name: round(collected[-1][name], 1) for name in ("plan", "first_update", "cpu")}, flush=True)
    seconds = {side: Sample(tuple(run["first_update"] for run in collected)) for side, collected in runs.items()}
    last = runs["now"][-1]
    header = ["process", "appeared s", "first idle s", "processor s", "memory MiB"]
    rows = [[*list(one.values())] for one in last["processes"] if one["cpu"] > 0.3]
    print(table(header, rows))
    print(f"processor time in all: {number(last['cpu'])} s on {os.cpu_count()} cores")
    for side, sample in seconds.items():
        print(f"{side}: first update after {spread(sample)}")
    result: dict[str, Any] = {"first_update_seconds": seconds, "runs": runs}
    if options.against:
        result["ratio"] = ratio(seconds["before"], seconds["now"])
    report(options, "startup", before, result)


if __name__ == "__main__":
    main()
