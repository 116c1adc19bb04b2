"""Playing through the transfer queue: every episode once, failures and stalls are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transfer_queue

from verl.agentopsd.envs.base import Task
from verl.agentopsd.evaluation.engine import PARTITION, TaskDataset, play
from verl.agentopsd.liveness import WorkerLost
from verl.agentopsd.replay import RolloutFailed, RolloutStalled


class Queue:
    """Stands in for the transfer queue and the agent loops; each poll ends the next episodes of ``script``."""

    def __init__(self, script: list[list[str]]):
        self.script, self.tags, self.games = list(script), {}, None

    def kv_batch_put(self, keys: list[str], partition_id: str, tags: list[dict[str, Any]]) -> None:
        assert partition_id == PARTITION
        self.tags |= dict(zip(keys, tags, strict=True))

    def generate_sequences(self, games: Any) -> None:
        self.games = games

    def kv_list(self, partition_id: str) -> dict[str, dict[str, Any]]:
        for event in self.script.pop(0) if self.script else []:
            key, _, status = event.partition(" ")
            self.tags[key] = {"status": status or "success"}
        return {partition_id: dict(self.tags)} if self.tags else {}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        prompts = torch.nested.as_nested_tensor(
            [torch.arange(len(keys) + i) for i in range(len(keys))], layout=torch.jagged
        )

        class Extra(list):
            def tolist(self) -> list[Any]:
                return list(self)

        return {"prompts": prompts, "extra_fields": Extra({"key": key} for key in keys)}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.tags.pop(key, None)


def tasks(n: int) -> list[Task]:
    return [Task(f"valid_seen/g{i}", "valid_seen", "heat", f"/games/{i}") for i in range(n)]


def played(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, games: int, samples: int, limit: float = 10, **options: Any
) -> list[Any]:
    for name in ("kv_batch_put", "kv_list", "kv_batch_get", "kv_clear"):
        monkeypatch.setattr(transfer_queue, name, getattr(queue, name))
    dataset = TaskDataset(tasks(games), "alfworld", seed=3)
    rows = [dataset[i] for i in range(games)]
    found = play(
        *(queue, rows),
        **{"samples": samples, "step": 0, "limit_seconds": limit, "run_dir": Path("/nowhere"), "poll_seconds": 0.001},
        **options,
    )
    return [(one.game, one.sample, one.facts["key"]) for one in found]


def test_every_episode_comes_once_as_soon_as_it_has_ended(monkeypatch: pytest.MonkeyPatch):
    names = {(g, s): f"000000-v{g:06d}_{s}_0" for g in range(2) for s in range(2)}
    queue = Queue([[], [names[1, 0]], [names[0, 1], names[1, 1]], [], [names[0, 0]]])
    found = played(queue, monkeypatch, games=2, samples=2)
    assert [one[:2] for one in found] == [(1, 0), (0, 1), (1, 1), (0, 0)]
    assert all(names[game, sample] == key for game, sample, key in found)
    assert queue.tags == {}


def test_the_loops_get_the_rows_of_training(monkeypatch: pytest.MonkeyPatch):
    queue = Queue([["000000-v000000_0_0"]])
    played(queue, monkeypatch, games=1, samples=1)
    assert queue.games["validate"] is True and queue.games["global_steps"] == 0
    row = {name: queue.games[name][0] for name in ("agent_name", "data_source", "extra_info", "uid")}
    assert (row["agent_name"], row["data_source"], row["uid"]) == ("text_env", "alfworld/valid_seen", "000000-v000000")
    info = row["extra_info"]
    assert dict(info) == {
        **{"index": 0, "game_id": "valid_seen/g0", "split": "valid_seen", "task_type": "heat", "path": "/games/0"},
        "seed": 3,
    }


def test_a_failed_game_ends_the_evaluation(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RolloutFailed, match="1 games could not be played; the workers left no reason"):
        played(Queue([["000000-v000001 failure"]]), monkeypatch, games=2, samples=1)


def test_a_stall_ends_the_evaluation(monkeypatch: pytest.MonkeyPatch):
    written: list[Path] = []
    monkeypatch.setattr("verl.agentopsd.evaluation.engine.write_stacks", written.append)
    message = (
        "1 are missing. The stacks of all processes are in /nowhere/stalled-validation.txt. Raise limits.validation"
    )
    with pytest.raises(RolloutStalled, match=message):
        played(Queue([["000000-v000001_0_0"]]), monkeypatch, games=2, samples=1, limit=0.05)
    assert written == [Path("/nowhere/stalled-validation.txt")]


def test_a_dead_worker_ends_the_wait(monkeypatch: pytest.MonkeyPatch):
    def check() -> None:
        raise WorkerLost("the agent-loop worker 0 has died")

    with pytest.raises(WorkerLost):
        played(Queue([["000000-v000001_0_0"]]), monkeypatch, games=2, samples=1, check_workers=check)


def test_skills_go_into_the_rows_only_when_asked_for():
    assert "skill" not in TaskDataset(tasks(1), "alfworld", 0)[0]["extra_info"]
    assert TaskDataset(tasks(2), "alfworld", 0, ["a", "b"])[1]["extra_info"]["skill"] == "b"
