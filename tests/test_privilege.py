"""What the teacher reads: skill, nothing, hindsight of a sibling, or a file of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from verl.agentopsd.config import ConfigError, TeacherConfig
from verl.agentopsd.envs.base import Task
from verl.agentopsd.episodes import Episode
from verl.agentopsd.privilege import FromFile, Hindsight, Nothing, Skill, privilege_of
from verl.agentopsd.skills.bank import SkillBank

BANK = SkillBank("test", "open", {"find": "look", "heat": "use the microwave"})


def episode(group: str, sample: int, actions: list[str], won: bool, env_error: str = "", kind: str = "find") -> Episode:
    turns = [{"command": action, "valid": not action.startswith("!")} for action in actions]
    facts = {"game_id": f"train/{group}", "task_type": kind, "turns": turns, "won": won, "env_error": env_error}
    zero = torch.zeros(1)
    return Episode(f"{group}_{sample}_0", zero, zero, zero.bool(), zero, zero, float(won), facts)


def task(game: str, kind: str) -> Task:
    return Task(game, "train", kind, "x")


def test_skill_by_task_type():
    assert Skill(BANK).texts([episode("g", 0, [], True, kind="heat")], []) == [BANK.text("heat")]


def test_hindsight_is_the_shortest_won_sibling_s_commands():
    group = [
        episode("a", 0, ["look", "take mug", "go to desk"], won=True),
        episode("a", 1, ["go to desk", "!nonsense"], won=True),
        episode("a", 2, ["look"], won=False),
        episode("a", 3, ["take mug"], won=True, env_error="lost"),
        episode("b", 0, ["look"], won=False),
        episode("c", 0, ["open safe"], won=True),
    ]
    header = "These commands have solved this very task:"
    found = Hindsight().texts(group, group)
    # an episode is never its own hindsight, an invalid command is not told, a lost episode is no success
    assert found[0] == found[2] == f"{header}\n1. go to desk"
    assert found[1] == f"{header}\n1. look\n2. take mug\n3. go to desk"
    assert found[4] is None and found[5] is None


def test_file_by_game_before_task_type(tmp_path: Path):
    path = tmp_path / "texts.yaml"
    path.write_text("train/one: 'the mug is in drawer 2'\nfind: look everywhere\n")
    texts = FromFile.load(str(path))
    assert texts.texts([episode("one", 0, [], True), episode("two", 0, [], True)], []) == [
        "the mug is in drawer 2",
        "look everywhere",
    ]
    texts.require([task("train/one", "heat"), task("train/two", "find")])
    with pytest.raises(ConfigError, match=r"no text for 1 of 2 training games \(the first: train/x\).*\(heat\)"):
        texts.require([task("train/one", "heat"), task("train/x", "heat")])
    with pytest.raises(ConfigError, match=r"neither for train/g nor for its task type heat"):
        texts.texts([episode("g", 0, [], True, kind="heat")], [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b"a: [", "is neither YAML nor JSON"),
        (b"- a", "must map game ids or task types to texts"),
        (b"{}", "must map game ids or task types to texts"),
        (b"find: ''", "1 entries have no text, the first is 'find'"),
        (b"find: 3", "1 entries have no text, the first is 'find'"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path: Path, content: bytes | None, message: str):
    path = tmp_path / "texts.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        FromFile.load(str(path))


def test_the_setting_chooses(tmp_path: Path):
    path = tmp_path / "texts.json"
    path.write_text('{"find": "look"}')
    assert isinstance(privilege_of(TeacherConfig(), BANK), Skill)
    assert isinstance(privilege_of(TeacherConfig(privilege="none"), BANK), Nothing)
    assert isinstance(privilege_of(TeacherConfig(privilege="hindsight"), BANK), Hindsight)
    assert isinstance(privilege_of(TeacherConfig(privilege="file", file=str(path)), BANK), FromFile)
    assert Nothing().texts([episode("g", 0, [], True)], []) == [None]
