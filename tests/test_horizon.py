"""The horizon curriculum: worked stages, and what is refused."""

from __future__ import annotations

import pytest

from verl.agentopsd import config as checks
from verl.agentopsd.horizon import describe, max_turns_at, schedule_problem
from verl.agentopsd.main import compose_config, plan

STAGES = [[0, 10], [50, 20], [100, 30]]


@pytest.mark.parametrize(
    ("finished", "turns"), [(0, 10), (1, 10), (49, 10), (50, 20), (99, 20), (100, 30), (100_000, 30)]
)
def test_the_stage_follows_from_the_finished_updates(finished: int, turns: int):
    assert max_turns_at(STAGES, finished, 50) == turns


def test_without_a_schedule_it_is_max_turns():
    assert max_turns_at([], 7, 50) == 50
    assert describe([], 50) == "50 turns"


def test_the_plan_counts_updates_from_one():
    assert describe(STAGES, 50) == "10 turns, 20 from update 51, 30 from update 101"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([[5, 10]], "the first stage must start at 0"),
        ([[0, 10], [50, 20], [50, 30]], "increasing numbers of updates"),
        ([[0, 10], [50, 60]], "a stage has 60 turns, more than env.max_turns=50"),
        ([[0, 0]], "at least 1 turn"),
        ([[0, 10.5]], "must be a list of [finished updates, turns] in whole numbers, for example [[0,10],[50,20]"),
        ([[0, True]], "must be a list of"),
        ([0, 10], "must be a list of"),
        ({0: 10}, "must be a list of"),
        ("10", "must be a list of"),
    ],
)
def test_what_cannot_work_is_refused(schedule: object, message: str):
    assert message in str(schedule_problem(schedule, 50))


def test_a_schedule_may_shrink_and_end_below_max_turns():
    assert schedule_problem([[0, 30], [10, 20]], 50) is None
    assert schedule_problem([], 50) is None


def test_it_survives_the_command_line():
    config = compose_config(["model=tiny", "device=cpu", "env.max_turns_schedule=[[0,10],[5,20]]"])
    checks.validate(config)
    assert checks.env_config(config).max_turns_schedule == [[0, 10], [5, 20]]
    assert "at most 10 turns, 20 from update 6" in plan(config)


def test_the_configuration_is_refused_with_it():
    with pytest.raises(checks.ConfigError, match=r"a stage has 40 turns, more than env.max_turns=30"):
        checks.validate(compose_config(["model=tiny", "device=cpu", "env.max_turns_schedule=[[0,40]]"]))
