"""The invalid-action penalty: worked numbers, and that no group statistic can reach it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from verl.agentopsd.credited import evenly
from verl.agentopsd.episodes import Episode
from verl.agentopsd.evaluation.records import EpisodeRecord, Turn
from verl.agentopsd.penalty import invalid_turn_penalty, penalised, penalty_metrics, with_penalties

# three turns of 2, 1 and 3 tokens with an observation token behind each
SPANS = [(0, 2), (3, 4), (5, 8)]
T = 9
MASK = [1, 1, 0, 1, 0, 1, 1, 1, 0]


def episode(sample: int, valid: tuple[bool, bool, bool], won: bool, env_error: str = "") -> Episode:
    mask = torch.tensor(MASK, dtype=torch.bool)
    turns = [{"span": list(span), "valid": ok} for span, ok in zip(SPANS, valid, strict=True)]
    facts = {"game_id": "train/a", "turns": turns, "won": won, "env_error": env_error}
    return Episode(
        f"000001-0000_{sample}_0",
        torch.tensor([7]),
        torch.arange(T),
        mask,
        mask * -0.5,
        mask * -0.5,
        float(won),
        facts,
    )


def base_advantages(rewards: list[float]) -> list[float]:
    """verl's GRPO on one group."""
    scores = torch.zeros(len(rewards), T)
    scores[:, -2] = torch.tensor(rewards)
    mask = torch.tensor([MASK] * len(rewards), dtype=torch.float32)
    advantages, _ = compute_grpo_outcome_advantage(scores, mask, np.array(["g"] * len(rewards), dtype=object))
    return advantages[:, 0].tolist()


def trained(episodes: list[Episode], p: float) -> torch.Tensor:
    advantages = base_advantages([e.reward for e in episodes])
    return torch.stack([penalised(e, evenly(e, a), p) for e, a in zip(episodes, advantages, strict=True)])


OK, BAD_SECOND = (True, True, True), (True, False, True)


def test_four_successes_of_which_one_has_an_invalid_turn():
    group = [episode(0, OK, True), episode(1, BAD_SECOND, True), episode(2, OK, True), episode(3, OK, True)]
    expected = torch.zeros(4, T)
    expected[1, 3] = -0.1
    assert torch.equal(trained(group, 0.1), expected)


def test_an_all_fail_group_gets_no_more_than_the_penalty():
    """Inside the reward, the same two invalid actions of four losing episodes become advantages of ±0.87."""
    group = [episode(0, BAD_SECOND, False), episode(1, OK, False), episode(2, BAD_SECOND, False), episode(3, OK, False)]
    expected = torch.zeros(4, T)
    expected[[0, 2], 3] = -0.1
    assert torch.equal(trained(group, 0.1), expected)
    inside = base_advantages([-0.1, 0.0, -0.1, 0.0])
    assert inside == pytest.approx([-0.866, 0.866, -0.866, 0.866], abs=1e-3)


def test_in_a_mixed_group_every_token_of_the_invalid_turn_gets_minus_p_beside_its_advantage():
    """One win of two: A = ±0.5/(√0.5 + 1e-6) = ±0.70711."""
    group = [episode(0, (True, True, False), True), episode(1, (False, True, True), False)]
    won, lost = trained(group, 0.25)
    assert won.tolist() == pytest.approx([0.70711, 0.70711, 0, 0.70711, 0, 0.45711, 0.45711, 0.45711, 0], abs=1e-5)
    assert lost.tolist() == pytest.approx(
        [-0.95711, -0.95711, 0, -0.70711, 0, -0.70711, -0.70711, -0.70711, 0], abs=1e-5
    )


@pytest.mark.parametrize("others", [[True, True, True], [False, False, False], [True, False, True]])
def test_the_term_does_not_depend_on_the_group(others: list[bool]):
    group = [episode(0, BAD_SECOND, True), *(episode(i + 1, OK, won) for i, won in enumerate(others))]
    difference = trained(group, 0.1) - trained(group, 0.0)
    expected = torch.zeros(4, T)
    expected[0, 3] = -0.1
    assert torch.allclose(difference, expected, atol=1e-7)


def test_the_sum_is_minus_p_times_the_tokens_of_invalid_turns():
    turns = [{"valid": False}, {"valid": True}, {"valid": False}]
    term = invalid_turn_penalty(turns, episode(0, OK, True).turn_ids(), 0.5)
    assert term.dtype == torch.float32
    assert term.tolist() == [-0.5, -0.5, 0, 0, 0, -0.5, -0.5, -0.5, 0]


def test_an_episode_without_turns_gets_nothing():
    assert invalid_turn_penalty([], torch.tensor([-1, -1]), 0.5).tolist() == [0, 0]


def test_lost_episodes_get_none():
    lost = episode(0, BAD_SECOND, False, env_error="timeout")
    assert torch.equal(penalised(lost, torch.zeros(T), 0.1), torch.zeros(T))


def test_without_a_penalty_the_tensor_itself_comes_back():
    advantages = torch.randn(T)
    assert penalised(episode(0, BAD_SECOND, True), advantages, 0.0) is advantages


def test_metrics_count_rows_that_only_the_penalty_trains():
    """Episode 0: one of 6 action tokens, −0.1/6. Episode 1: 3 of 6. The lost one is left out."""
    episodes = [
        episode(0, BAD_SECOND, True),
        episode(1, (True, True, False), True),
        episode(2, BAD_SECOND, False, env_error="crash"),
    ]
    metrics = penalty_metrics(episodes, [0.0, 0.7, 0.0], 0.1)
    assert metrics["env/penalty_mean"] == pytest.approx(-(0.1 / 6 + 0.3 / 6) / 2, abs=1e-7)
    assert metrics["env/penalty_rows_without_advantage"] == 1
    assert penalty_metrics(episodes, [0.0, 0.7, 0.0], 0.0) == {}


def record(env_error: str = "") -> EpisodeRecord:
    turns = [Turn("x", "x", True, valid, "", 1) for valid in (True, False)]
    return EpisodeRecord(
        "r", 1, "train", "train", "train/a", "look", 0, True, 2, 1, False, turns=turns, env_error=env_error
    )


def test_records_say_what_each_turn_got():
    assert [turn.penalty for turn in with_penalties(record(), 0.1).turns] == [0.0, -0.1]
    assert [turn.penalty for turn in with_penalties(record(), 0.0).turns] == [None, None]
    assert [turn.penalty for turn in with_penalties(record("crash"), 0.1).turns] == [None, None]
    written = with_penalties(record(), 0.1).to_json()
    assert EpisodeRecord.from_json(written) == with_penalties(record(), 0.1)
    assert dataclasses.asdict(record())["turns"][0]["penalty"] is None
