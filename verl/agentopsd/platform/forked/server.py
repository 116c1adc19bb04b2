"""The process that has imported everything: forks itself for every launcher that asks.

    python verl/agentopsd/platform/forked/server.py PARENT LISTENING_FD READY_FD LAUNCHER MODULE...

Ends when its parent does. It has one thread, as a process that forks must, and has drawn none of Ray's random ids, so
that forks draw different ones; if an import has broken either rule, it says so and ends, and the launchers fail.
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
import resource
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Sequence
from typing import Any

MAX_FILES = 253
"""The kernel's limit for one message (``SCM_MAX_FD``)."""
PR_SET_PDEATHSIG = 1
REQUEST_SECONDS = 5.0


class Server:
    """Forks on request; one connection per fork, open as long as the fork lives."""

    def __init__(self, parent: int, listening: socket.socket, launcher: str) -> None:
        """``parent``: descriptor of the process with which this one ends."""
        self.parent, self.listening, self.launcher = parent, listening, launcher
        self.forks: dict[int, tuple[int, socket.socket]] = {}
        """Descriptor of a fork's process -> its id, and the launcher that stands for it."""

    def serve(self) -> None:
        """Until the parent is gone."""
        while True:
            connections = {connection.fileno(): process for process, (_, connection) in self.forks.items()}
            poll = select.poll()
            for one in (self.parent, self.listening.fileno(), *self.forks, *connections):
                poll.register(one, select.POLLIN)
            ready = [one for one, _ in poll.poll()]
            if self.parent in ready:
                return
            for one in ready:
                if one == self.listening.fileno():
                    self.accept()
                elif one in self.forks:
                    self.ended(one)
                elif connections.get(one) in self.forks:
                    self.signalled(connections[one])

    def accept(self) -> None:
        """One launcher's request. What goes wrong with it is that launcher's misfortune alone."""
        files: list[int] = []
        connection = None
        try:
            connection, _ = self.listening.accept()
            request, files = receive(connection)
            pid = os.fork()
            if pid == 0:
                kept = [self.parent, self.listening.fileno(), connection.fileno(), *self.forks]
                kept += [other.fileno() for _, other in self.forks.values()]
                become(request, files, unused=kept, launcher=self.launcher)
            self.forks[os.pidfd_open(pid)] = pid, connection
        except (OSError, ValueError) as error:  # no more descriptors or processes, or the launcher was killed
            print(f"a launcher was refused: {error}", file=sys.stderr, flush=True)
            if connection is not None:
                connection.close()
        finally:
            close_all(files)

    def ended(self, process: int) -> None:
        """Tells the launcher how its fork has ended."""
        pid, connection = self.forks.pop(process)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            connection.sendall(bytes([code < 0, abs(code)]))
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


def close_all(files: Sequence[int]) -> None:
    for number in files:
        with contextlib.suppress(OSError):
            os.close(number)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The request and the descriptors that came with it.

    Raises:
        ValueError: the connection ended early, or this is no request.
        TimeoutError: it did not come within :data:`REQUEST_SECONDS`; everybody else waits meanwhile.
    """
    deadline = time.monotonic() + REQUEST_SECONDS
    connection.settimeout(REQUEST_SECONDS)
    files = array.array("i")
    try:
        head, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(MAX_FILES * files.itemsize))
        for _, _, data in ancillary:
            files.frombytes(data)
        size, body = int.from_bytes(head, "big"), b""
        while len(body) < size:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            if not (part := connection.recv(size - len(body))):
                break
            body += part
        if len(head) < 4 or len(body) < size:
            raise ValueError("the request is not complete")
        connection.settimeout(None)
        return json.loads(body.decode("utf-8", "surrogateescape")), list(files)
    except BaseException:
        close_all(files)
        raise


def become(request: dict[str, Any], files: Sequence[int], unused: Sequence[int], launcher: str) -> None:
    """Turns this fork into the process that was asked for, and ends with it."""
    code = 1
    try:
        die_with(os.getppid())
        os.setpgid(0, 0)  # who kills this process's group must not meet the others
        close_all(unused)
        put_files(files, request["files"])
        take_over(request)
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


def die_with(server: int) -> None:
    """Asks the kernel for SIGKILL when the server ends; Ray's own check of the raylet's process is set at import."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL)):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != server:
        os._exit(1)  # it has ended already


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


