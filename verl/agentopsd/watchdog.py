"""A limit for every stage: a hang becomes an error that names the stage and leaves the stacks behind."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

from verl.agentopsd.redact import redact

STALLED_EXIT_CODE = 75
NOT_PYTHON = ("gcs_server", "raylet")
"""Ray's own programs, which have no Python stacks."""


@contextlib.contextmanager
def stage(name: str, limit_seconds: float, run_dir: Path) -> Iterator[None]:
    """Ends the process when the body takes longer than ``limit_seconds``.

    The body may be stuck in a remote call that no exception reaches, so the process and everything it started is
    killed after the stacks of all Python processes have been written to ``run_dir/stalled-<name>.txt``.
    """
    timer = threading.Timer(limit_seconds, _give_up, args=(name, limit_seconds, run_dir))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(name: str, limit_seconds: float, run_dir: Path) -> None:
    report = run_dir / f"stalled-{name}.txt"
    try:
        write_stacks(report)
    finally:
        print(
            f"\nerror: the stage '{name}' was not over after {limit_seconds:.0f} s and was stopped. The stacks of "
            f"all processes are in {report}. If the stage is merely slow, raise limits.{name}.",
            file=sys.stderr,
            flush=True,
        )
        kill_children()
        os._exit(STALLED_EXIT_CODE)


def write_stacks(report: Path) -> None:
    """This process's stacks, and those of its children where ``py-spy`` is installed."""
    import psutil

    report.parent.mkdir(parents=True, exist_ok=True)
    with report.open("w") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
    py_spy = shutil.which("py-spy") or str(Path(sys.executable).parent / "py-spy")
    if not Path(py_spy).exists():
        with report.open("a") as file:
            file.write("\nNo stacks of other processes: py-spy is missing, install it with pip install py-spy\n")
        return
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = child.cmdline()
            if command and Path(command[0]).name in NOT_PYTHON:
                continue
            stacks = redact(f"\n=== {child.pid} {' '.join(command)}\n{_stacks(py_spy, child.pid)}")
            with report.open("a") as file:
                file.write(stacks)


def _stacks(py_spy: str, pid: int) -> str:
    """What py-spy says about a process; engines set titles of their own, so it is asked about every one."""
    try:
        dump = subprocess.run(
            [py_spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=10, check=False
        )
    except subprocess.SubprocessError as error:
        return f"{error}\n"
    return dump.stdout or dump.stderr


def kill_children(spare: Collection[int] = ()) -> None:
    """Kills every process that descends from this one but those with an id in ``spare``, and waits for them."""
    import psutil

    children = [child for child in psutil.Process().children(recursive=True) if child.pid not in spare]
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.kill()
    psutil.wait_procs(children, timeout=10)
