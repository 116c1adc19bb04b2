"""The exact engine: everything recorded from the real one, every walkthrough, and what must hold for any command."""

from __future__ import annotations

import copy
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.agentopsd.envs.alfworld.engine import NOTHING_HAPPENS, ExactEnv
from verl.agentopsd.envs.alfworld.game import Game, parse_game
from verl.agentopsd.envs.alfworld.games import EXPECTED, TASK_TYPES, discover, load_game
from verl.agentopsd.envs.base import TextEnv


@pytest.fixture(scope="module")
def unseen_games(alfworld_data) -> list[Game]:
    return [load_game(task.path) for task in discover(alfworld_data, "valid_unseen")]


@pytest.fixture(scope="module")
def game_of_each_type(alfworld_data) -> list[Game]:
    by_type = {task.task_type: task for task in discover(alfworld_data, "valid_seen")}
    assert set(by_type) == set(TASK_TYPES)
    return [load_game(task.path) for task in by_type.values()]


@pytest.fixture(scope="module")
def real_game(unseen_games) -> Game:
    return unseen_games[0]


@pytest.fixture
def kitchen(small_game_data):
    """``kitchen(...)``: an episode in the small kitchen; arguments as for ``small_game_data``."""
    return lambda *arguments, **more: ExactEnv(parse_game(small_game_data(*arguments, **more)))


def texts(env: ExactEnv, *commands: str) -> list[str]:
    return [env.step(command).text for command in commands]


@pytest.mark.parity
def test_transcripts_of_the_real_engine_replay_without_a_difference(alfworld_data, transcripts):
    episodes = [json.loads(line) for line in transcripts.read_text().splitlines()]
    steps = 0
    for episode in episodes:
        env = ExactEnv(load_game(alfworld_data / "json_2.1.1" / episode["game"]))
        first = env.reset()
        assert (first.text, list(first.admissible)) == (episode["intro"], episode["admissible"])
        for command, text, won, admissible in episode["steps"]:
            seen = env.step(command)
            assert (seen.text, seen.won, list(seen.admissible)) == (text, won, admissible), (episode["game"], command)
            steps += 1
    assert (len(episodes), steps) == (24, 513)


@pytest.mark.parity
@pytest.mark.parametrize("split", EXPECTED)
def test_every_walkthrough_wins_with_its_last_command(alfworld_data, split):
    tasks = discover(alfworld_data, split)
    assert len(tasks) == EXPECTED[split]
    failures = []
    for task in tasks:
        game = load_game(task.path)
        seen = ExactEnv(game).replay(game.walkthrough)
        if not all(one.valid for one in seen) or [one.won for one in seen] != [False] * (len(seen) - 1) + [True]:
            failures.append(task.game_id)
    assert failures == []


def test_is_a_text_env_and_starts_valid_and_unfinished(real_game):
    env = ExactEnv(real_game)
    assert isinstance(env, TextEnv)
    first = env.reset()
    assert first.valid and not first.won and not first.done
    assert first.text.startswith("-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room.")
    assert first.text.endswith(real_game.task)
    assert list(first.admissible) == sorted(first.admissible)
    assert {"look", "inventory", "help"} <= set(first.admissible)


@settings(max_examples=300, deadline=None)
@given(command=st.text(max_size=60))
def test_any_text_is_answered_and_nonsense_changes_nothing(real_game, command):
    env = ExactEnv(real_game)
    env.step(real_game.walkthrough[0])
    before = state_of(env)
    seen = env.step(command)
    if command.strip() not in before["admissible"]:
        assert (seen.text, seen.valid) == (NOTHING_HAPPENS, False)
        assert state_of(env) == before


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), game_number=st.integers(0, 133))
def test_every_admissible_command_is_understood_and_near_misses_are_not(unseen_games, seed, game_number):
    rng = random.Random(seed)
    env = ExactEnv(unseen_games[game_number])
    seen = env.reset()
    for _ in range(20):
        command = rng.choice(seen.admissible)
        for wrong in (command.upper(), command + " 99", command.replace(" ", "  ") + ".", ""):
            before = state_of(env)
            missed = env.step(wrong)
            assert (missed.text, missed.valid, state_of(env)) == (NOTHING_HAPPENS, False, before)
            assert missed.admissible == seen.admissible
        seen = env.step(f"  {command}\n")
        assert seen.valid and seen.text != NOTHING_HAPPENS
        assert len(set(seen.admissible)) == len(seen.admissible)
        assert seen.done == seen.won


