"""The trainer and its schedules without the stack: horizon, skill of the student, penalty, choice of games."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu

import verl.agentopsd.trainer as module
from verl.agentopsd.config import EnvConfig
from verl.agentopsd.credit import CreditConfig
from verl.agentopsd.credited import CreditedEpisode
from verl.agentopsd.durable import DurableTrainer
from verl.agentopsd.episodes import Episode
from verl.agentopsd.methods.base import DistillConfig
from verl.agentopsd.methods.loss import COEF
from verl.agentopsd.sampling import DifficultySampler, SamplingConfig
from verl.agentopsd.skills.bank import SkillBank
from verl.agentopsd.trainer import AgentOPSDTrainer

ENV = EnvConfig(
    name="alfworld",
    max_turns=30,
    max_action_tokens=8,
    seed=0,
    max_concurrent_episodes=1,
    min_valid_episodes=2,
    max_error_share=1.0,
    success_reward=1.0,
    episode_timeout=1.0,
)
BANK = SkillBank("test", "Be quick.", {"look": "Use the lamp."}, on_missing="general")


def trainer(step: int = 1, student_skill: bool = False, **env: Any) -> AgentOPSDTrainer:
    made = object.__new__(AgentOPSDTrainer)
    made.global_steps = step
    made.env = dataclasses.replace(ENV, **env)
    made.config = SimpleNamespace(agentopsd=SimpleNamespace(student_skill=student_skill))
    made.bank = BANK
    made.method = SimpleNamespace(loss_term=None)
    made.game_sampler = None
    BANK.fallbacks.clear()
    return made


def fetched(monkeypatch: pytest.MonkeyPatch, made: AgentOPSDTrainer) -> list[dict[str, Any]]:
    rows = [{"game_id": f"train/{task_type}", "task_type": task_type} for task_type in ("look", "clean")]
    batch = tu.get_tensordict({"extra_info": rows, "uid": ["x", "y"], "index": torch.tensor([0, 1])})
    monkeypatch.setattr(PPOTrainerSync, "_fetch_one_gen_batch", lambda self: batch)
    return list(made._fetch_one_gen_batch()["extra_info"])


def test_rows_of_a_default_run_are_untouched(monkeypatch: pytest.MonkeyPatch):
    assert fetched(monkeypatch, trainer()) == [
        {"game_id": "train/look", "task_type": "look"},
        {"game_id": "train/clean", "task_type": "clean"},
    ]


@pytest.mark.parametrize(("update", "turns"), [(1, 10), (50, 10), (51, 20), (1000, 20)])
def test_rows_carry_the_horizon_of_the_updates_that_are_finished(
    monkeypatch: pytest.MonkeyPatch, update: int, turns: int
):
    rows = fetched(monkeypatch, trainer(update, max_turns_schedule=[[0, 10], [50, 20]]))
    assert [row["max_turns"] for row in rows] == [turns, turns]
    assert all("skill" not in row for row in rows)


def test_rows_carry_the_skill_of_their_task_type_and_missing_ones_are_counted(monkeypatch: pytest.MonkeyPatch):
    made = trainer(student_skill=True)
    rows = fetched(monkeypatch, made)
    assert [row["skill"] for row in rows] == ["Be quick.\nUse the lamp.", "Be quick."]
    assert [row["max_turns"] for row in rows] == [30, 30]
    metrics = made._schedule_metrics([episode(0, skill="Be quick."), episode(1)], [0.0, 0.0])
    assert (metrics["student/skill_shown"], metrics["student/skill_fallbacks"]) == (0.5, 1.0)


def test_missing_skills_are_counted_per_update(monkeypatch: pytest.MonkeyPatch):
    made = trainer(student_skill=True)
    monkeypatch.setattr(DurableTrainer, "on_step_begin", lambda self: None)
    for _ in range(2):
        made.on_step_begin()
        fetched(monkeypatch, made)
        assert made._schedule_metrics([episode(0)], [0.0])["student/skill_fallbacks"] == 1.0


def episode(sample: int, won: bool = False, skill: str = "", env_error: str = "") -> Episode:
    """Two turns of one token each; the second is invalid."""
    facts = {
        "game_id": "train/look",
        "max_turns": 10,
        "skill": skill,
        "env_error": env_error,
        "won": won,
        "turns": [{"span": [0, 1], "valid": True}, {"span": [2, 3], "valid": False}],
    }
    mask = torch.tensor([True, False, True])
    logs = mask * -0.5
    return Episode(f"000001-0000_{sample}_0", torch.ones(2), torch.ones(3).long(), mask, logs, logs, float(won), facts)


@pytest.mark.parametrize(
    ("loss_term", "pg_coef", "expected"),
    [
        (None, 0.3, [[0, 0, -0.1], [0.5, 0, 0.4], [0, 0, 0]]),  # a method without a loss term has no pg_coef
        (object(), 1.0, [[0, 0, -0.1], [0.5, 0, 0.4], [0, 0, 0]]),
        (object(), 0.4, [[0, 0, -0.1], [0.2, 0, 0.1], [0, 0, 0]]),
        (object(), 0.0, [[0, 0, -0.1], [0, 0, -0.1], [0, 0, 0]]),
    ],
)
def test_the_written_advantages_hold_the_penalty_once(
    monkeypatch: pytest.MonkeyPatch, loss_term: Any, pg_coef: float, expected: list[list[float]]
):
    """A = 0 for the won episode, .5 for the other, none for the lost one; p = .1 on the token of the invalid turn,
    whatever the policy gradient weighs."""
    made = trainer(invalid_action_penalty=0.1)
    made.method = SimpleNamespace(loss_term=loss_term)
    made.distill, made.teacher = SimpleNamespace(pg_coef=pg_coef), None
    episodes = [episode(0, won=True), episode(1), episode(2, env_error="crash")]
    made._credited = [
        CreditedEpisode(one, a, one.action_mask * a, 0.5) for one, a in zip(episodes, (0.0, 0.5, 0.0), strict=True)
    ]
    masks = torch.nested.as_nested_tensor([torch.ones(3)] * 3, layout=torch.jagged)
    written: dict[str, TensorDict] = {}
    monkeypatch.setattr(module.tq, "kv_batch_get", lambda **_: TensorDict({"response_mask": masks}, batch_size=3))
    monkeypatch.setattr(module.tq, "kv_batch_put", lambda fields, **_: written.update(fields=fields))
    made._write_advantages(KVBatchMeta(keys=[one.key for one in episodes], tags=[{}] * 3, partition_id="train"))
    rows = [row.tolist() for row in written["fields"]["advantages"].unbind()]
    assert rows == [pytest.approx(row) for row in expected]


def test_the_sampler_learns_from_every_update():
    made = trainer()
    made.game_sampler = DifficultySampler(["train/look", "train/clean"], 1, SamplingConfig("difficulty"), seed=0)
    metrics = made._schedule_metrics([episode(0, won=True), episode(1), episode(2, env_error="crash")], [0.0] * 3)
    assert made.game_sampler.rate(0) == 0.5
    assert (metrics["sampling/pool_band"], metrics["sampling/pool_unseen"]) == (0.5, 0.5)
    assert metrics["env/max_turns"] == 10


@pytest.mark.parametrize(("update", "coef"), [(1, 0.5), (5, 0.3), (11, 0.0), (12, 0.0)])
def test_the_loss_term_of_an_update_has_the_coefficient_of_the_updates_that_are_finished(
    monkeypatch: pytest.MonkeyPatch, update: int, coef: float
):
    """.5 falling to 0 over 10 updates; what the workers' loss reads travels with the batch."""
    made = trainer(update)
    made.method = SimpleNamespace(loss_term=object())
    made.distill = DistillConfig(coef=0.5, warmdown_steps=10)
    seen: list[KVBatchMeta] = []
    monkeypatch.setattr(DurableTrainer, "_update_actor", lambda self, batch, metrics: seen.append(batch))
    metrics: dict[str, float] = {}
    made._update_actor(KVBatchMeta(keys=["a"], tags=[{}], partition_id="train"), metrics)
    assert metrics["actor/distill_coef"] == seen[0].extra_info[COEF] == pytest.approx(coef)


