"""The real ALFWorld engine (TextWorld and Fast Downward) as ``env.backend=textworld``.

It is slow, not thread-safe and may crash or hang in native code, so it runs in worker processes: each plays many
episodes, one request at a time, every request with a time limit. A worker that exceeds one is killed and the episode
that asked ends with :class:`EnvironmentFault`; the other episodes of that worker are replayed on another one, which
gives the same state because the engine is deterministic. Workers are replaced after a number of episodes, so that
nothing accumulates in them. They read from a pipe and end when it closes, or by a timer when they hang, so none
outlives this process for long.
"""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import psutil

from verl.agentopsd.envs.base import EnvironmentFault, Observation

INSTALL = "bash scripts/install.sh --textworld"
START_TIMEOUT = 120.0
"""Seconds for a worker's imports, on top of the limit of its first request."""
OWN_END = 5.0
"""Seconds beyond a request's limit after which a worker ends itself, if this process was killed and cannot do it."""
_REQUIRED_MODULES = ("textworld", "alfworld", "fast_downward")
_WORKER_FILE = Path(__file__).with_name("textworld_worker.py")


class WorkerLost(Exception):
    """The worker had gone before it got the request; the episode can be replayed elsewhere."""


class TextWorldEnv:
    """One episode on a worker of ``pool``; implements ``TextEnv``."""

    def __init__(self, path: str, pool: WorkerPool) -> None:
        self._path = path
        self._pool = pool
        self._worker: Worker | None = None
        self._session = -1
        self._commands: list[str] = []
        self._last = Observation("")

    def reset(self) -> Observation:
        self.close()
        self._commands = []
        return self._observed(self._open(), valid=True)

    def step(self, command: str) -> Observation:
        if self._worker is None:
            raise RuntimeError("step() before reset()")
        valid = command.strip() in self._last.admissible
        try:
            answer = self._request(command)
        except WorkerLost:
            self._replay()
            try:
                answer = self._request(command)
            except WorkerLost as error:
                raise EnvironmentFault(f"{self._path}: lost two TextWorld workers in a row") from error
        self._commands.append(command)
        return self._observed(answer, valid)

    def close(self) -> None:
        """Gives the episode's place on the worker back. May be called twice."""
        worker, self._worker = self._worker, None
        if worker is not None:
            self._pool.release(worker, self._session)

    def _open(self) -> dict[str, Any]:
        """A fresh start of the game on some worker; a worker found dead is tried around once."""
        for _ in range(2):
            self._worker, self._session = self._pool.acquire()
            message = {"op": "open", "session": self._session, "path": self._path}
            try:
                return self._worker.request(message, self._pool.reset_timeout, self._path)
            except WorkerLost:
                self.close()
            except EnvironmentFault:
                self.close()
                raise
        raise EnvironmentFault(f"{self._path}: lost two TextWorld workers in a row")

    def _replay(self) -> None:
        self.close()
        try:
            self._open()
            for command in self._commands:
                self._request(command)
        except WorkerLost as error:
            raise EnvironmentFault(f"{self._path}: lost two TextWorld workers in a row") from error

    def _request(self, command: str) -> dict[str, Any]:
        if self._worker is None:
            raise WorkerLost
        message = {"op": "step", "session": self._session, "command": command}
        return self._worker.request(message, self._pool.step_timeout, self._path)

    def _observed(self, answer: Mapping[str, Any], valid: bool) -> Observation:
        won = bool(answer["won"])
        self._last = Observation(answer["text"], tuple(answer["admissible"]), won=won, done=won, valid=valid)
        return self._last


