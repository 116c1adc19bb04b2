"""The registry of environment families."""

from __future__ import annotations

import pytest

from verl.agentopsd.envs import base
from verl.agentopsd.envs.base import Observation, Task, make_family, register_env


class Corridor:
    """A family small enough to show what one needs."""

    name = "corridor"
    task_types = ("walk",)

    def __init__(self, config):
        self.length = config["length"]

    def tasks(self, split):
        return [Task(f"{split}/{n}", split, "walk", "") for n in range(self.length)]


@pytest.fixture
def clean_registry(monkeypatch):
    monkeypatch.setattr(base, "_FACTORIES", {})


def test_a_registered_family_is_built_from_the_config(clean_registry):
    register_env("corridor")(Corridor)
    family = make_family({"name": "corridor", "length": 3})
    assert [task.game_id for task in family.tasks("train")] == ["train/0", "train/1", "train/2"]


def test_built_in_families_are_found_without_an_import():
    assert make_family({"name": "alfworld"}).name == "alfworld"


def test_an_unknown_name_is_refused_with_the_known_ones(clean_registry):
    register_env("corridor")(Corridor)
    with pytest.raises(ValueError, match=r"env.name='alfword' .* known: alfworld, corridor"):
        make_family({"name": "alfword"})


def test_a_name_cannot_be_taken_twice_but_registering_again_is_harmless(clean_registry):
    register_env("corridor")(Corridor)
    register_env("corridor")(Corridor)
    with pytest.raises(ValueError, match="already registered"):
        register_env("corridor")(lambda config: None)


def test_an_observation_is_valid_and_open_unless_said_otherwise():
    seen = Observation("You see nothing.")
    assert (seen.valid, seen.won, seen.done, seen.admissible) == (True, False, False, ())
