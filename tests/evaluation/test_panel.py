"""A panel is the same games for everybody, and its hash says so."""

import json

import pytest

from verl.agentopsd.envs.base import Task
from verl.agentopsd.evaluation.panel import Panel, PanelError, build_panel, panel_hash

KINDS = ("heat", "cool", "clean")


@pytest.fixture
def games(tmp_path):
    """Ten games per split on disk, and a ``tasks_of`` over them."""
    tasks: dict[str, list[Task]] = {}
    for split in ("train", "valid_seen", "valid_unseen"):
        for i in range(10):
            kind = KINDS[0] if i < 6 else KINDS[1 + i % 2]
            file = tmp_path / split / f"{kind}-{i}" / "trial" / "game.tw-pddl"
            file.parent.mkdir(parents=True)
            file.write_text(json.dumps({"split": split, "number": i}))
            tasks.setdefault(split, []).append(Task(f"{split}/{kind}-{i}/trial", split, kind, str(file)))
    return tasks.__getitem__


def test_all_is_both_validation_splits_sorted_by_id(games) -> None:
    panel = build_panel("all", games)
    assert panel.name == "all" and panel.counts == {"valid_seen": 10, "valid_unseen": 10}
    ids = [task.game_id for task in panel.tasks]
    assert ids == sorted(ids) and len(set(ids)) == len(panel) == 20


def test_the_hash_does_not_depend_on_order_layout_or_place(games, tmp_path) -> None:
    panel = build_panel("valid_seen", games)
    assert panel_hash(reversed(panel.tasks)) == panel.hash
    moved = []
    for task in panel.tasks:
        folder = tmp_path / "elsewhere" / task.game_id
        folder.mkdir(parents=True)
        content = json.loads(open(task.path).read())
        (folder / "game.tw-pddl").write_text(json.dumps(dict(reversed(content.items())), indent=3))
        moved.append(Task(task.game_id, task.split, task.task_type, str(folder)))
    assert panel_hash(moved) == panel.hash


def test_the_hash_changes_with_a_game_and_with_its_content(games) -> None:
    panel = build_panel("valid_seen", games)
    assert panel_hash(panel.tasks[1:]) != panel.hash
    with open(panel.tasks[3].path, "w") as file:
        json.dump({"split": "valid_seen", "number": 99}, file)
    assert build_panel("valid_seen", games).hash != panel.hash


def test_a_limit_takes_task_types_in_turn_from_each_split(games) -> None:
    panel = build_panel("all", games, limit_per_split=4)
    assert panel.name == "all-4" and panel.counts == {"valid_seen": 4, "valid_unseen": 4}
    kinds = [task.task_type for task in panel.tasks if task.split == "valid_seen"]
    assert sorted(kinds) == ["clean", "cool", "heat", "heat"] or sorted(kinds) == ["clean", "clean", "cool", "heat"]
    assert build_panel("all", games, limit_per_split=4) == panel
    assert len(build_panel("all", games, limit_per_split=500)) == 20


def test_a_file_of_ids(games, tmp_path) -> None:
    ids = [games("valid_seen")[2].game_id, games("train")[0].game_id]
    file = tmp_path / "hard.txt"
    file.write_text("# the hard ones\n\n" + "\n".join(ids) + "\n")
    panel = build_panel(str(file), games)
    assert panel.name == "hard" and [task.game_id for task in panel.tasks] == sorted(ids)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["valid_seen/heat-0/trial", "valid_seen/heat-0/trial"], "more than once"),
        (["valid_seen/heat-0/trial", "valid_seen/no/game"], "1 games of .* do not exist .*'valid_seen/no/game'"),
        ([], "has no games"),
    ],
)
def test_a_wrong_file_of_ids_is_refused(games, tmp_path, lines, message) -> None:
    file = tmp_path / "ids.txt"
    file.write_text("\n".join(lines))
    with pytest.raises(PanelError, match=message):
        build_panel(str(file), games)


def test_an_incomplete_split_is_refused_with_both_counts(games) -> None:
    with pytest.raises(PanelError, match="'valid_seen' has 10 games, the complete split has 140"):
        build_panel("all", games, expected={"valid_seen": 140})
    assert isinstance(build_panel("all", games, expected={"valid_seen": 10}), Panel)


def test_a_missing_game_file_and_an_impossible_limit_are_refused(games, tmp_path) -> None:
    with pytest.raises(PanelError, match="at least 1, got 0"):
        build_panel("all", games, limit_per_split=0)
    (tmp_path / "valid_seen" / "heat-0" / "trial" / "game.tw-pddl").unlink()
    with pytest.raises(PanelError, match="heat-0/trial/game.tw-pddl is missing"):
        build_panel("valid_seen", games)


def test_a_game_listed_twice_is_refused(games) -> None:
    with pytest.raises(PanelError, match="more than once"):
        build_panel("valid_seen", lambda split: games(split) + games(split)[:1])
