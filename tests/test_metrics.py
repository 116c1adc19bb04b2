"""Step metrics worked by hand on small batches; every mean is over trajectories."""

import math

import numpy as np
import pytest
import torch

from verl.agentopsd import metrics
from verl.agentopsd.credit import CreditConfig, agentopsd_credit
from verl.agentopsd.evaluation.records import EpisodeRecord


def fact(**changes) -> dict:
    base = {
        "task_type": "heat",
        "won": False,
        "num_turns": 10,
        "invalid": 1,
        "truncated": False,
        "env_error": "",
        "seconds": 2.0,
        "env_seconds": 0.5,
        "action_tokens": 100,
        "request_tokens": 400,
        "cached_tokens": 300,
    }
    return {**base, **changes}


def test_credit_metrics_average_within_a_trajectory_first() -> None:
    gaps = torch.tensor([[2.0, 0.0, 0.0, 0.0], [-6.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    ids = torch.tensor([[0, 1, 2, 3], [0, -1, -1, -1], [-1, -1, -1, -1]])
    rule = CreditConfig(lam=0.3, gamma=1.0)
    credit = agentopsd_credit(torch.tensor([1.0, -1.0, 1.0]), gaps, ids, torch.full((3,), 0.5), rule)
    got = metrics.credit_metrics(credit, rule)
    after, sunk = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(6))
    assert got["credit/evidence_mean"] == pytest.approx((0.5 - 6) / 2)
    assert got["credit/evidence_abs_mean"] == pytest.approx((0.5 + 6) / 2)
    assert got["credit/delta_b_abs_mean"] == pytest.approx(((after - 0.5) / 4 + (0.5 - sunk)) / 2)
    # q = ΔB = (x, 0, 0, 0): z = (√3, -1/√3 ...), so the first weight is at the bound and the others are not
    assert got["credit/weight_max"] == 1.2 and got["credit/weight_min"] == pytest.approx(
        1 - 0.2 / math.sqrt(3), abs=1e-3
    )
    assert got["credit/weight_mean"] == pytest.approx(((1.2 + 3 * (1 - 0.2 / math.sqrt(3))) / 4 + 1) / 2, abs=1e-3)
    assert got["credit/weight_clip_frac"] == pytest.approx((1 / 4 + 0) / 2)
    assert got["credit/belief_first_mean"] == pytest.approx((after + sunk) / 2)
    assert got["credit/belief_last_mean"] == pytest.approx((after + sunk) / 2)
    assert got["credit/saturated_frac"] == pytest.approx((0 + 1) / 2)
    assert got["credit/lambda"] == 0.3


def test_first_and_last_belief_are_those_of_each_rows_own_turns() -> None:
    ids = torch.tensor([[0, 1, 2], [0, -1, -1]])
    rule = CreditConfig(gamma=1.0, prior=0.5)
    credit = agentopsd_credit(
        torch.ones(2), torch.tensor([[1.0, 1.0, 1.0], [-1.0, 0.0, 0.0]]), ids, torch.ones(2), rule
    )
    got = metrics.credit_metrics(credit, rule)

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    assert got["credit/belief_first_mean"] == pytest.approx((sigmoid(1) + sigmoid(-1)) / 2)
    assert got["credit/belief_last_mean"] == pytest.approx((sigmoid(3) + sigmoid(-1)) / 2)


def test_credit_metrics_of_nothing_scored_are_absent() -> None:
    credit = agentopsd_credit(torch.ones(1), torch.ones(1, 2), torch.full((1, 2), -1), torch.ones(1), CreditConfig())
    assert metrics.credit_metrics(credit, CreditConfig()) == {}


def test_group_metrics() -> None:
    facts = [
        fact(won=True),
        fact(won=True),
        fact(won=False, task_type="cool"),
        fact(won=False, task_type="cool"),
        fact(won=True, task_type="cool"),
        fact(won=False, task_type="cool"),
        fact(won=True, task_type="cool", env_error="time limit"),
    ]
    groups = ["a", "a", "b", "b", "c", "c", "b"]
    got = metrics.group_metrics(facts, groups, [0, 0, 0, 0, 0.7, -0.7, 0], rewards=[10, 10, 0, -1, 10, 0, 99])
    assert got["group/success_rate"] == pytest.approx(3 / 6)
    assert got["group/success_rate/heat"] == 1.0 and got["group/success_rate/cool"] == pytest.approx(1 / 4)
    assert got["group/zero_adv_frac"] == pytest.approx(2 / 3)
    assert got["group/zero_adv_frac_all_success"] == pytest.approx(1 / 3)
    assert got["group/zero_adv_frac_all_fail"] == pytest.approx(1 / 3)
    assert got["group/reward_mean"] == pytest.approx(29 / 6)
    assert got["group/reward_std"] == pytest.approx(np.std([10, 10, 0, -1, 10, 0]))


def test_group_metrics_when_every_episode_was_lost() -> None:
    assert metrics.group_metrics([fact(env_error="crash")], ["a"], [0.0]) == {}


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="advantages"):
        metrics.group_metrics([fact()], ["a"], [0.0, 1.0])


def test_teacher_metrics_weigh_rows_equally() -> None:
    got = metrics.teacher_metrics(
        [torch.tensor([1.0, -1.0]), torch.tensor([3.0]), torch.tensor([])],
        rows_skipped=5,
        tokens=900,
        skill_fallbacks=2,
        seconds=1.5,
    )
    assert got == {
        "teacher/rows_scored": 3.0,
        "teacher/rows_skipped": 5.0,
        "teacher/tokens": 900.0,
        "teacher/skill_fallbacks": 2.0,
        "teacher/seconds": 1.5,
        "teacher/gap_mean": 1.5,
        "teacher/gap_abs_mean": 2.0,
    }


def test_env_metrics() -> None:
    got = metrics.env_metrics(
        [fact(), fact(num_turns=4, invalid=2, truncated=True, env_seconds=1.5), fact(env_error="crash", num_turns=0)]
    )
    assert got == {
        "env/errors": 1.0,
        "env/turns_mean": 7.0,
        "env/invalid_frac": pytest.approx((0.1 + 0.5) / 2),
        "env/truncated_frac": 0.5,
        "env/seconds": 1.0,
    }


def test_rollout_metrics() -> None:
    facts = [
        fact(seconds=1.0),
        fact(seconds=3.0, action_tokens=50),
        fact(env_error="crash", seconds=2.0, action_tokens=0),
    ]
    rollout = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.0]), torch.tensor([])]
    actor = [torch.tensor([-1.0, -2.5]), torch.tensor([-0.5]), torch.tensor([])]
    got = metrics.rollout_metrics(facts, rollout, actor)
    assert got["rollout/logprob_gap_abs_mean"] == pytest.approx((0.25 + 0.5) / 2)
    assert got["rollout/logprob_gap_abs_max"] == pytest.approx(0.5)
    assert got["rollout/tokens_per_second"] == pytest.approx(150 / 3)
    assert got["rollout/straggler_ratio"] == pytest.approx(3 / 2)
    assert got["rollout/prefix_cache_hit_frac"] == 0.75
    assert metrics.rollout_metrics(facts, rollout, actor, seconds=10.0)["rollout/tokens_per_second"] == 15.0


