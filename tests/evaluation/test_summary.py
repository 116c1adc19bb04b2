"""Summaries of hand-made episodes: every number worked out beside it."""

import json

import pytest

from verl.agentopsd.evaluation.records import EpisodeRecord, Turn
from verl.agentopsd.evaluation.statistics import wilson
from verl.agentopsd.evaluation.summary import behaviour, finished, longest_run, summarize


def episode(game: str, won: bool, commands: str = "abc", valid: str = "", **changes) -> EpisodeRecord:
    """One turn per letter of ``commands``; ``valid`` marks turns with + or -, all valid if empty."""
    flags = [mark == "+" for mark in valid] if valid else [True] * len(commands)
    turns = [Turn(c, c, True, ok, "o", 2) for c, ok in zip(commands, flags, strict=True)]
    base = dict(run="r", step=2, phase="evaluation", split=game.split("/")[0], game_id=game, task_type="heat", seed=0)
    counts = dict(num_turns=len(turns), invalid=flags.count(False), truncated=False, prompt_tokens=10, action_tokens=6)
    return EpisodeRecord(**{**base, **counts, "won": won, "turns": turns, "response_tokens": 20, **changes})


def test_success_is_counted_per_episode_per_split_and_per_task_type() -> None:
    episodes = [
        episode("seen/1", True),
        episode("seen/2", False, task_type="cool"),
        episode("unseen/1", True),
        episode("unseen/2", True),
        episode("unseen/3", False, env_error="time limit"),
    ]
    got = summarize(episodes)
    assert got["episodes"] == 5 and got["errors"] == 1
    assert (got["success"]["rate"], got["success"]["n"]) == (0.75, 4)
    assert got["per_split"]["seen"] == {
        "rate": 0.5,
        "won": 1,
        "n": 2,
        "low": wilson(1, 2).low,
        "high": wilson(1, 2).high,
    }
    assert got["per_split"]["unseen"]["rate"] == 1.0 and got["per_split"]["unseen"]["high"] == 1.0
    assert {kind: part["n"] for kind, part in got["per_task_type"].items()} == {"cool": 1, "heat": 3}
    assert got["tokens"] == {"prompt_mean": 10, "action_mean": 6, "response_mean": 20, "action_total": 24}
    assert "pass_at" not in got
    json.dumps(got, allow_nan=False)


def test_behaviour() -> None:
    episodes = [
        episode("g/1", True, "abbbc", "+--++"),  # a loop of b, a streak of 2; - is followed by - and by +
        episode("g/2", False, "aabba", "++++-", truncated=True),  # no loop; the last - has no turn after it
        episode("g/3", False, "xyz", "---"),  # a streak of 3: followed twice by -
        episode("g/4", True, "a"),
    ]
    got = behaviour(episodes)
    assert got["turns_mean"] == pytest.approx(14 / 4) and got["turns_won_mean"] == 3.0
    assert got["invalid_mean"] == pytest.approx(6 / 4) and got["invalid_per_turn"] == pytest.approx(6 / 14)
    assert got["truncated"] == 0.25
    assert got["loops"] == 0.25
    assert got["invalid_streak_mean"] == pytest.approx((2 + 1 + 3 + 0) / 4) and got["invalid_streak_max"] == 3
    assert got["recovery"] == pytest.approx(1 / 4)
    assert got["slow_turns"] == 5 and got["slow"] == 0.0
    assert behaviour(episodes, slow_turns=4)["slow"] == 0.5


def test_longest_run() -> None:
    assert [longest_run(list(x)) for x in ("", "a", "abab", "aab", "abbbba")] == [0, 1, 1, 2, 4]


def test_several_samples_of_a_game_are_one_game() -> None:
    won = {"g/1": [True, True, False, False], "g/2": [False] * 4, "g/3": [True] * 4}
    episodes = [episode(game, w, sample=i) for game, row in won.items() for i, w in enumerate(row)]
    got = summarize(episodes)
    assert got["success"]["n"] == 3 and got["success"]["rate"] == pytest.approx(0.5)
    assert (got["success"]["low"], got["success"]["high"]) == (wilson(1.5, 3).low, wilson(1.5, 3).high)
    assert got["samples"] == 4 and got["avg_at"] == {"4": pytest.approx(0.5)}
    assert got["pass_at"]["1"] == pytest.approx(0.5)
    assert got["pass_at"]["2"] == pytest.approx((1 - 1 / 6 + 0 + 1) / 3)
    assert got["pass_at"]["4"] == pytest.approx(2 / 3)


def test_no_episodes_at_all() -> None:
    got = summarize([])
    assert got["success"] == {"rate": None, "low": 0.0, "high": 1.0, "won": 0.0, "n": 0}
    assert got["behaviour"]["turns_mean"] is None
    json.dumps(got, allow_nan=False)


def test_finished_says_what_was_evaluated() -> None:
    episodes = [episode("seen/1", True), episode("seen/2", False)]
    got = finished(episodes, model="m", panel="seen", panel_hash="ab", sampling={"temperature": 0}, wall_seconds=3.0)
    assert (got.run, got.step, got.games, got.samples, got.skill) == ("r", 2, 2, 1, False)
    assert got.results == summarize(episodes)
    with pytest.raises(ValueError, match="one run, step and prompt"):
        finished([*episodes, episode("seen/3", True, skill=True)], model="m", panel="p", panel_hash="", sampling={})
    with pytest.raises(ValueError, match="none"):
        finished([], model="m", panel="p", panel_hash="", sampling={})
