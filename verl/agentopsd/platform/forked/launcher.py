"""Stands where Python would be started: asks the server for a fork, forwards signals, ends as the fork ends.

Reads nothing but the standard library and its first argument, the server's socket, so that it starts in milliseconds.
"""

import array
import contextlib
import json
import os
import resource
import signal
import socket
import sys

LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
FORWARDED = (signal.SIGTERM, signal.SIGINT)


def open_files(without: int) -> list[int]:
    """Descriptors of this process that the fork must have under the same numbers."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            os.fstat(number)
        except OSError:
            continue  # the listing's own
        if number != without and (number < 3 or os.get_inheritable(number)):
            found.append(number)
    return found


def state() -> dict[str, object]:
    """What a process inherits from the one that starts it, beside its files."""
    with open("/proc/self/oom_score_adj") as score:
        return {
            "environment": dict(os.environ),
            "directory": os.getcwd(),
            "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "umask": os.umask(0o77),
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "oom_score_adj": int(score.read()),
        }


def fork(server: socket.socket, arguments: list[str]) -> None:
    """Asks for a fork with this process's files; gives up all of them but standard error."""
    files = open_files(server.fileno())
    request = {"arguments": arguments, "files": files, **state()}
    body = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogateescape")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    server.sendmsg([len(body).to_bytes(4, "big")], rights)
    server.sendall(body)
    for number in files:
        if number != 2:  # who waits for the other end of a pipe waits for the fork alone
            os.close(number)


def end_by(number: int) -> None:
    """Ends this process by a signal."""
    with contextlib.suppress(OSError):  # SIGKILL's cannot be set
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


def main(address: str, arguments: list[str]) -> int:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def forward(number: int, frame: object) -> None:
        with contextlib.suppress(OSError):
            server.sendall(bytes([number]))

    try:
        server.connect(address)
        fork(server, arguments)
        for number in FORWARDED:
            signal.signal(number, forward)
        answer = server.recv(2)
    except OSError as error:
        answer, problem = b"", f" ({error.strerror})"
    else:
        problem = ""
    if len(answer) < 2:
        print(f"no fork: the process that forks workers has ended{problem}", file=sys.stderr)
        return 1
    by_signal, code = answer
    if by_signal:
        end_by(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
