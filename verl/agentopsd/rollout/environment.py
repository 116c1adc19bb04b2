"""One episode's environment as the agent loop sees it: awaitable, timed, every failure an ``EnvironmentFault``."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from verl.agentopsd.envs.base import EnvironmentFault, Observation, TextEnv

logger = logging.getLogger(__name__)
MAX_TRACE = 4000
"""Characters of a trace that travel with an episode; the end, which has the cause, is kept."""
MAX_TEXT = 100_000
"""Characters of one observation; more is taken for a fault of the environment."""
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
                return _checked(function(), what)
            self._last_call = self._executor.submit(function)
            return _checked(await self._deadline.wait(asyncio.wrap_future(self._last_call)), what)
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


def _checked(answer: Observation, what: str) -> Observation:
    """An environment is other people's code: what it returns is checked before it can get into a row."""
    if not isinstance(answer, Observation):
        raise EnvironmentFault(f"{what}: returned {type(answer).__name__} instead of an observation")
    flags = (answer.won, answer.done, answer.valid)
    if not isinstance(answer.text, str) or not all(isinstance(flag, bool) for flag in flags):
        raise EnvironmentFault(f"{what}: returned an observation of the wrong types: {str(answer)[:200]}")
    if len(answer.text) > MAX_TEXT:
        raise EnvironmentFault(f"{what}: returned a text of {len(answer.text)} characters")
    try:
        answer.text.encode()
    except UnicodeEncodeError as error:
        raise EnvironmentFault(f"{what}: returned a text that is not Unicode: {error}") from error
    return answer


def short_trace(error: BaseException) -> str:
    """The error's trace with its causes, cut at the front."""
    text = "".join(traceback.format_exception(error))
    return text if len(text) <= MAX_TRACE else "…" + text[-MAX_TRACE:]