def take_over(request: dict[str, Any]) -> None:
    """Takes what a process inherits from the one that starts it from the launcher instead of the server.

    Raises:
        ValueError: Ray's job is another than the one that was set when Ray was imported, which Ray would go on using.
    """
    environment = request["environment"]
    job, wanted = os.environ["RAY_JOB_ID"], environment.get("RAY_JOB_ID", os.environ["RAY_JOB_ID"])
    if job != wanted:
        raise ValueError(f"this process was made for Ray's job {job}, not for {wanted}")
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(environment)
    os.umask(request["umask"])
    for name, limits in request["limits"].items():
        with contextlib.suppress(ValueError, OSError):  # above this process's hard limit
            resource.setrlimit(getattr(resource, name), limits)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, request["niceness"])
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write(str(request["oom_score_adj"]))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def fresh_state(launcher: str) -> None:
    """What two processes must not have in common, and what was read from another environment."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].seed()
    if "ray._raylet" in sys.modules:
        sys.modules["ray._raylet"].Config.initialize("")  # Ray's settings, from this environment
    multiprocessing.current_process().authkey = os.urandom(32)
    # processes that this one starts are forks as well
    multiprocessing.spawn.set_executable(launcher)
    gc.enable()


def run(arguments: Sequence[str]) -> int:
    """What ``python ARGUMENTS`` does: a script, ``-c`` text or ``-m`` module, behind any options, as ``__main__``."""
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-c", "-m"):
        option = rest.pop(0)
        if option in ("-X", "-W"):
            rest.pop(0)
    if not rest or (rest[0] in ("-c", "-m") and len(rest) < 2):
        print(f"a fork needs a script, -c or -m, not {list(arguments)}", file=sys.stderr)
        return 2
    try:
        if rest[0] == "-m":
            sys.argv, sys.path[0] = rest[1:], os.getcwd()
            runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        elif rest[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *rest[2:]], ""
            execute(rest[1], "<string>", types.ModuleType("__main__"))
        else:
            sys.argv, sys.path[0] = rest, os.path.dirname(os.path.abspath(rest[0]))
            main = types.ModuleType("__main__")
            main.__file__ = rest[0]
            with open(rest[0], encoding="utf-8") as script:
                text = script.read()
            execute(text, rest[0], main)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def execute(text: str, name: str, main: types.ModuleType) -> None:
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    exec(compile(text, name, "exec"), main.__dict__)


def one_way_to_set_titles() -> None:
    """A process's title is written where its first arguments and environment lie, which whoever looks for that place
    moves away: Ray's own copy and vLLM's library find it only once, so that forks use the library for both.
    """
    library = importlib.import_module("setproctitle")
    library.getproctitle()
    if raylet := sys.modules.get("ray._raylet"):
        raylet.setproctitle, raylet.getproctitle = library.setproctitle, library.getproctitle  # type: ignore[attr-defined]


def own_actor_class_ids() -> None:
    """Ray seeds the generator of its ids when it draws the first, and forks would go on from the same seed. Imports
    that make actors of classes draw one for each; it comes from the system instead.
    """
    if (actor := sys.modules.get("ray.actor")) and isinstance(kind := actor.ActorClassID, type):
        actor.ActorClassID = types.SimpleNamespace(from_random=lambda: kind(os.urandom(kind.size())))  # type: ignore[attr-defined]


def forks_draw_the_same_ids() -> bool:
    """Whether two forks draw the same random id from Ray: their calls would be taken for one another."""
    if (raylet := sys.modules.get("ray._raylet")) is None:
        return False
    drawn = []
    for _ in range(2):
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            with contextlib.suppress(BaseException):  # nothing drawn by either is the same, too
                os.write(writing, raylet.TaskID.for_fake_task(raylet.JobID.from_int(1)).binary())
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(writing)
        drawn.append(os.read(reading, 64))
        os.close(reading)
    return drawn[0] == drawn[1]


def main(arguments: Sequence[str]) -> int:
    sys.path[0] = os.getcwd()  # as with -m, which would import verl, and so Ray's actors, before this line
    parent, listening = os.pidfd_open(int(arguments[0])), socket.socket(fileno=int(arguments[1]))
    ready, launcher = int(arguments[2]), arguments[3]
    try:
        if os.getppid() != int(arguments[0]):
            return 1  # it has ended already
        gc.disable()
        for name in arguments[4:]:
            importlib.import_module(name)
            own_actor_class_ids()
        one_way_to_set_titles()
        gc.collect()
        gc.freeze()
        if (threads := len(os.listdir("/proc/self/task"))) != 1:
            print(f"{threads} threads run after the imports: this process cannot be forked", file=sys.stderr)
            return 1
        if forks_draw_the_same_ids():
            print("an import has drawn one of Ray's random ids: forks would draw the same ones", file=sys.stderr)
            return 1
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(BrokenPipeError):  # the parent has ended
            os.write(ready, b"1")
        os.close(ready)
        Server(parent, listening, launcher).serve()
        return 0
    finally:
        if select.select([parent], [], [], 0)[0]:  # it had no time to do this
            shutil.rmtree(os.path.dirname(launcher), ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
