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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl.agentopsd.platform import loopback
from verl.agentopsd.platform.forked import launcher

SERVER = (sys.executable, str(Path(__file__).with_name("server.py")))
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
"""What the worker processes of a run import, together; Ray first, see :func:`~.server.own_actor_class_ids`."""

LEAVE_IT = "With hardware.forked_workers=false every worker imports for itself"


class PreloadError(RuntimeError):
    """The process that workers are to be forks of cannot be had."""


def server_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """What the server must find in its environment when it imports: the workers' ``variables``, and for Arrow and Ray
    what both read only then."""
    return {
        **os.environ,
        **variables,
        "PYTHONWARNINGS": "ignore",  # of optional parts of verl that are not installed
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # Arrow's allocator; a process with threads cannot be forked
        loopback.VARIABLE: "0",
        "RAY_JOB_ID": "01000000",  # the first of a local cluster
        # Ray's workers watch their raylet's process, of which there is none yet; in a local cluster it dies with the
        # driver, so that this one is as good
        "RAY_RAYLET_PID": str(os.getpid()),
    }


class Preloaded:
    """The server, from its start until :meth:`close`.

    Attributes:
        python: an executable that takes Python's arguments and runs as a fork of the server.
        process: the server's.
    """

    def __init__(self, modules: Sequence[str] = MODULES, variables: Mapping[str, str] | None = None) -> None:
        """Starts the server and returns at once: it imports ``modules`` while this process goes on.

        Args:
            variables: of the workers' environment, beside this process's.

        Raises:
            PreloadError: the folder for temporary files does not do.
        """
        self._usable = False
        self._folder = Path(tempfile.mkdtemp(prefix="agentopsd-fork-"))  # readable by this user alone
        address, self.python, self._log = (self._folder / name for name in ("socket", "python", "log"))
        self._ready, ready = os.pipe()
        try:
            start = shlex.join([sys.executable, "-I", "-S", launcher.__file__, str(address)])
            self.python.write_text(f'#!/bin/sh\nexec {start} "$@"\n')
            self.python.chmod(0o700)
            if not os.access(self.python, os.X_OK):
                raise OSError(0, "no program may be started there")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening, self._log.open("w") as log:
                listening.bind(str(address))
                listening.listen(64)
                numbers = [os.getpid(), listening.fileno(), ready]
                self.process = subprocess.Popen(
                    [*SERVER, *map(str, numbers), str(self.python), *modules],
                    pass_fds=numbers[1:],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=server_environment(variables or {}),
                    start_new_session=True,  # the terminal's Ctrl-C is for the driver, which ends its workers
                )
        except OSError as error:
            os.close(self._ready)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise PreloadError(
                f"workers cannot be forked through {self._folder} ({error.strerror or error}): set TMPDIR to another "
                f"folder. {LEAVE_IT}"
            ) from error
        finally:
            os.close(ready)

    def wait(self, seconds: float) -> None:
        """Until the server has imported everything and a fork of it has run.

        Raises:
            PreloadError: it has not in time, or it has ended; with what it said.
        """
        if self._usable:
            return
        if not select.select([self._ready], [], [], seconds)[0]:
            raise PreloadError(f"the process that imports what all workers need is not ready after {seconds:.0f} s")
        if not os.read(self._ready, 1):
            raise PreloadError(f"the process that imports what all workers need has ended: {self._said()}. {LEAVE_IT}")
        try:
            tried = subprocess.run(
                [self.python, "-c", "print('alive')"], capture_output=True, text=True, timeout=seconds, errors="replace"
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PreloadError(f"workers cannot be forked: {error}. {LEAVE_IT}") from error
        if tried.stdout != "alive\n":
            said = tried.stderr.strip().splitlines()[-1:] or [self._said()]
            raise PreloadError(f"workers cannot be forked: {said[0]}. {LEAVE_IT}")
        self._usable = True

    def _said(self) -> str:
        """The last line of the server."""
        return (self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]

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


IMPORTS = ("py_executable", "py_modules", "working_dir", "pip", "uv", "conda", "image_uri", "container", "nsight")
"""Parts of Ray's ``runtime_env`` that decide which Python runs and what it imports."""


def forks(config: DictConfig) -> bool:
    """Whether this run's workers are forks: asked for, without a GPU, in a cluster of this run on this machine, and
    with no other Python or import path of their own."""
    asked = config.trainer.device == "cpu" and config.hardware.forked_workers is True
    if not asked or os.environ.get("RAY_ADDRESS") or not hasattr(os, "pidfd_open"):
        return False
    own = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env") or {}
    return not any(own.get(name) for name in IMPORTS) and "PYTHONPATH" not in (own.get("env_vars") or {})


@contextlib.contextmanager
def preloading(config: DictConfig, environment: Mapping[str, str]) -> Iterator[None]:
    """Within the body a server is there, if this run forks its workers.

    Args:
        environment: variables that every worker must have.
    """
    global _current
    if _current is not None or not forks(config):
        yield
        return
    own = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    _current = Preloaded(variables={**environment, **{str(name): str(value) for name, value in own.items()}})
    try:
        yield
    finally:
        _current.close()
        _current = None