class Worker:
    """One engine process. Requests are taken one at a time; thread-safe."""

    def __init__(self) -> None:
        self.sessions: set[int] = set()
        self.served = 0
        self._lock = threading.Lock()
        self._ready = False
        self._received = b""
        self._process = subprocess.Popen(
            # Not `python FILE`: that would put this folder, with its `games` and `engine`, first on the import path.
            [sys.executable, "-c", f"import runpy; runpy.run_path({str(_WORKER_FILE)!r}, run_name='__main__')"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches the trainer, which then closes the pool
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def memory(self) -> int:
        """Resident memory in bytes; 0 when the process is gone."""
        try:
            return psutil.Process(self.pid).memory_info().rss
        except psutil.Error:
            return 0

    def request(self, message: Mapping[str, Any], timeout: float, path: str) -> dict[str, Any]:
        """The worker's answer; ``timeout`` (seconds) counts from when the worker is free.

        Raises:
            WorkerLost: the process was gone before the request was sent.
            EnvironmentFault: no answer in time (the process is killed), it died over this request, or the engine
                reported an error.
        """
        stdin: IO[bytes] = self._process.stdin  # type: ignore[assignment]
        with self._lock:
            if not self.alive:
                raise WorkerLost
            if not self._ready:
                self._read_line(START_TIMEOUT, f"{path}: the TextWorld worker did not start")
                self._ready = True
            what = f"{path}: TextWorld on {message['op']} {message.get('command', '')!r}"
            try:
                limited = {**message, "limit": timeout + OWN_END}
                stdin.write(json.dumps(limited).encode() + b"\n")
                stdin.flush()
            except OSError as error:
                self.kill()
                raise WorkerLost from error
            answer = self._read_line(timeout, what)
        if "error" in answer:
            raise EnvironmentFault(f"{what} failed: {answer['error']}")
        return answer

    def kill(self) -> None:
        """Ends the process and waits for it. A request in progress in another thread fails."""
        self._process.kill()
        self._process.wait()

    def _read_line(self, timeout: float, what: str) -> dict[str, Any]:
        """The next line of the worker, within ``timeout`` seconds."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                self.kill()
                raise EnvironmentFault(f"{what}: no answer within {timeout:g} s; the worker was killed")
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                self.kill()
                raise EnvironmentFault(f"{what}: the worker died (exit code {self._process.returncode})")
            self._received += chunk
        line, self._received = self._received.split(b"\n", 1)
        return json.loads(line)


class WorkerPool:
    """Engine processes, started when needed; a new episode goes to the one with the fewest. Thread-safe.

    Args:
        workers: number of processes, not counting those that only finish their last episodes.
        reset_timeout: seconds for opening a game.
        step_timeout: seconds for a command.
        episodes_per_worker: after so many a process takes no more and ends with its last episode.
        memory_mb: the same for a process that holds more resident memory than this.
    """

    def __init__(
        self,
        workers: int = 2,
        reset_timeout: float = 60,
        step_timeout: float = 30,
        episodes_per_worker: int = 200,
        memory_mb: int = 2048,
    ) -> None:
        _check_installed()
        if workers < 1:
            raise ValueError(f"env.workers={workers}: the textworld backend needs at least one worker")
        self.reset_timeout = reset_timeout
        self.step_timeout = step_timeout
        self._size = workers
        self._episodes_per_worker = episodes_per_worker
        self._memory = memory_mb * 2**20
        self._workers: list[Worker] = []
        self._retiring: list[Worker] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, retiring ones included."""
        with self._lock:
            return [worker.pid for worker in (*self._workers, *self._retiring) if worker.alive]

    def acquire(self) -> tuple[Worker, int]:
        """A worker and the number of a new session on it."""
        with self._lock:
            if self._closed:
                raise EnvironmentFault("the TextWorld worker pool is closed")
            self._workers = [worker for worker in self._workers if worker.alive]
            if len(self._workers) < self._size:
                self._workers.append(Worker())
            worker = min(self._workers, key=lambda candidate: len(candidate.sessions))
            session = next(self._numbers)
            worker.sessions.add(session)
            worker.served += 1
            if worker.served >= self._episodes_per_worker or worker.memory > self._memory:
                self._workers.remove(worker)
                self._retiring.append(worker)
            return worker, session

    def release(self, worker: Worker, session: int) -> None:
        """Ends a session; a retiring worker without sessions is ended, too."""
        with self._lock:
            worker.sessions.discard(session)
            finished = worker in self._retiring and not worker.sessions
            if finished:
                self._retiring.remove(worker)
        if finished:
            worker.kill()
        elif worker.alive:
            try:
                worker.request({"op": "close", "session": session}, self.step_timeout, "close")
            except (WorkerLost, EnvironmentFault):
                pass  # it is gone or was killed, and the session with it

    def close(self) -> None:
        """Ends every worker. Later requests raise :class:`EnvironmentFault`."""
        with self._lock:
            self._closed = True
            workers = [*self._workers, *self._retiring]
            self._workers, self._retiring = [], []
        for worker in workers:
            worker.kill()


_pools: dict[tuple[int, float, float, int, int], WorkerPool] = {}
_pools_lock = threading.Lock()


def shared_pool(config: Mapping[str, Any]) -> WorkerPool:
    """The pool of this process for these settings; closed when the process ends."""
    key = (
        int(config.get("workers", 2)),
        float(config.get("reset_timeout", 60)),
        float(config.get("step_timeout", 30)),
        int(config.get("episodes_per_worker", 200)),
        int(config.get("worker_memory_mb", 2048)),
    )
    with _pools_lock:
        if key not in _pools:
            _pools[key] = WorkerPool(*key)
            atexit.register(_pools[key].close)
        return _pools[key]


def _check_installed() -> None:
    missing = [module for module in _REQUIRED_MODULES if importlib.util.find_spec(module) is None]
    if missing:
        raise RuntimeError(
            f"env.backend=textworld needs {', '.join(missing)}: install the real engine with `{INSTALL}` "
            "(compiles for some minutes), or use env.backend=exact, which plays the same games"
        )
