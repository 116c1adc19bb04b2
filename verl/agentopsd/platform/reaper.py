"""Ends what a killed driver would leave behind: ``python reaper.py DRIVER PROCESS...``, descriptors of processes.

Most of what Ray starts dies with the driver. Its two agents do not: they notice that their raylet is gone and then try
for a minute to report it to a server that is gone too.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

GRACE_SECONDS = 5.0
"""For processes that end by themselves."""


def watch_over(processes: Sequence[int]) -> subprocess.Popen[bytes] | None:
    """Starts a process that waits until this one has ended, however it does, and then ends ``processes``.

    Does nothing where the kernel has no descriptors of processes or hides them (Linux before 5.3, macOS, some
    containers): then Ray's agents stay for their minute.

    Args:
        processes: their ids.
    """
    descriptors: list[int] = []
    try:
        if not hasattr(os, "pidfd_open"):
            return None
        for number in (os.getpid(), *processes):
            with contextlib.suppress(ProcessLookupError):  # it has ended since it was listed
                descriptors.append(os.pidfd_open(number))  # stands for this very process, unlike its id
        return subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # who ends the driver's group or terminal must not end this one
        )
    except OSError:
        return None
    finally:
        for one in descriptors:
            os.close(one)


def ended_of(processes: Sequence[int], seconds: float | None) -> list[int]:
    """Those that have ended, as soon as one has."""
    poll = select.poll()
    for one in processes:
        poll.register(one, select.POLLIN)
    return [one for one, _ in poll.poll(None if seconds is None else 1000 * seconds)]


def main(arguments: Sequence[str]) -> None:
    driver, *processes = map(int, arguments)
    ended_of([driver], None)
    deadline = time.monotonic() + GRACE_SECONDS
    while processes and (left := deadline - time.monotonic()) > 0:
        ended = ended_of(processes, left)
        processes = [one for one in processes if one not in ended]
    for one in processes:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(one, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