def test_log_probs_that_nobody_reads_are_counted() -> None:
    log_probs = [torch.tensor([-1.0, 0.0, -2.0, -3.0]), torch.tensor([0.0, -1.0])]
    masks = [torch.tensor([True, False, False, True]), torch.tensor([False, True])]
    assert metrics.engine_metrics(log_probs, masks) == {"actor/unread_log_prob_frac": pytest.approx(1 / 3)}
    assert metrics.engine_metrics(log_probs[1:], masks[1:]) == {"actor/unread_log_prob_frac": 0.0}
    assert metrics.engine_metrics([torch.tensor([-1.0])], [torch.tensor([True])]) == {}


def record(won: bool, **changes) -> EpisodeRecord:
    base = dict(run="r", step=3, phase="validation", split="valid_unseen", game_id="g", task_type="heat", seed=0)
    return EpisodeRecord(**{**base, "won": won, "num_turns": 8, "invalid": 2, "truncated": False, **changes})


def test_validation_metrics_count_every_episode_once() -> None:
    got = metrics.validation_metrics([record(True), record(False, task_type="cool"), record(False, env_error="crash")])
    assert got["val/episodes"] == 2 and got["val/errors"] == 1
    assert got["val/success_rate"] == 0.5
    assert got["val/success_rate/heat"] == 1.0 and got["val/success_rate/cool"] == 0.0
    assert (got["val/success_low"], got["val/success_high"]) == pytest.approx((0.0945, 0.9055), abs=1e-4)
    assert got["val/invalid_frac"] == 0.25


def test_an_episode_without_turns_divides_nothing_by_zero() -> None:
    assert metrics.env_metrics([fact(num_turns=0, invalid=0)])["env/invalid_frac"] == 0.0
    assert metrics.rollout_metrics([fact(seconds=0.0, request_tokens=0)], [[]], [[]]) == {}
