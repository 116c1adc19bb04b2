"""Horizon, choice of games, penalty and a student with a skill in one run of the real stack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from stack import Run

from verl.agentopsd.envs.base import make_family
from verl.agentopsd.evaluation.panel import spread
from verl.agentopsd.evaluation.records import EpisodeRecord, read_records
from verl.agentopsd.sampling import DifficultySampler, SamplingConfig
from verl.agentopsd.skills.bank import SkillBank, SkillLeak, assert_skill_free

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

OVERRIDES = [
    "method=grpo",
    "agentopsd.student_skill=true",
    "env.max_turns=6",
    "env.max_turns_schedule=[[0,3],[1,5]]",
    "env.invalid_action_penalty=0.1",
    "data.sampling.strategy=difficulty",
    "data.sampling.hard_share=0.25",
    "data.sampling.explore_share=0.25",
    "data.sampling.rest=0",
    "data.train_max_samples=6",
    "trainer.save_freq=1",
]


@pytest.fixture(scope="module")
def scheduled(train: Callable[..., Run]) -> Run:
    done = train("trainer.total_training_steps=2", "trainer.test_freq=2", *OVERRIDES)
    assert done.returncode == 0, done.output[-4000:]
    return done


def validated(run: Run, name: str) -> list[EpisodeRecord]:
    return read_records(run.directory / "validation" / f"{name}.jsonl").episodes


def test_the_horizon_grows_with_the_updates_and_validation_keeps_its_own(scheduled: Run):
    for step, turns in ((1, 3), (2, 5)):
        assert {record.max_turns for record in scheduled.rollouts(step)} == {turns}
        assert scheduled.metrics[step]["env/max_turns"] == turns
        assert max(record.num_turns for record in scheduled.rollouts(step)) == turns
    records = validated(scheduled, "000002")
    assert {record.max_turns for record in records} == {6}
    assert max(record.num_turns for record in records) == 6


def test_every_invalid_turn_and_no_other_is_penalised(scheduled: Run):
    turns = [turn for step in (1, 2) for record in scheduled.rollouts(step) for turn in record.turns]
    assert {turn.valid for turn in turns} == {True, False}
    assert all(turn.penalty == (0.0 if turn.valid else -0.1) for turn in turns)
    for step in (1, 2):
        shares = [
            sum((turn.penalty or 0.0) * turn.tokens for turn in record.turns) / record.action_tokens
            for record in scheduled.rollouts(step)
        ]
        assert scheduled.metrics[step]["env/penalty_mean"] == pytest.approx(sum(shares) / len(shares), abs=1e-6)


def test_the_games_follow_from_the_outcomes_and_the_state_is_in_the_checkpoint(scheduled: Run, alfworld_data: Path):
    """The sampler, fed with the recorded outcomes, draws the very games that were played, in their order."""
    family = make_family({"name": "alfworld", "data_dir": str(alfworld_data)})
    games = [task.game_id for task in spread(family.tasks("train"), 6)]
    settings = SamplingConfig("difficulty", hard_share=0.25, explore_share=0.25, rest=0)
    sampler = DifficultySampler(games, 4, settings, seed=0)
    for step in (1, 2):
        records = scheduled.rollouts(step)
        assert [games[row] for row in sampler.draw()] == [record.game_id for record in records[::4]]
        outcomes = {record.game_id: (0, 0) for record in records}
        for record in records:
            won, played = outcomes[record.game_id]
            outcomes[record.game_id] = (won + record.won, played + 1)
        sampler.observe(outcomes)
        expected = sampler.metrics()
        assert {name: scheduled.metrics[step][name] for name in expected} == pytest.approx(expected)
        saved = scheduled.directory / "checkpoints" / f"global_step_{step}" / "data.pt"
        assert torch.load(saved, weights_only=True)["_index_sampler_state"] == sampler.state_dict()


def test_the_student_sees_the_skill_in_training_and_validation_is_played_both_ways(scheduled: Run, alfworld_data: Path):
    family = make_family({"name": "alfworld", "data_dir": str(alfworld_data)})
    bank = SkillBank.load("alfworld_tiny", family.task_types)
    for record in scheduled.rollouts(1) + scheduled.rollouts(2) + validated(scheduled, "000002-with-skill"):
        assert record.skill and bank.text(record.task_type) in record.messages[1]["content"]
        with pytest.raises(SkillLeak):
            assert_skill_free(record.messages, bank)
    for record in validated(scheduled, "000002"):
        assert not record.skill
        assert_skill_free(record.messages, bank)
    metrics = scheduled.metrics[2]
    for prefix, name in (("val", "000002"), ("val_with_skill", "000002-with-skill")):
        won = [record.won for record in validated(scheduled, name)]
        assert (metrics[f"{prefix}/episodes"], metrics[f"{prefix}/success_rate"]) == (6, sum(won) / 6)
    assert metrics["student/skill_shown"] == 1.0
    assert "with skill" in scheduled.output
