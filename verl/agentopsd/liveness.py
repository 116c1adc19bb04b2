"""Notices that a worker process has died while the driver waits for its results to appear elsewhere.

An episode travels from the agent-loop worker to the trainer through a queue; when the worker dies, nothing arrives and
nothing fails. So the workers are asked every few seconds whether they are there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


class WorkerLost(RuntimeError):
    """A worker process has died."""


class Liveness:
    """Asks Ray actors for a sign of life, one outstanding question per actor.

    Args:
        actors: by the name that the error gives them.
        every: seconds between two questions.
    """

    def __init__(self, actors: Mapping[str, Any], every: float = 2.0) -> None:
        self._actors = dict(actors)
        self._every = every
        self._asked: dict[str, Any] = {}
        self._next = 0.0

    def check(self) -> None:
        """Returns at once; an actor that is merely busy is alive.

        Raises:
            WorkerLost: an actor has died.
        """
        import ray

        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._every
        for name, actor in self._actors.items():
            question = self._asked.pop(name, None) or actor.__ray_ready__.remote()
            answered, _ = ray.wait([question], timeout=0)
            if not answered:
                self._asked[name] = question
                continue
            try:
                ray.get(question)
            except ray.exceptions.RayError as error:
                raise WorkerLost(f"the {name} has died ({first_line(error)})") from error


def first_line(error: BaseException) -> str:
    """What an error says, without its details."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
