import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl.agentopsd.envs.base import EnvironmentFault, Observation
from verl.agentopsd.rollout.environment import Deadline, EpisodeEnv, EpisodeTimeout, short_trace


class Recorder:
    """Notes which thread calls it; ``step`` waits for ``release`` when one is given."""

    def __init__(self, release=None):
        self.release = release
        self.threads = []
        self.closed = threading.Event()

    def reset(self):
        self.threads.append(threading.get_ident())
        return Observation("start")

    def step(self, command):
        self.threads.append(threading.get_ident())
        if self.release is not None:
            self.release.wait(10)
        if command == "break":
            raise KeyError("inner")
        if command == "fault":
            raise EnvironmentFault("worker 3 died")
        return Observation(f"done: {command}")

    def close(self):
        self.closed.set()


@pytest.fixture
def executor():
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_in_place_calls_stay_in_the_callers_thread():
    recorder = Recorder()

    async def play():
        env = EpisodeEnv(lambda: recorder, None, Deadline(10))
        assert (await env.reset()).text == "start"
        assert (await env.step("look")).text == "done: look"
        env.close()
        return env.seconds

    assert asyncio.run(play()) > 0
    assert set(recorder.threads) == {threading.get_ident()}
    assert recorder.closed.is_set()


def test_calls_with_an_executor_leave_the_callers_thread(executor):
    recorder = Recorder()

    async def play():
        env = EpisodeEnv(lambda: recorder, executor, Deadline(10))
        await env.reset()
        await env.step("look")
        env.close()

    asyncio.run(play())
    assert threading.get_ident() not in recorder.threads
    assert recorder.closed.wait(10)


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize(("command", "message"), [("break", "step: KeyError: 'inner'"), ("fault", "^worker 3 died$")])
def test_every_failure_is_an_environment_fault(executor, threaded, command, message):
    async def play():
        env = EpisodeEnv(Recorder, executor if threaded else None, Deadline(10))
        await env.reset()
        await env.step(command)

    with pytest.raises(EnvironmentFault, match=message):
        asyncio.run(play())


def test_failure_to_make_the_environment_is_a_fault():
    def broken():
        raise OSError("no such game")

    async def play():
        env = EpisodeEnv(broken, None, Deadline(10))
        try:
            await env.reset()
        finally:
            env.close()

    with pytest.raises(EnvironmentFault, match="reset: OSError: no such game"):
        asyncio.run(play())


def test_a_stuck_call_ends_at_the_deadline_and_is_closed_when_it_returns(executor):
    release = threading.Event()
    recorder = Recorder(release)

    async def play():
        env = EpisodeEnv(lambda: recorder, executor, Deadline(0.05))
        await env.reset()
        try:
            await env.step("look")
        finally:
            env.close()

    with pytest.raises(EpisodeTimeout, match="timeout: .*env.episode_timeout=0.05 seconds"):
        asyncio.run(play())
    assert not recorder.closed.is_set()
    release.set()
    assert recorder.closed.wait(10)


def test_a_timeout_of_the_awaited_itself_is_not_the_episodes():
    async def fails():
        raise TimeoutError("socket")

    with pytest.raises(TimeoutError, match="socket"):
        asyncio.run(Deadline(10).wait(fails()))


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "step: returned NoneType instead of an observation"),
        ("You win!", "step: returned str instead of an observation"),
        (Observation(None), "step: returned an observation of the wrong types"),
        (Observation("x", won=float("nan")), "step: returned an observation of the wrong types"),
        (Observation("x" * 100_001), "step: returned a text of 100001 characters"),
        (Observation("\ud800"), "step: returned a text that is not Unicode"),
    ],
)
def test_garbage_is_an_environment_fault(executor, threaded, answer, message):
    class Garbage(Recorder):
        def step(self, command):
            return answer

    async def play():
        env = EpisodeEnv(Garbage, executor if threaded else None, Deadline(10))
        await env.reset()
        await env.step("look")

    with pytest.raises(EnvironmentFault, match=message):
        asyncio.run(play())


def test_a_trace_keeps_its_end_and_its_cause():
    def fail():
        try:
            raise KeyError("x" * 5000)
        except KeyError as error:
            raise EnvironmentFault("the game died") from error

    with pytest.raises(EnvironmentFault) as caught:
        fail()
    trace = short_trace(caught.value)
    assert len(trace) == 4001 and trace.startswith("…")
    assert trace.endswith("EnvironmentFault: the game died\n") and "direct cause" in trace
