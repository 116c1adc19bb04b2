"""The process that has imported everything: forks itself for every launcher that asks.

    python -m verl.agentopsd.platform.forked.server LISTENING_FD READY_FD LAUNCHER MODULE...

Ends when its parent does. It has one thread, as a process that forks must; if an import has started another, it says
so and ends, and the launchers fail.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing.spawn
import os
import random
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from typing import Any

MAX_FILES = 256
PR_SET_PDEATHSIG = 1


class Server:
    """Forks on request; one connection per fork, open as long as the fork lives."""

    def __init__(self, listening: socket.socket, launcher: str) -> None:
        self.listening, self.launcher = listening, launcher
        self.forks: dict[int, tuple[int, socket.socket]] = {}
        """Descriptor of a fork's process -> its id, and the launcher that stands for it."""

    def serve(self) -> None:
        """Until the parent is gone."""
        parent = os.pidfd_open(os.getppid())
        while True:
            connections = {connection.fileno(): process for process, (_, connection) in self.forks.items()}
            ready, _, _ = select.select([parent, self.listening.fileno(), *self.forks, *connections], [], [])
            if parent in ready:
                return
            for one in ready:
                if one == self.listening.fileno():
                    self.accept()
                elif one in self.forks:
                    self.ended(one)
                elif connections.get(one) in self.forks:
                    self.signalled(connections[one])

    def accept(self) -> None:
        connection, _ = self.listening.accept()
        try:
            request, files = receive(connection)
        except (OSError, ValueError):
            connection.close()  # the launcher was killed while it asked
            return
        pid = os.fork()
        if pid == 0:
            kept = [self.listening.fileno(), connection.fileno(), *self.forks]
            kept += [other.fileno() for _, other in self.forks.values()]
            become(request, files, unused=kept, launcher=self.launcher)
        for number in files:
            os.close(number)
        self.forks[os.pidfd_open(pid)] = pid, connection

    def ended(self, process: int) -> None:
        """Passes the exit code on."""
        pid, connection = self.forks.pop(process)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            connection.sendall(bytes([code if code >= 0 else 128 - code]))
        connection.close()
        os.close(process)

    def signalled(self, process: int) -> None:
        """Passes a signal on; a launcher that is gone was killed, and so is its fork."""
        _, connection = self.forks[process]
        try:
            got = connection.recv(1)
        except OSError:
            got = b""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, got[0] if got else signal.SIGKILL)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The request and the descriptors that came with it.

    Raises:
        ValueError: the connection ended early.
    """
    connection.settimeout(10)
    head, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(MAX_FILES * array.array("i").itemsize))
    files = array.array("i")
    for _, _, data in ancillary:
        files.frombytes(data)
    body = b""
    while len(head) == 4 and len(body) < int.from_bytes(head, "big"):
        if not (part := connection.recv(int.from_bytes(head, "big") - len(body))):
            break
        body += part
    connection.settimeout(None)
    if len(head) < 4 or len(body) < int.from_bytes(head, "big"):
        for number in files:
            os.close(number)
        raise ValueError("the request is not complete")
    return json.loads(body.decode("utf-8", "surrogateescape")), list(files)


def become(request: dict[str, Any], files: Sequence[int], unused: Sequence[int], launcher: str) -> None:
    """Turns this fork into the process that was asked for, and ends with it."""
    code = 1
    try:
        die_with_parent()
        for number in unused:
            os.close(number)
        put_files(files, request["files"])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.chdir(request["directory"])
        take_environment(request["environment"])
        fresh_state(launcher)
        code = run(request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def take_environment(environment: dict[str, str]) -> None:
    """Replaces this process's environment.

    Raises:
        ValueError: Ray's job is another than the one that was set when Ray was imported, which Ray would go on using.
    """
    job, wanted = os.environ["RAY_JOB_ID"], environment.get("RAY_JOB_ID", os.environ["RAY_JOB_ID"])
    if job != wanted:
        raise ValueError(f"this process was made for Ray's job {job}, not for {wanted}")
    os.environ.clear()
    os.environ.update(environment)


def die_with_parent() -> None:
    """Asks the kernel for SIGKILL when the server ends; Ray's own check of the raylet's process is set at import."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL)):
        raise OSError(ctypes.get_errno(), "prctl")


def put_files(received: Sequence[int], wanted: Sequence[int]) -> None:
    """Gives every received descriptor the number it had in the launcher."""
    high = max([*wanted, *received]) + 1
    moved: list[int] = []
    for number in received:
        moved.append(high + len(moved))
        os.dup2(number, moved[-1])
        os.close(number)
    for number, target in zip(moved, wanted, strict=True):
        os.dup2(number, target)  # inheritable, as it was
        os.close(number)


def fresh_state(launcher: str) -> None:
    """What two processes must not have in common, and what was read from another environment."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
    if "ray._raylet" in sys.modules:
        sys.modules["ray._raylet"].Config.initialize("")  # Ray's settings, from this environment
    # processes that this one starts are forks as well
    multiprocessing.spawn.set_executable(launcher)
    gc.enable()


def run(arguments: Sequence[str]) -> int:
    """What ``python ARGUMENTS`` does: a script or ``-c`` text, behind any options, as ``__main__``."""
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "-c":
        option = rest.pop(0)
        if option in ("-X", "-W"):
            rest.pop(0)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if rest[0] == "-c":
        text, name = rest[1], "<string>"
        sys.argv, sys.path[0] = ["-c", *rest[2:]], ""
    else:
        name = rest[0]
        with open(name, encoding="utf-8") as script:
            text = script.read()
        main.__file__ = name
        sys.argv, sys.path[0] = rest, os.path.dirname(os.path.abspath(name))
    sys.modules["__main__"] = main
    try:
        exec(compile(text, name, "exec"), main.__dict__)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def one_way_to_set_titles() -> None:
    """A process's title is written where its first arguments and environment lie, which whoever looks for that place
    moves away: Ray's own copy and vLLM's library find it only once, so that forks use the library for both.
    """
    library = importlib.import_module("setproctitle")
    library.getproctitle()
    if raylet := sys.modules.get("ray._raylet"):
        raylet.setproctitle, raylet.getproctitle = library.setproctitle, library.getproctitle  # type: ignore[attr-defined]


def main(arguments: Sequence[str]) -> int:
    listening, ready, launcher = socket.socket(fileno=int(arguments[0])), int(arguments[1]), arguments[2]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver's Ctrl-C; it ends the workers in their order
    gc.disable()
    for name in arguments[3:]:
        importlib.import_module(name)
    one_way_to_set_titles()
    gc.collect()
    gc.freeze()
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        print(f"{threads} threads run after the imports: this process cannot be forked", file=sys.stderr)
        return 1
    os.write(ready, b"1")
    os.close(ready)
    Server(listening, launcher).serve()
    shutil.rmtree(os.path.dirname(launcher), ignore_errors=True)  # the parent had no time to
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
