"""Starts the server of a run, and ends it."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig

from verl.agentopsd.platform.forked import launcher

SERVER = (sys.executable, "-m", "verl.agentopsd.platform.forked.server")
MODULES = (
    "ray._private.workers.default_worker",
    "verl.trainer.ppo.v1",
    "verl.workers.engine_workers",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "verl.agentopsd.rollout.agent_loop",
    "verl.agentopsd.envs.alfworld",
)
"""What the worker processes of a run import, together."""


class PreloadError(RuntimeError):
    """The process that workers are to be forks of cannot be had."""


def server_environment() -> dict[str, str]:
    """What the server must find in its environment when it imports Arrow and Ray."""
    return {
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # Arrow's allocator; a process with threads cannot be forked
        "RAY_JOB_ID": "01000000",  # the first of a local cluster
        # Ray's workers watch their raylet's process, of which there is none yet; in a local cluster it dies with the
        # driver, so that this one is as good
        "RAY_RAYLET_PID": str(os.getpid()),
        "PYTHONWARNINGS": "ignore",
    }


class Preloaded:
    """The server, from its start until :meth:`close`.

    Attributes:
        python: an executable that takes Python's arguments and runs as a fork of the server.
        process: the server's.
    """

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        """Starts the server and returns at once: it imports ``modules`` while this process goes on."""
        self._folder = Path(tempfile.mkdtemp(prefix="agentopsd-fork-"))  # readable by this user alone
        address, self.python, self._log = (self._folder / name for name in ("socket", "python", "log"))
        start = shlex.join([sys.executable, "-I", "-S", launcher.__file__, str(address)])
        self.python.write_text(f'#!/bin/sh\nexec {start} "$@"\n')
        self.python.chmod(0o700)
        self._ready, ready = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening, self._log.open("w") as log:
            listening.bind(str(address))
            listening.listen(64)
            files = [listening.fileno(), ready]
            self.process = subprocess.Popen(
                [*SERVER, *map(str, files), str(self.python), *modules],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **server_environment()},
            )
        os.close(ready)

    def wait(self, seconds: float) -> None:
        """Until the server has imported everything.

        Raises:
            PreloadError: it has not in time, or it has ended; with what it said.
        """
        select.select([self._ready], [], [], seconds)
        os.set_blocking(self._ready, False)
        try:
            if os.read(self._ready, 1):
                return
            problem = "has ended"
        except BlockingIOError:
            problem = f"is not ready after {seconds:.0f} s"
        said = self._log.read_text(errors="replace").strip().splitlines()[-1:]
        raise PreloadError(
            f"the process that imports what all workers need {problem}: {(said or ['it said nothing'])[0]}. With "
            "hardware.forked_workers=false every worker imports for itself"
        )

    def close(self) -> None:
        """Ends the server, and with it every fork that is left."""
        self.process.kill()
        self.process.wait()
        os.close(self._ready)
        shutil.rmtree(self._folder, ignore_errors=True)


_current: Preloaded | None = None


def current() -> Preloaded | None:
    """The server that Ray's workers shall be forks of, if there is one."""
    return _current


def wait(seconds: float) -> None:
    """:meth:`Preloaded.wait`, if there is a server."""
    if _current is not None:
        _current.wait(seconds)


@contextlib.contextmanager
def preloading(config: DictConfig) -> Iterator[None]:
    """Within the body a server is there, if this run forks its workers.

    Only where they belong to a cluster of this run on this machine: others bring their own environment.
    """
    global _current
    alone = config.trainer.device == "cpu" and not os.environ.get("RAY_ADDRESS") and sys.platform == "linux"
    if _current is not None or not (alone and config.hardware.forked_workers):
        yield
        return
    _current = Preloaded()
    try:
        yield
    finally:
        _current.close()
        _current = None
