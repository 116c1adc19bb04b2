"""The family: where games come from, what is said about it, and that prompts are those of ``prompts``."""

from __future__ import annotations

import logging
import shutil

import pytest

from verl.agentopsd.envs.alfworld import prompts
from verl.agentopsd.envs.alfworld.engine import ExactEnv
from verl.agentopsd.envs.alfworld.family import AlfworldFamily, resolve_data_dir
from verl.agentopsd.envs.alfworld.games import TASK_TYPES, GamesNotFound
from verl.agentopsd.envs.base import make_family

GENERATED = {"train": 6, "valid_seen": 2, "valid_unseen": 3, "seed": 5}


def test_games_come_from_the_named_folder(alfworld_data, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", "/somewhere/else")
    family = make_family({"name": "alfworld", "data_dir": str(alfworld_data)})
    assert family.task_types == TASK_TYPES
    assert len(family.tasks("valid_unseen")) == 134


def test_games_come_from_the_environment_variable_next(alfworld_data, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(alfworld_data))
    assert len(make_family({"name": "alfworld", "data_dir": None}).tasks("valid_seen")) == 140


def test_without_data_games_are_generated_and_that_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = {"name": "alfworld", "data_dir": None, "generated": GENERATED}
    with caplog.at_level(logging.WARNING):
        tasks = make_family(config).tasks("valid_unseen")
    assert len(tasks) == 3
    assert len(caplog.records) == 1
    said = caplog.records[0].getMessage()
    assert "playing 11 generated games" in said and "`python scripts/get_alfworld_data.py`" in said
    assert str(tmp_path) in tasks[0].path
    assert make_family(config).tasks("valid_unseen") == tasks


def test_generated_sets_of_other_settings_do_not_collide(tmp_path, monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = {"train": 1, "valid_seen": 1, "valid_unseen": 1}
    folders = {resolve_data_dir({"generated": {**small, "seed": seed}}) for seed in (1, 2)}
    assert len(folders) == 2 and all(folder.parent == tmp_path / "verl-agentopsd" for folder in folders)


def test_a_generated_set_can_be_given_its_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    family = AlfworldFamily({"generated": {**GENERATED, "dir": str(tmp_path / "mine")}})
    assert family.data_dir == tmp_path / "mine" and len(family.tasks("train")) == 6


@pytest.mark.parametrize("where", ["argument", "variable"])
def test_a_wrong_path_is_an_error_and_not_a_reason_to_generate(tmp_path, monkeypatch, where):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "gone"))
    family = AlfworldFamily({"data_dir": str(tmp_path / "gone") if where == "argument" else None})
    with pytest.raises(GamesNotFound, match="gone' is not a folder; get the games with"):
        family.tasks("train")
    assert not (tmp_path / "cache").exists()


def test_a_part_of_the_data_can_be_allowed(alfworld_data, tmp_path):
    (tmp_path / "train").mkdir()
    first = AlfworldFamily({"data_dir": alfworld_data}).tasks("train")[0]
    folder = tmp_path / first.game_id
    folder.parent.mkdir()
    shutil.copytree(alfworld_data / "json_2.1.1" / first.game_id, folder)
    with pytest.raises(GamesNotFound, match="has 1 games"):
        AlfworldFamily({"data_dir": tmp_path}).tasks("train")
    (task,) = AlfworldFamily({"data_dir": tmp_path, "check_counts": False}).tasks("train")
    assert task.game_id == first.game_id


def test_make_gives_the_exact_engine_by_default(alfworld_data):
    family = AlfworldFamily({"data_dir": alfworld_data})
    env = family.make(family.tasks("valid_seen")[0])
    assert isinstance(env, ExactEnv) and env.reset().text.startswith("-= Welcome to TextWorld, ALFRED! =-")


@pytest.mark.parametrize("style", prompts.STYLES)
@pytest.mark.parametrize("action_format", prompts.ACTION_FORMATS)
@pytest.mark.parametrize("show_admissible", [True, False])
def test_prompts_are_those_of_the_configured_style(alfworld_data, style, action_format, show_admissible):
    family = AlfworldFamily(
        {
            "data_dir": alfworld_data,
            "prompt_style": style,
            "action_format": action_format,
            "show_admissible": show_admissible,
        }
    )
    task = family.tasks("valid_seen")[0]
    env = family.make(task)
    first = env.reset()
    assert family.opening(task, first) == prompts.opening(
        first.text,
        style=style,
        action_format=action_format,
        show_admissible=show_admissible,
        admissible=first.admissible,
    )
    seen = env.step("inventory")
    assert family.reply(seen) == prompts.reply(seen, style=style, show_admissible=show_admissible)
    answer = "<action>look</action>"
    assert family.parse_action(answer) == prompts.parse_action(answer, action_format=action_format)


@pytest.mark.parametrize(
    ("key", "known"),
    [("backend", "exact, textworld"), ("prompt_style", "full, compact"), ("action_format", "tagged, plain")],
)
def test_unknown_settings_are_refused_with_the_known_ones(key, known):
    with pytest.raises(ValueError, match=f"env.{key}='fancy' is unknown; use one of {known}"):
        make_family({"name": "alfworld", key: "fancy"})
