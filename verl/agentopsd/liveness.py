"""Notices that a worker process has died while the driver waits for its results to appear elsewhere.

An episode travels from the agent-loop worker to the trainer through a queue; when the worker dies, nothing arrives and
nothing fails. Weights travel from the training worker to the rollout engine, which waits for it without a limit. So the
workers are asked every few seconds whether they are there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from verl.agentopsd.watchdog import kill_children


class WorkerLost(RuntimeError):
    """A worker process has died."""


class Liveness:
    """Asks Ray actors for a sign of life, one outstanding question per actor.

    Args:
        actors: by the name that the error gives them.
        servers: likewise; rollout servers, whose engine is a process of its own and is asked after too.
        every: seconds between two questions.
    """

    def __init__(self, actors: Mapping[str, Any], servers: Mapping[str, Any] | None = None, every: float = 2.0) -> None:
        self._servers = dict(servers or {})
        self._actors = {**self._servers, **actors}
        self._every = every
        self._asked: dict[str, Any] = {}
        self._next = 0.0
        self._lock = threading.Lock()

    def check(self) -> None:
        """Returns at once; an actor that is merely busy is alive.

        Raises:
            WorkerLost: an actor has died.
        """
        import ray

        with self._lock:  # of two threads that ask, one does
            if time.monotonic() < self._next:
                return
            self._next = time.monotonic() + self._every
        for name, actor in self._actors.items():
            question = self._asked.pop(name, None) or self._ask(name, actor)
            answered, _ = ray.wait([question], timeout=0)
            if not answered:
                self._asked[name] = question
                continue
            try:
                if name in self._servers and ray.get(question):
                    raise WorkerLost(f"the engine of the {name} has died")
                ray.get(question)
            except ray.exceptions.RayError as error:
                raise WorkerLost(f"the {name} has died ({first_line(error)})") from error

    def _ask(self, name: str, actor: Any) -> Any:
        return actor.__ray_call__.remote(engine_is_dead) if name in self._servers else actor.__ray_ready__.remote()

    @contextlib.contextmanager
    def watching(self, run_dir: str) -> Iterator[None]:
        """Meanwhile a death ends the run at once: the body may be stuck in a call that no exception reaches."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.5):
                try:
                    self.check()
                except WorkerLost as loss:
                    if over.wait(1):  # the body has noticed it too
                        return
                    print(
                        f"\nerror: {loss}. The same command with run_dir={run_dir} continues from the last checkpoint",
                        file=sys.stderr,
                        flush=True,
                    )
                    kill_children()
                    os._exit(1)

        thread = threading.Thread(target=watch, name="liveness", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def engine_is_dead(server: Any) -> bool:
    """In the server's process: what vLLM's client knows of its engine; other engines live in the server itself."""
    return bool(getattr(getattr(server, "engine", None), "errored", False))


def first_line(error: BaseException) -> str:
    """What an error says, without its details."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
