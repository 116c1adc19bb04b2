"""The exact engine against the installed real one, by random play with invalid commands, command by command."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.agentopsd.envs.alfworld.engine import ExactEnv
from verl.agentopsd.envs.alfworld.game import Game, parse_game
from verl.agentopsd.envs.alfworld.games import TASK_TYPES, discover, load_game
from verl.agentopsd.envs.alfworld.generate import generate
from verl.agentopsd.envs.alfworld.textworld_env import TextWorldEnv, WorkerPool
from verl.agentopsd.envs.base import TextEnv

pytestmark = pytest.mark.parity

STEPS = 14
REAL_PER_TYPE = 4
GENERATED = 12
NONSENSE = ("go to moon 1", "take apple 9 from fridge 1", "Look", "", "put it down", "go  to bed 1", "look\nlook")


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(workers=1)
    yield pool
    pool.close()


def played(game: Game, rng: random.Random) -> Iterator[str]:
    """Commands for one game: half of the episodes follow the walkthrough half of the time; the rest is at random,
    more often doing something than walking about, and one in ten is nonsense. Goes on after the goal."""
    env = ExactEnv(game)
    walkthrough = list(game.walkthrough) if rng.random() < 0.5 else []
    for _ in range(STEPS):
        acting = [command for command in env.admissible() if not command.startswith("go to")]
        dice = rng.random()
        if dice < 0.1:
            command = rng.choice(NONSENSE)
        elif walkthrough and dice < 0.6:
            command = walkthrough.pop(0)
        else:
            command = rng.choice(acting if dice < 0.85 else env.admissible())
        env.step(command)
        yield command


def assert_same_play(exact: TextEnv, real: TextEnv, commands: list[str]) -> int:
    """Both engines give equal observations: text, admissible commands, won, done, valid. Returns the steps compared."""
    assert exact.reset() == real.reset()
    for number, command in enumerate(commands):
        mine, theirs = exact.step(command), real.step(command)
        assert mine == theirs, f"after {commands[:number]}: {command!r}"
    real.close()
    return len(commands)


@pytest.mark.timeout(600)
def test_random_play_on_real_games(alfworld_data, pool):
    rng = random.Random(20)
    tasks = [task for split in ("train", "valid_seen", "valid_unseen") for task in discover(alfworld_data, split)]
    picked = []
    for kind in TASK_TYPES:
        candidates = rng.sample([task for task in tasks if task.task_type == kind], 40)
        # The real engine's time grows with the size of the game, so mostly small ones, and one at random.
        candidates[1:] = sorted(candidates[1:], key=lambda task: Path(task.path).stat().st_size)
        picked += candidates[:REAL_PER_TYPE]
    steps = 0
    for task in picked:
        game = load_game(task.path)
        steps += assert_same_play(ExactEnv(game), TextWorldEnv(task.path, pool), list(played(game, rng)))
    assert (len(picked), steps) == (24, 24 * STEPS)


@pytest.mark.timeout(600)
def test_generated_games_play_the_same_and_their_walkthroughs_win(tmp_path, pool):
    generate(tmp_path / "games", {"train": GENERATED // 2, "valid_unseen": GENERATED // 2}, seed=3)
    tasks = [task for split in ("train", "valid_unseen") for task in discover(tmp_path / "games", split)]
    assert len(tasks) == GENERATED and {task.task_type for task in tasks} == set(TASK_TYPES)
    for number, task in enumerate(tasks):
        game, real = load_game(task.path), TextWorldEnv(task.path, pool)
        if number % 2:
            assert_same_play(ExactEnv(game), real, list(played(game, random.Random(number))))
        else:
            assert_same_play(ExactEnv(game), real, list(game.walkthrough))
            assert ExactEnv(game).replay(game.walkthrough)[-1].won


@pytest.mark.parametrize(
    ("goal", "commands"),
    [
        (
            "clean kettle in the sink",
            "look; go to stoveburner 2; look; take kettle 1 from stoveburner 2; examine kettle 1; look; "
            "move kettle 1 to stoveburner 1; look; examine stoveburner 2; take kettle 1 from stoveburner 1; "
            "move kettle 1 to stoveburner 2; look; go to stoveburner 1; take kettle 1 from stoveburner 2; "
            "go to sinkbasin 1; move kettle 1 to sinkbasin 1; take kettle 1 from sinkbasin 1; "
            "clean kettle 1 with sinkbasin 1; examine kettle 1; move kettle 1 to sinkbasin 1; inventory; help",
        ),
        (
            "egg at the lamp",
            "go to sinkbasin 1; take knife 1 from sinkbasin 1; slice apple 1 with knife 1; examine knife 1; "
            "go to stoveburner 1; slice apple 1 with knife 1; go to cabinet 1; use desklamp 1; use desklamp 1; "
            "go to sinkbasin 1; take egg 1 from sinkbasin 1; inventory",
        ),
        (
            "egg at the lamp",
            "go to cabinet 1; use desklamp 1; go to sinkbasin 1; take egg 1 from sinkbasin 1; go to microwave 1; "
            "heat egg 1 with microwave 1; examine egg 1; go to fridge 1; cool egg 1 with fridge 1; examine egg 1; "
            "move egg 1 to fridge 1; open fridge 1; look; go to cabinet 1; look",
        ),
        (
            "kettle in the sink",
            "go to sinkbasin 1; take apple 1 from sinkbasin 1; clean apple 1 with sinkbasin 1; go to fridge 1; "
            "cool apple 1 with fridge 1; examine apple 1; open fridge 1; move apple 1 to fridge 1; close fridge 1; "
            "examine fridge 1; open fridge 1; take apple 1 from fridge 1; look",
        ),
    ],
)
def test_the_quirks_are_those_of_the_real_engine(small_game_data, tmp_path, pool, goal, commands):
    data = small_game_data(goal, more_facts="(objectAtLocation apple_bar_1 loc_stove)")
    (tmp_path / "game.tw-pddl").write_text(json.dumps(data))
    real = TextWorldEnv(str(tmp_path / "game.tw-pddl"), pool)
    assert_same_play(ExactEnv(parse_game(data)), real, commands.split("; "))
