"""Stands where Python would be started: asks the server for a fork, forwards signals, ends with the fork's exit code.

Reads nothing but the standard library and its first argument, the server's socket, so that it starts in milliseconds.
"""

import array
import json
import os
import signal
import socket
import sys


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


def main(address: str, arguments: list[str]) -> int:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.connect(address)
    files = open_files(server.fileno())
    request = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd(), "files": files}
    body = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogateescape")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    server.sendmsg([len(body).to_bytes(4, "big")], rights)
    server.sendall(body)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, frame: server.sendall(bytes([got])))
    answer = server.recv(1)
    if not answer:
        print(f"the process that forks workers ({address}) is gone", file=sys.stderr)
        return 1
    return answer[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