def state_of(env: ExactEnv) -> dict[str, object]:
    """A copy of everything that an episode may change."""
    keys = ("location", "held", "contents", "object_locations", "taken_out", "opened", "states", "won")
    return copy.deepcopy({"admissible": env.admissible(), **{key: getattr(env, key) for key in keys}})


def test_episodes_of_one_game_share_nothing_that_changes(game_of_each_type):
    for game in game_of_each_type:
        first, second = ExactEnv(game), ExactEnv(game)
        untouched = state_of(second)
        for command in game.walkthrough:
            first.step(command)
        assert first.won and state_of(second) == untouched
        assert first.reset() == second.reset() and state_of(first) == untouched


def test_a_clone_goes_its_own_way(game_of_each_type):
    for game in game_of_each_type:
        for number in range(len(game.walkthrough)):
            env = ExactEnv(game)
            env.replay(game.walkthrough[:number])
            before, twin = state_of(env), env.clone()
            assert state_of(twin) == before
            for command in game.walkthrough[number:]:
                twin.step(command)
            assert twin.won and state_of(env) == before


def test_same_commands_same_episode(real_game):
    assert ExactEnv(real_game).replay(real_game.walkthrough) == ExactEnv(real_game).replay(real_game.walkthrough)


def test_play_goes_on_after_the_goal_as_in_the_original(real_game):
    env = ExactEnv(real_game)
    env.replay(real_game.walkthrough)
    assert env.step("inventory").valid and env.won


def test_going_to_a_receptacle_of_the_same_location_is_not_possible(kitchen):
    env = kitchen()
    env.step("go to stoveburner 1")
    assert env.step("go to stoveburner 2").text == NOTHING_HAPPENS
    assert "examine stoveburner 2" in env.admissible()


def test_look_at_the_start_lists_nothing_but_the_introduction_lists_all(kitchen):
    env = kitchen()
    assert env.reset().text == (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see "
        "a cabinet 1, a fridge 1, a microwave 1, a sinkbasin 1, a stoveburner 2, and a stoveburner 1.\n\n"
        "Your task is to: kettle in the sink."
    )
    assert env.step("look").text.endswith("Looking quickly around you, you see nothing.")


def test_look_shows_what_moved_between_receptacles_of_one_location(kitchen):
    env = kitchen()
    look = "You are facing the stoveburner 2, and stoveburner 1. Next to it, you see {}."
    env.step("go to stoveburner 2")
    env.step("take kettle 1 from stoveburner 2")
    assert env.step("look").text == look.format("nothing")
    env.step("move kettle 1 to stoveburner 1")
    assert env.step("look").text == look.format("a kettle 1")
    texts(env, "take kettle 1 from stoveburner 1", "move kettle 1 to stoveburner 2")
    assert env.step("look").text == look.format("a kettle 1")  # its place on stoveburner 1 is still empty


def test_only_a_held_object_can_be_examined(kitchen):
    env = kitchen()
    env.step("go to stoveburner 2")
    assert env.step("examine kettle 1").text == NOTHING_HAPPENS
    env.step("take kettle 1 from stoveburner 2")
    assert env.step("examine kettle 1").text == "This is a normal kettle 1. In it, you see a egg 1."


