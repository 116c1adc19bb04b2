"""One episode's environment as the agent loop sees it: awaitable, timed, every failure an ``EnvironmentFault``."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from verl.agentopsd.envs.base import EnvironmentFault, Observation, TextEnv

logger = logging.getLogger(__name__)
T = TypeVar("T")


class EpisodeTimeout(EnvironmentFault):
    """The episode took longer than ``env.episode_timeout``."""


class Deadline:
    """A point in time that no wait of an episode may pass. Starts when it is made."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    async def wait(self, awaitable: Awaitable[T]) -> T:
        """Awaits, but no longer than until the deadline.

        Raises:
            EpisodeTimeout: the deadline passed; the awaitable was cancelled.
        """
        try:
            return await asyncio.wait_for(awaitable, self._end - time.monotonic())
        except TimeoutError:
            if time.monotonic() < self._end:
                raise
            raise EpisodeTimeout(
                f"timeout: the episode took longer than env.episode_timeout={self._seconds:g} seconds"
            ) from None


class EpisodeEnv:
    """A :class:`TextEnv` for one episode.

    Args:
        make: makes the environment.
        executor: where its calls run; None runs them in place, for environments that answer in microseconds.
        deadline: of the episode. A call in place cannot be interrupted.

    Attributes:
        seconds: time spent in the environment.
    """

    def __init__(self, make: Callable[[], TextEnv], executor: Executor | None, deadline: Deadline) -> None:
        self._make = make
        self._executor = executor
        self._deadline = deadline
        self._env: TextEnv | None = None
        self._last_call: Future | None = None
        self.seconds = 0.0

    async def reset(self) -> Observation:
        """Makes and resets the environment.

        Raises:
            EnvironmentFault: it failed in any way, or the deadline passed.
        """

        def start() -> Observation:
            self._env = self._make()
            return self._env.reset()

        return await self._call("reset", start)

    async def step(self, command: str) -> Observation:
        """Sends one command.

        Raises:
            EnvironmentFault: it failed in any way, or the deadline passed.
        """
        env = self._env
        assert env is not None, "step before reset"
        return await self._call("step", lambda: env.step(command))

    def close(self) -> None:
        """Closes the environment, behind a call that is still running; failures are logged."""
        if self._executor is None:
            self._close_now()
        elif self._last_call is not None:
            executor = self._executor
            self._last_call.add_done_callback(lambda _: executor.submit(self._close_now))

    async def _call(self, what: str, function: Callable[[], Observation]) -> Observation:
        started = time.monotonic()
        try:
            if self._executor is None:
                return function()
            self._last_call = self._executor.submit(function)
            return await self._deadline.wait(asyncio.wrap_future(self._last_call))
        except EnvironmentFault:
            raise
        except Exception as error:
            logger.warning("environment failed in %s", what, exc_info=True)
            raise EnvironmentFault(f"{what}: {type(error).__name__}: {error}") from error
        finally:
            self.seconds += time.monotonic() - started

    def _close_now(self) -> None:
        try:
            if self._env is not None:
                self._env.close()
        except Exception:
            logger.warning("environment failed in close", exc_info=True)
