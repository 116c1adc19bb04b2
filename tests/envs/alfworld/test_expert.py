"""The searching expert: what it understands from text, how often it wins, and what clumsiness costs."""

from __future__ import annotations

import inspect
import random
from pathlib import Path

import pytest

from verl.agentopsd.envs.alfworld import expert as expert_module
from verl.agentopsd.envs.alfworld.engine import ExactEnv
from verl.agentopsd.envs.alfworld.expert import (
    Beliefs,
    Clumsiness,
    Goal,
    SearchExpert,
    build_prior,
    load_prior,
    parse_goal,
)
from verl.agentopsd.envs.alfworld.games import TASK_TYPES, discover, load_game

ROOM = "You see a desk 1, a drawer 1, a drawer 2, and a fridge 1."


@pytest.mark.parametrize(
    ("sentence", "goal"),
    [
        ("Your task is to: put some mug on desk.", Goal("put", "mug", "desk")),
        ("Your task is to: put a mug in desk.", Goal("put", "mug", "desk")),
        ("Your task is to: clean some soapbar and put it in cabinet.", Goal("put", "soapbar", "cabinet", "clean")),
        ("Your task is to: put a hot apple in fridge.", Goal("put", "apple", "fridge", "heat")),
        ("Your task is to: cool some bread and put it in countertop.", Goal("put", "bread", "countertop", "cool")),
        ("Your task is to: find two pen and put them in drawer.", Goal("two", "pen", "drawer")),
        ("Your task is to: put two pen in drawer.", Goal("two", "pen", "drawer")),
        ("Your task is to: examine the bowl with the desklamp.", Goal("look", "bowl", "desklamp")),
        ("Your task is to: look at bowl under the desklamp.", Goal("look", "bowl", "desklamp")),
    ],
)
def test_reads_every_form_of_the_task_sentence(sentence: str, goal: Goal) -> None:
    assert parse_goal(sentence) == goal


def test_refuses_a_sentence_that_is_no_task() -> None:
    with pytest.raises(ValueError, match="none of ALFWorld's forms: 'Sing a song'"):
        parse_goal("Sing a song")


def test_beliefs_follow_the_answers() -> None:
    world = Beliefs(["desk 1", "drawer 1", "drawer 2"])
    world.update("go to drawer 1", "You arrive at drawer 1. The drawer 1 is closed.")
    assert (world.here, world.closed, world.searched) == ("drawer 1", {"drawer 1": True}, set())
    world.update("open drawer 1", "You open the drawer 1. The drawer 1 is open. In it, you see a pen 2, and a cd 1.")
    assert world.contents == {"drawer 1": ["pen 2", "cd 1"]}
    assert world.searched == {"drawer 1"} and world.closed == {"drawer 1": False}
    world.update("take pen 2 from drawer 1", "You pick up the pen 2 from the drawer 1.")
    assert (world.held, world.contents["drawer 1"]) == ("pen 2", ["cd 1"])
    world.update("close drawer 1", "You close the drawer 1.")
    assert world.closed["drawer 1"] and world.searched == {"drawer 1"}
    world.update("go to desk 1", "You arrive at desk 1. On the desk 1, you see nothing.")
    world.update("move pen 2 to desk 1", "You move the pen 2 to the desk 1.")
    assert (world.held, world.contents["desk 1"]) == (None, ["pen 2"])
    world.update("go to drawer 1", "You arrive at drawer 1. The drawer 1 is closed.")
    assert world.searched == {"desk 1"}


def test_turns_to_a_receptacle_at_the_same_spot_by_examining_it() -> None:
    player = SearchExpert(ROOM, "Your task is to: put some mug on desk.", prior={"drawer": {"mug": 1.0}})
    assert player.act() == "go to drawer 1"
    player.observe("go to drawer 1", "You arrive at drawer 1. The drawer 1 is closed.")
    assert player.act() == "open drawer 1"
    player.observe("open drawer 1", "You open the drawer 1. The drawer 1 is open. In it, you see nothing.")
    assert player.act() == "go to drawer 2"
    player.observe("go to drawer 2", "Nothing happens.")
    assert player.act() == "examine drawer 2"
    player.observe("examine drawer 2", "The drawer 2 is closed.")
    assert player.act() == "open drawer 2"


