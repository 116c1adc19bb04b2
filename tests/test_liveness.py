"""A dead actor is noticed within two looks; a busy one is left in peace."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import ray

import verl.agentopsd.liveness as liveness_module
from verl.agentopsd.liveness import Liveness, WorkerLost, engine_is_dead


class Actor:
    """Answers a question when ``answer`` is set."""

    def __init__(self, answer: Any = True):
        self.answer = answer
        self.asked = 0
        self.__ray_ready__ = SimpleNamespace(remote=self.ask)
        self.__ray_call__ = SimpleNamespace(remote=self.ask)

    def ask(self, question: Any = None) -> Actor:
        self.asked += 1
        return self


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(question: Actor) -> bool:
        if isinstance(question.answer, Exception):
            raise question.answer
        return question.answer

    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []) if refs[0].answer is not None else ([], refs))
    monkeypatch.setattr(ray, "get", get)


def test_a_dead_actor_is_named():
    dead = Actor(ray.exceptions.RayActorError(error_msg="The actor died unexpectedly.\nlong details"))
    with pytest.raises(WorkerLost, match=r"^the agent-loop worker 1 has died \(The actor died unexpectedly.\)$"):
        Liveness({"rollout server 0": Actor(), "agent-loop worker 1": dead}, every=0).check()


def test_a_busy_actor_has_one_open_question():
    busy = Actor(answer=None)
    liveness = Liveness({"server": busy}, every=0)
    for _ in range(3):
        liveness.check()
    assert busy.asked == 1
    busy.answer = True
    liveness.check()
    liveness.check()
    assert busy.asked == 2


def test_it_does_not_ask_more_often_than_it_should():
    actor = Actor()
    liveness = Liveness({"server": actor}, every=3600)
    for _ in range(3):
        liveness.check()
    assert actor.asked == 1


@pytest.mark.parametrize(("dead", "alive"), [(True, False), (False, True)])
def test_a_server_is_asked_after_its_engine(dead: bool, alive: bool):
    liveness = Liveness({"agent-loop worker 0": Actor()}, {"rollout server 0": Actor(answer=dead)}, every=0)
    if alive:
        liveness.check()
    else:
        with pytest.raises(WorkerLost, match="^the engine of the rollout server 0 has died$"):
            liveness.check()


@pytest.mark.parametrize(
    ("server", "dead"),
    [
        (SimpleNamespace(engine=SimpleNamespace(errored=True)), True),
        (SimpleNamespace(engine=SimpleNamespace(errored=False)), False),
        (SimpleNamespace(), False),  # an engine that lives in the server itself
    ],
)
def test_what_the_server_answers(server: Any, dead: bool):
    assert engine_is_dead(server) is dead


def test_a_body_that_is_stuck_is_ended_with_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys):
    ended, killed = threading.Event(), []
    monkeypatch.setattr(liveness_module, "kill_children", lambda: killed.append(True))
    monkeypatch.setattr(liveness_module.os, "_exit", lambda code: ended.set() if code == 1 else None)
    with Liveness({}, {"rollout server 0": Actor(answer=True)}, every=0).watching("runs/one"):
        assert ended.wait(30) and killed == [True]
    expected = "error: the engine of the rollout server 0 has died. The same command with run_dir=runs/one continues"
    assert expected in capsys.readouterr().err


def test_a_body_that_notices_the_death_itself_is_left_to_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(liveness_module.os, "_exit", lambda code: pytest.fail("it was ended"))
    looked = threading.Event()

    class Noted(Liveness):
        def check(self) -> None:
            looked.set()
            raise WorkerLost("gone")

    with pytest.raises(RuntimeError, match="noticed"), Noted({}).watching("runs/one"):
        assert looked.wait(30)
        raise RuntimeError("noticed")