@pytest.mark.parametrize(("update", "lam"), [(1, 0.5), (6, 0.25), (11, 0.0)])
def test_the_credit_of_an_update_has_the_lambda_of_the_updates_that_are_finished(
    monkeypatch: pytest.MonkeyPatch, update: int, lam: float
):
    made = trainer(update)
    made.config.agentopsd.shuffle_evidence = False
    made.credit_rule = CreditConfig(lam=0.5, warmdown_steps=10)
    rules: list[CreditConfig] = []

    def credit(episodes: Any, advantages: Any, rates: Any, scores: Any, method: Any, rule: CreditConfig, shuffle: Any):
        rules.append(rule)
        return [], None

    monkeypatch.setattr(module, "read_episodes", lambda batch: [])
    monkeypatch.setattr(module, "credit_episodes", credit)
    nothing = {"_check_episodes": None, "_base_advantages": [], "_success_rates": [], "_teacher_log_probs": {}}
    nothing |= {"_write_advantages": None, "_episode_metrics": {}, "_schedule_metrics": {}}
    for name, answer in nothing.items():
        monkeypatch.setattr(AgentOPSDTrainer, name, lambda self, *_, answer=answer: answer)
    made._compute_advantage(KVBatchMeta(keys=[], tags=[], partition_id="train"), {})
    assert [rule.lam for rule in rules] == [pytest.approx(lam)]
