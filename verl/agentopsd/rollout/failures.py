"""How an error in an agent-loop worker reaches the person at the terminal.

verl's transfer queue only says that a game failed. The worker therefore leaves the reason in the run directory, and the
trainer quotes the first one. On a cluster without a shared file system the reason is only in the worker's own log.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from verl.agentopsd.redact import redact

FILE_NAME = "worker-errors.log"


def report(run_dir: str | Path, where: str, error: BaseException) -> None:
    """Appends one error; never raises, since it runs while another error is on its way."""
    with contextlib.suppress(OSError), (Path(run_dir) / FILE_NAME).open("a", encoding="utf-8") as file:
        file.write(redact(f"{where}: {type(error).__name__}: {error}") + "\n")


def worker_errors(run_dir: str | Path) -> str:
    """What the workers reported, for the end of a sentence."""
    path = Path(run_dir) / FILE_NAME
    if not path.exists():
        return "the workers left no reason; ray_kwargs.ray_init.log_to_driver=true shows their logs"
    lines = path.read_text(encoding="utf-8").splitlines()
    return f"the first of {len(lines)} reported lines: {lines[0]} (all in {path})"