def test_searches_the_likeliest_place_first_and_does_the_treatment() -> None:
    prior = {"fridge": {"apple": 0.4}, "desk": {"apple": 0.1}}
    player = SearchExpert(ROOM + " a microwave 1", "Your task is to: put a hot apple in drawer.", prior=prior)
    answers = {
        "go to fridge 1": "You arrive at fridge 1. The fridge 1 is closed.",
        "open fridge 1": "You open the fridge 1. The fridge 1 is open. In it, you see a apple 1.",
        "take apple 1 from fridge 1": "You pick up the apple 1 from the fridge 1.",
        "go to microwave 1": "You arrive at microwave 1. The microwave 1 is closed.",
        "heat apple 1 with microwave 1": "You heat the apple 1 using the microwave 1.",
        "go to drawer 1": "You arrive at drawer 1. The drawer 1 is closed.",
        "open drawer 1": "You open the drawer 1. The drawer 1 is open. In it, you see nothing.",
        "move apple 1 to drawer 1": "You move the apple 1 to the drawer 1.",
    }
    for expected, answer in answers.items():
        command = player.act()
        assert command == expected
        player.observe(command, answer)


def test_leaves_what_lies_in_the_target_of_a_two_object_task() -> None:
    player = SearchExpert(ROOM, "Your task is to: put two pen in desk.", prior={"drawer": {"pen": 1.0}})
    player.observe("go to drawer 1", "You arrive at drawer 1. The drawer 1 is open. In it, you see a pen 1.")
    player.observe("take pen 1 from drawer 1", "You pick up the pen 1 from the drawer 1.")
    player.observe("go to desk 1", "You arrive at desk 1. On the desk 1, you see a pen 7.")
    player.observe("move pen 1 to desk 1", "You move the pen 1 to the desk 1.")
    assert player.act() == "go to drawer 2"


def test_prior_counts_receptacles_that_hold_a_kind_of_object() -> None:
    rooms = [{"desk 1": ["pen 1", "pen 2"], "desk 2": []}, {"desk 1": ["cd 1"], "bed 1": ["pen 1"]}]
    assert build_prior(rooms) == {"bed": {"pen": 1.0}, "desk": {"cd": 0.3333, "pen": 0.3333}}


def test_knows_nothing_but_text() -> None:
    assert "engine" not in inspect.getsource(expert_module)
    assert "game import" not in inspect.getsource(expert_module)


@pytest.fixture(scope="module")
def held_out(alfworld_data: Path):
    tasks = discover(alfworld_data, "valid_seen") + discover(alfworld_data, "valid_unseen")
    assert len(tasks) == 274
    return tasks


def play(task, turns: int = 50, **options) -> tuple[bool, int]:
    env = ExactEnv(load_game(task.path))
    opening, sentence = env.reset().text.split("\n\n")[-2:]
    player = SearchExpert(opening, sentence, **options)
    for turn in range(1, turns + 1):
        command = player.act()
        observation = env.step(command)
        if observation.won:
            return True, turn
        player.observe(command, observation.text)
    return False, turns


def test_wins_at_least_95_percent_of_all_held_out_games_within_50_steps(held_out) -> None:
    lost = [task.game_id for task in held_out if not play(task)[0]]
    assert len(lost) <= 0.05 * len(held_out), lost


def test_plays_without_a_prior(held_out) -> None:
    won = sum(play(task, prior={}, rng=random.Random(0))[0] for task in held_out)
    assert won >= 0.85 * len(held_out)


def test_each_missing_skill_costs_success(held_out) -> None:
    def rate(general: bool, specific: bool) -> float:
        results = [
            play(task, 30, general=general, specific=specific, rng=random.Random(i)) for i, task in enumerate(held_out)
        ]
        return sum(won for won, _ in results) / len(results)

    skilled, no_general, no_specific, neither = (
        rate(True, True),
        rate(False, True),
        rate(True, False),
        rate(False, False),
    )
    assert skilled > no_general + 0.05 > neither + 0.05
    assert skilled > no_specific + 0.15 and no_specific > neither
    assert 0.35 < neither < 0.65


def test_same_seed_same_play(held_out) -> None:
    clumsy = {"general": False, "specific": False, "clumsiness": Clumsiness(dawdle=0.5)}
    twice = [[play(task, rng=random.Random(7), **clumsy) for task in held_out[:20]] for _ in range(2)]
    assert twice[0] == twice[1]


def test_shipped_prior_is_the_count_over_the_train_games(alfworld_data: Path) -> None:
    def rooms():
        for task in discover(alfworld_data, "train"):
            game = load_game(task.path)
            yield {game.names[r]: [game.names[o] for o in game.contents.get(r, ())] for r in game.receptacles}

    assert build_prior(rooms()) == load_prior()


def test_every_task_type_is_won(held_out) -> None:
    for kind in TASK_TYPES:
        games = [task for task in held_out if task.task_type == kind]
        assert sum(play(task)[0] for task in games) >= 0.9 * len(games), kind
