"""The cached list of games equals the one read from disk, and is not used once anything has changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from verl.agentopsd.envs.alfworld import games
from verl.agentopsd.envs.alfworld.index import index_file


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number in range(3):
        add(tmp_path / "data", f"trial_{number}")
    return tmp_path / "data"


def add(data: Path, trial: str, solvable: bool = True, kind: str = "pick_and_place_simple-Mug-None-Desk-301") -> Path:
    folder = data / "json_2.1.1" / "train" / kind / trial
    folder.mkdir(parents=True)
    (folder / games.GAME_FILE).write_text(json.dumps({"x": 1, "solvable": solvable}))
    return folder / games.GAME_FILE


def found(data: Path) -> list[str]:
    return [task.game_id.rsplit("/", 1)[1] for task in games.discover(data, "train", check_counts=False)]


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files whose end is read from now on."""
    seen: list[str] = []
    original = games._has_solvable_game
    monkeypatch.setattr(games, "_has_solvable_game", lambda file: seen.append(file) or original(file))
    return seen


def test_the_second_time_no_game_file_is_opened_and_the_list_is_the_same(data, monkeypatch):
    first = games.discover(data, "train", check_counts=False)
    seen = reads(monkeypatch)
    assert games.discover(data, "train", check_counts=False) == first and len(first) == 3
    assert seen == []


def test_a_new_game_a_lost_one_and_a_changed_one_are_noticed(data):
    assert found(data) == ["trial_0", "trial_1", "trial_2"]
    file = add(data, "trial_3")
    assert found(data) == ["trial_0", "trial_1", "trial_2", "trial_3"]
    file.write_text(json.dumps({"x": 1, "solvable": False}))
    assert found(data) == ["trial_0", "trial_1", "trial_2"]
    file.unlink()
    file.parent.rmdir()
    add(data, "trial_9", kind="look_at_obj_in_light-Mug-None-DeskLamp-301")
    assert found(data) == ["trial_9", "trial_0", "trial_1", "trial_2"]


def test_a_game_file_that_appears_in_an_old_folder_is_noticed(data):
    file = add(data, "trial_3")
    text = file.read_text()
    file.unlink()
    assert found(data) == ["trial_0", "trial_1", "trial_2"]
    file.write_text(text)
    assert found(data) == ["trial_0", "trial_1", "trial_2", "trial_3"]


def test_a_file_of_equal_size_with_another_time_is_read_again(data, monkeypatch):
    found(data)
    file = next(data.rglob(games.GAME_FILE))
    stamp = os.stat(file).st_mtime_ns + 1
    os.utime(file, ns=(stamp, stamp))
    seen = reads(monkeypatch)
    found(data)
    assert len(seen) == 3


@pytest.mark.parametrize("content", ["", "{", '{"version": 0}', '{"version": 2}', "[]"])
def test_a_damaged_cache_is_read_around_and_replaced(data, monkeypatch, content):
    expected = found(data)
    file = index_file(data / "json_2.1.1", "train")
    file.write_text(content)
    assert found(data) == expected
    seen = reads(monkeypatch)
    assert found(data) == expected and seen == []


def test_columns_of_unequal_length_are_a_damaged_cache(data):
    expected = found(data)
    file = index_file(data / "json_2.1.1", "train")
    for column in ("games", "types", "paths"):
        content = json.loads(file.read_text())
        content[column].pop()
        file.write_text(json.dumps(content))
        assert found(data) == expected
    for column in ("path", "time", "size"):
        content = json.loads(file.read_text())
        content["stamps"][column].pop()
        file.write_text(json.dumps(content))
        assert found(data) == expected


def test_a_cache_folder_that_cannot_be_made_costs_nothing_but_time(data, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert found(data) == found(data) == ["trial_0", "trial_1", "trial_2"]


def test_data_sets_do_not_share_a_cache(data, tmp_path):
    add(tmp_path / "other", "trial_7")
    assert found(data) == ["trial_0", "trial_1", "trial_2"]
    assert found(tmp_path / "other") == ["trial_7"]
