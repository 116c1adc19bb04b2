"""The trainer's own decisions, without the stack: who takes part in the statistics, and which weights count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

import verl.agentopsd.trainer as module
from verl.agentopsd.episodes import Episode
from verl.agentopsd.trainer import AgentOPSDTrainer


def episode(group: str, sample: int, won: bool = False, env_error: str = "", version: int = 4) -> Episode:
    facts = {
        "game_id": f"train/{group}",
        "won": won,
        "env_error": env_error,
        "turns": [{"span": [0, 2]}],
        "min_global_steps": version,
        "max_global_steps": version,
    }
    mask = torch.tensor([True, True, False])
    return Episode(
        f"{group}_{sample}_0", torch.ones(2), torch.ones(3), mask, mask * -0.5, mask * -0.5, float(won), facts
    )


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> AgentOPSDTrainer:
    """A trainer before any start, at update 5; upstream's estimator answers 0.25 for every episode it is given."""
    made = object.__new__(AgentOPSDTrainer)
    made.global_steps = 5
    made.env = SimpleNamespace(min_valid_episodes=2)
    made.estimated = []
    made.config = SimpleNamespace(agentopsd=SimpleNamespace(base_estimator="grpo"))

    def estimate(self: AgentOPSDTrainer, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self.estimated += batch.keys
        return batch

    def advantages(keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        rows = torch.nested.as_nested_tensor([torch.tensor([0.25, 0.25, 0.0])] * len(keys), layout=torch.jagged)
        return TensorDict({"advantages": rows}, batch_size=len(keys))

    monkeypatch.setattr(PPOTrainerSync, "_compute_advantage", estimate)
    monkeypatch.setattr(module.tq, "kv_batch_get", advantages)
    return made


def test_lost_episodes_and_small_groups_stay_out_of_the_statistics(trainer: AgentOPSDTrainer):
    """I9: an environment error is no loss; a group with one valid episode has no baseline."""
    episodes = [
        episode("000005-0000", 0, won=True),
        episode("000005-0000", 1),
        episode("000005-0000", 2, env_error="timeout"),
        episode("000005-0001", 0, won=True),
        episode("000005-0001", 1, env_error="crash"),
        episode("000005-0001", 2, env_error="crash"),
    ]
    batch = KVBatchMeta(keys=[e.key for e in episodes], tags=[{}] * 6, partition_id="train")
    metrics: dict[str, float] = {}
    assert trainer._base_advantages(batch, episodes, metrics) == [0.25, 0.25, 0.0, 0.0, 0.0, 0.0]
    assert trainer.estimated == ["000005-0000_0_0", "000005-0000_1_0"]
    assert metrics["group/dropped"] == 1.0
    assert trainer._success_rates(episodes) == [0.5, 0.5, 0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("estimator", "equal"), [("grpo", 0.0), ("rloo", 0.0), ("reinforce_plus_plus", 0.25)])
def test_equal_outcomes_have_exactly_no_advantage(trainer: AgentOPSDTrainer, estimator: str, equal: float):
    """Three rewards of 0.9 have a float32 mean that is not 0.9, and GRPO divides the rest by its own size. What
    compares an episode with other groups too is left alone."""
    trainer.config.agentopsd.base_estimator = estimator
    episodes = [
        *(episode("000005-0000", sample, won=True) for sample in range(3)),
        episode("000005-0000", 3, env_error="crash"),
        *(episode("000005-0001", sample, won=False) for sample in range(2)),
        *(episode("000005-0002", sample, won=sample == 0) for sample in range(2)),
    ]
    batch = KVBatchMeta(keys=[e.key for e in episodes], tags=[{}] * 8, partition_id="train")
    assert trainer._base_advantages(batch, episodes, {}) == [*[equal] * 3, 0.0, *[equal] * 2, 0.25, 0.25]


def test_no_valid_group_costs_no_estimate(trainer: AgentOPSDTrainer):
    episodes = [episode("000005-0000", 0, env_error="crash"), episode("000005-0000", 1, env_error="crash")]
    batch = KVBatchMeta(keys=[e.key for e in episodes], tags=[{}] * 2, partition_id="train")
    assert trainer._base_advantages(batch, episodes, {}) == [0.0, 0.0]
    assert trainer.estimated == []