def test_closed_appliances_heat_and_cool(kitchen):
    assert texts(
        kitchen(),
        *("go to sinkbasin 1", "take egg 1 from sinkbasin 1", "examine egg 1", "go to microwave 1"),
        *("heat egg 1 with microwave 1", "examine egg 1", "go to fridge 1", "cool egg 1 with fridge 1"),
        *("examine egg 1", "move egg 1 to fridge 1", "open fridge 1", "move egg 1 to fridge 1", "close fridge 1"),
    ) == [
        "You arrive at sinkbasin 1. On the sinkbasin 1, you see a apple 1, a egg 1, and a knife 1.",
        "You pick up the egg 1 from the sinkbasin 1.",
        "There's nothing special about egg 1.",
        "You arrive at microwave 1. The microwave 1 is closed.",
        "You heat the egg 1 using the microwave 1.",
        "This is a hot egg 1.",
        "You arrive at fridge 1. The fridge 1 is closed.",
        "You cool the egg 1 using the fridge 1.",
        "This is a cold egg 1.",
        NOTHING_HAPPENS,
        "You open the fridge 1. The fridge 1 is open. In it, you see nothing.",
        "You move the egg 1 to the fridge 1.",
        "You close the fridge 1.",
    ]


def test_a_lamp_in_a_closed_cabinet_can_be_lit_and_stays_lit(kitchen):
    env = kitchen()
    assert texts(env, "go to cabinet 1", "use desklamp 1", "use desklamp 1") == [
        "You arrive at cabinet 1. The cabinet 1 is closed.",
        "You turn on the desklamp 1.",
        "You turn on the desklamp 1.",
    ]


def test_slicing_follows_the_location_an_object_is_filed_under(kitchen):
    env = kitchen(more_facts="(objectAtLocation apple_bar_1 loc_stove)")
    texts(env, "go to sinkbasin 1", "take knife 1 from sinkbasin 1", "go to stoveburner 1")
    assert env.step("slice apple 1 with knife 1").text == "You sliced the apple 1 with the knife 1."
    env.step("go to fridge 1")
    assert env.step("slice apple 1 with knife 1").text == NOTHING_HAPPENS


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ("isClean isHot isSliced", "This is a hot and clean sliced apple 1."),
        ("isClean isCool isSliced", "This is a cool and clean sliced apple 1."),
        ("isClean isSliced", "This is a clean sliced apple 1."),
        ("isHot isSliced", "This is a hot sliced apple 1."),
        ("isCool isSliced", "This is a cool sliced apple 1."),
        ("isClean isHot", "This is a hot and clean apple 1."),
        ("isClean isCool", "This is a cool and clean apple 1."),
        ("isHot", "This is a hot apple 1."),
        ("isClean", "This is a clean apple 1."),
        ("isCool", "This is a cold apple 1."),
        ("isSliced", "This is a sliced apple 1."),
        ("", "There's nothing special about apple 1."),
    ],
)
def test_examining_an_object_tells_its_states_in_the_words_of_the_grammar(kitchen, states, text):
    env = kitchen(more_facts=" ".join(f"({state} apple_bar_1)" for state in states.split()))
    texts(env, "go to sinkbasin 1", "take apple 1 from sinkbasin 1")
    assert env.step("examine apple 1").text == text


def test_goal_of_two_needs_both_in_the_same_receptacle(kitchen):
    second = "(objectType egg_bar_2 EggType) (pickupable egg_bar_2) (inReceptacle egg_bar_2 stoveburner_bar_2)"
    env = kitchen("two eggs in the sink", more_objects="egg_bar_2 - object", more_facts=second)
    assert not env.won
    texts(env, "go to stoveburner 1", "take egg 1 from stoveburner 1", "go to sinkbasin 1")
    assert env.step("move egg 1 to sinkbasin 1").won


def test_goal_with_a_state_needs_the_treated_object(kitchen):
    env = kitchen("clean kettle in the sink")
    texts(env, "go to stoveburner 2", "take kettle 1 from stoveburner 2", "go to sinkbasin 1")
    assert not env.step("move kettle 1 to sinkbasin 1").won
    env.step("take kettle 1 from sinkbasin 1")
    assert not env.step("clean kettle 1 with sinkbasin 1").won
    assert env.step("move kettle 1 to sinkbasin 1").won


def test_goal_of_looking_needs_the_object_in_hand_at_a_lit_lamp(kitchen):
    env = kitchen("egg at the lamp")
    texts(env, "go to cabinet 1", "use desklamp 1", "go to sinkbasin 1")
    assert not env.step("take egg 1 from sinkbasin 1").won
    assert env.step("go to cabinet 1").won
    assert not env.step("go to fridge 1").won
