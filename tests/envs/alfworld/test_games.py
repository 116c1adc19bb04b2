"""Finding and loading games: the real counts, a fixed order, and every kind of bad data refused by name."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from verl.agentopsd.envs.alfworld.game import GameFileError, parse_game
from verl.agentopsd.envs.alfworld.games import (
    EXPECTED,
    TASK_TYPES,
    GamesNotFound,
    discover,
    load_game,
    validate_games,
)

REMEDY = "python scripts/get_alfworld_data.py"


@pytest.fixture
def three_games(alfworld_data, tmp_path) -> Path:
    """A data folder with three real valid_unseen games of different types, copied so that a test may spoil them."""
    picked = {task.task_type: task for task in discover(alfworld_data, "valid_unseen")}
    for task in list(picked.values())[:3]:
        shutil.copytree(Path(task.path).parent, tmp_path / "json_2.1.1" / task.game_id)
    return tmp_path


def edit(path: str, **changes) -> None:
    """Replaces fields of a game file; None removes one."""
    data = {**json.loads(Path(path).read_text()), **changes}
    Path(path).write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


@pytest.mark.parametrize(("split", "count"), [("train", 3553), ("valid_seen", 140), ("valid_unseen", 134)])
def test_the_real_splits_have_their_published_counts(alfworld_data, split, count):
    tasks = discover(alfworld_data, split)
    assert len(tasks) == count == EXPECTED[split]
    assert [task.game_id for task in tasks] == sorted({task.game_id for task in tasks})
    assert {task.task_type for task in tasks} == set(TASK_TYPES)
    for task in tasks[:20]:
        assert task.split == split and Path(task.path).is_file()
        assert Path(task.path).parent == alfworld_data / "json_2.1.1" / task.game_id


def test_valid_unseen_has_the_published_number_of_each_type(alfworld_data):
    # Shridhar et al. 2021, table 5 of the appendix: pick 24, examine 18, clean 31, heat 23, cool 21, pick two 17.
    counts = Counter(task.task_type for task in discover(alfworld_data, "valid_unseen"))
    assert [counts[kind] for kind in TASK_TYPES] == [24, 18, 31, 23, 21, 17]


def test_the_folder_above_and_the_data_folder_itself_both_do(alfworld_data):
    assert discover(alfworld_data / "json_2.1.1", "valid_seen") == discover(str(alfworld_data), "valid_seen")


def test_valid_seen_passes_full_validation(alfworld_data):
    assert validate_games(discover(alfworld_data, "valid_seen")) == []


def test_a_link_that_leaves_the_data_is_refused_and_one_within_it_is_not(three_games, tmp_path_factory):
    first, second, _ = discover(three_games, "valid_unseen", check_counts=False)
    trial, inside = Path(first.path).parent, Path(second.path).parent
    (inside.parent / "trial_linked").symlink_to(inside)
    assert len(discover(three_games, "valid_unseen", check_counts=False)) == 4
    outside = tmp_path_factory.mktemp("elsewhere") / "trial"
    trial.rename(outside)
    trial.symlink_to(outside)
    with pytest.raises(GameFileError, match="a link that leaves .*json_2.1.1: copy the game into the data"):
        discover(three_games, "valid_unseen", check_counts=False)


@pytest.mark.parametrize("name", ["game.tw-pddl", "traj_data.json", ""])
def test_a_linked_file_or_split_that_leaves_the_data_is_refused(three_games, tmp_path_factory, name):
    first, second, _ = discover(three_games, "valid_unseen", check_counts=False)
    linked = Path(first.path).parent / name if name else three_games / "json_2.1.1" / "valid_unseen"
    if name:  # within the data
        linked.rename(linked.with_name("own"))
        linked.symlink_to(Path(second.path).parent / name)
        assert len(discover(three_games, "valid_unseen", check_counts=False)) == 3
        linked.unlink()
        linked.with_name("own").rename(linked)
    outside = tmp_path_factory.mktemp("elsewhere") / "it"
    linked.rename(outside)
    linked.symlink_to(outside)
    with pytest.raises(GameFileError, match=f"{linked}: a link that leaves .*json_2.1.1: copy the game into the data"):
        discover(three_games, "valid_unseen", check_counts=False)


def test_a_game_is_parsed_once_and_again_when_its_file_changed(three_games):
    path = discover(three_games, "valid_unseen", check_counts=False)[0].path
    first = load_game(path)
    assert load_game(path) is first and load_game(Path(path).parent) is first
    edit(path, walkthrough=["look"])
    assert load_game(path).walkthrough == ("look",)


def test_a_missing_folder_is_one_sentence_with_the_remedy(tmp_path):
    with pytest.raises(GamesNotFound, match=f"nowhere.* is not a folder; get the games with `{REMEDY}`"):
        discover(tmp_path / "nowhere", "train")


def test_a_folder_without_games_is_refused(tmp_path):
    with pytest.raises(GamesNotFound, match=f"holds no ALFWorld games.*{REMEDY}"):
        discover(tmp_path, "train")


def test_an_empty_split_is_refused(three_games):
    (three_games / "json_2.1.1" / "train").mkdir()
    with pytest.raises(
        GamesNotFound, match=rf"'train' has no playable game .*splits there: train, valid_unseen.*{REMEDY}"
    ):
        discover(three_games, "train")


def test_an_unknown_split_is_refused(three_games):
    with pytest.raises(ValueError, match="'eval' is not one of train, valid_seen"):
        discover(three_games, "eval")


def test_a_wrong_count_names_split_found_expected_and_remedy(three_games):
    with pytest.raises(
        GamesNotFound, match=rf"'valid_unseen' has 3 games .*expected 134; .*{REMEDY}.*env.check_counts"
    ):
        discover(three_games, "valid_unseen")
    assert len(discover(three_games, "valid_unseen", check_counts=False)) == 3


def test_a_manifest_sets_the_expected_counts(three_games):
    manifest = three_games / "json_2.1.1" / "generated.json"
    manifest.write_text(json.dumps({"counts": {"valid_unseen": 3}}))
    assert len(discover(three_games, "valid_unseen")) == 3
    manifest.write_text(json.dumps({"counts": {"valid_unseen": 4}}))
    with pytest.raises(GamesNotFound, match="has 3 games .*expected 4"):
        discover(three_games, "valid_unseen")
    manifest.write_text("{")
    with pytest.raises(GameFileError, match="generated.json: a damaged manifest"):
        discover(three_games, "valid_unseen")


def test_games_alfworld_itself_leaves_out_are_left_out(three_games):
    root = three_games / "json_2.1.1"
    first, *_ = discover(three_games, "valid_unseen", check_counts=False)
    for name in (
        "pick_and_place_with_movable_recep-Apple-Bowl-Fridge-1",
        "pick_and_place_simple-AppleSliced-None-Fridge-1",
    ):
        shutil.copytree(Path(first.path).parent, root / "valid_unseen" / name / "trial_T1")
    (root / "valid_unseen" / "pick_and_place_simple-Mug-None-Desk-1" / "trial_without_game").mkdir(parents=True)
    edit(first.path, solvable=False)
    assert [task.game_id for task in discover(three_games, "valid_unseen", check_counts=False)] == [
        task.game_id for task in discover(three_games, "valid_unseen", check_counts=False) if task != first
    ]
    assert len(discover(three_games, "valid_unseen", check_counts=False)) == 2


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda file: file.write_text('{"pddl_domain": '), "not readable as JSON"),
        (lambda file: file.write_bytes(b"\xff\xfe\x00"), "not readable as JSON"),
        (lambda file: file.write_text("[1, 2]"), "not a game file"),
        (lambda file: file.write_text(""), "not readable as JSON"),
        (lambda file: edit(str(file), walkthrough=None, solvable=None), "lacks solvable, walkthrough"),
        (lambda file: edit(str(file), solvable=False), "marked as unsolvable"),
        (lambda file: edit(str(file), solvable=None), "lacks solvable"),
        (lambda file: edit(str(file), pddl_problem="(define (problem x))"), "PDDL problem is damaged"),
        (lambda file: edit(str(file), pddl_problem=7), "pddl_problem is no text"),
        (lambda file: edit(str(file), grammar=""), 'no "Your task is to: ..." sentence'),
        (
            lambda file: edit(str(file), pddl_domain="(define (domain other))"),
            "a PDDL domain that the exact engine does",
        ),
        (lambda file: file.unlink(), "cannot be read"),
    ],
)
def test_a_bad_game_file_is_refused_by_name(three_games, spoil, reason):
    task = discover(three_games, "valid_unseen", check_counts=False)[1]
    spoil(Path(task.path))
    with pytest.raises(GameFileError) as refusal:
        load_game(task.path)
    assert task.path in str(refusal.value) and reason in str(refusal.value)
    complaints = validate_games(discover(three_games, "valid_unseen", check_counts=False) + [task])
    assert complaints and all(task.path in complaint for complaint in complaints)


def test_the_old_wording_is_refused_with_the_remedy(three_games):
    path = discover(three_games, "valid_unseen", check_counts=False)[0].path
    grammar = json.loads(Path(path).read_text())["grammar"]
    old = grammar.replace('template :: "move {o} to {r}"', 'template :: "put {o} in/on {r}"')
    assert old != grammar
    edit(path, grammar=old)
    with pytest.raises(GameFileError, match='old "put X in/on Y" wording.*get_alfworld_data.py'):
        load_game(path)


def test_other_words_than_the_engine_speaks_are_refused(three_games):
    path = discover(three_games, "valid_unseen", check_counts=False)[0].path
    grammar = json.loads(Path(path).read_text())["grammar"]
    edit(path, grammar=grammar.replace("You arrive at", "You walk over to"))
    with pytest.raises(GameFileError, match="text grammar that the exact engine does not know.*env.backend=textworld"):
        load_game(path)


def test_a_trajectory_of_another_type_is_a_complaint(three_games):
    task = discover(three_games, "valid_unseen", check_counts=False)[0]
    (Path(task.path).parent / "traj_data.json").write_text(json.dumps({"task_type": "pick_nothing"}))
    (complaint,) = validate_games([task])
    assert task.path in complaint and "pick_nothing" in complaint


def test_a_folder_of_unknown_type_falls_back_to_its_trajectory(three_games):
    first, *_ = discover(three_games, "valid_unseen", check_counts=False)
    folder = Path(first.path).parent
    renamed = folder.parent.with_name("my_games-1")
    folder.parent.rename(renamed)
    by_id = {task.game_id: task for task in discover(three_games, "valid_unseen", check_counts=False)}
    assert by_id[f"valid_unseen/my_games-1/{folder.name}"].task_type == first.task_type
    (renamed / folder.name / "traj_data.json").write_text(json.dumps({"task_type": "pick_nothing"}))
    with pytest.raises(GameFileError, match="my_games-1.*unknown task type 'pick_nothing'"):
        discover(three_games, "valid_unseen", check_counts=False)


def test_names_count_down_along_the_sorted_ids_and_know_basins(alfworld_data):
    game = load_game(discover(alfworld_data, "valid_unseen")[-1].path)
    by_class: dict[str, list[int]] = {}
    for entity in sorted(game.names):
        name, number = game.names[entity].split(" ")
        by_class.setdefault(name, []).append(int(number))
    assert all(numbers == list(range(len(numbers), 0, -1)) for numbers in by_class.values())
    assert all(("basin" in entity) == name.split(" ")[0].endswith("basin") for entity, name in game.names.items())


def test_parse_game_reports_under_the_name_it_is_given():
    with pytest.raises(GameFileError, match="^my game: not a playable game file, it lacks pddl_domain"):
        parse_game({}, where="my game")
