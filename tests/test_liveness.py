"""A dead actor is noticed within two looks; a busy one is left in peace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from verl.agentopsd.liveness import Liveness, WorkerLost


class Actor:
    """Answers a question when ``answer`` is set."""

    def __init__(self, answer: Any = True):
        self.answer = answer
        self.asked = 0
        self.__ray_ready__ = SimpleNamespace(remote=self.ask)

    def ask(self) -> Actor:
        self.asked += 1
        return self


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(question: Actor) -> bool:
        if isinstance(question.answer, Exception):
            raise question.answer
        return question.answer

    monkeypatch.setattr(ray, "wait", lambda refs, timeout: (refs, []) if refs[0].answer else ([], refs))
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
