"""Finding ALFWorld's games on disk and loading them with checks.

Layout, as ``alfworld-download`` leaves it and ``generate.py`` writes it::

    DATA_DIR/json_2.1.1/<split>/<task type>-<object>-<...>-<receptacle>-<scene>/<trial>/game.tw-pddl
                                                                                       /traj_data.json

Discovery reads folder names and the last bytes of each file only, and keeps what it found (``index.py``); a game is
decoded and checked when it is first played (:func:`load_game`) or all at once on demand (:func:`validate_games`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from verl.agentopsd.envs.alfworld.game import Game, GameFileError, parse_game
from verl.agentopsd.envs.alfworld.index import cached
from verl.agentopsd.envs.base import Task

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
EXPECTED: Mapping[str, int] = {"train": 3553, "valid_seen": 140, "valid_unseen": 134, "valid_train": 200}
"""Playable games per split of json_2.1.1."""

GAME_FILE = "game.tw-pddl"
TRAJECTORY_FILE = "traj_data.json"
MANIFEST_FILE = "generated.json"
GET_DATA = "python scripts/get_alfworld_data.py"

_UNPLAYABLE_MARKS = ("movable", "Sliced")
_TAIL_BYTES = 4096


class GamesNotFound(FileNotFoundError):
    """No games where they were looked for, or not as many as there should be. The message holds the remedy."""


def games_root(data_dir: str | os.PathLike[str]) -> Path:
    """The ``json_2.1.1`` folder of ``data_dir``, which may also be that folder itself.

    Raises:
        GamesNotFound: ``data_dir`` does not exist or holds no split.
    """
    base = Path(data_dir).expanduser()
    if not base.is_dir():
        raise GamesNotFound(f"env.data_dir={str(data_dir)!r} is not a folder; get the games with `{GET_DATA}`")
    for root in (base / "json_2.1.1", base):
        if any((root / split).is_dir() for split in EXPECTED):
            return root
    raise GamesNotFound(
        f"env.data_dir={str(data_dir)!r} holds no ALFWorld games (no json_2.1.1/train and so on); "
        f"get them with `{GET_DATA}`"
    )


def expected_counts(root: Path) -> Mapping[str, int]:
    """How many games each split must have: the manifest's for a generated set, else those of json_2.1.1."""
    manifest = root / MANIFEST_FILE
    if not manifest.is_file():
        return EXPECTED
    try:
        return {split: int(count) for split, count in json.loads(manifest.read_text())["counts"].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise GameFileError(f"{manifest}: a damaged manifest ({error!r}); generate the set again") from error


def discover(data_dir: str | os.PathLike[str], split: str, *, check_counts: bool = True) -> list[Task]:
    """All playable games of a split, sorted by ``game_id``.

    Args:
        data_dir: the folder with ``json_2.1.1`` in it, or that folder.
        split: ``train``, ``valid_seen``, ``valid_unseen`` or ``valid_train``.
        check_counts: insist on the known number of games; False allows a part of the data.

    Raises:
        ValueError: no such split.
        GamesNotFound: the split is missing, empty or incomplete.
    """
    if split not in EXPECTED:
        raise ValueError(f"split {split!r} is not one of {', '.join(EXPECTED)}")
    root = games_root(data_dir)
    expected = expected_counts(root)
    if (root / split).is_symlink():
        _require_inside(root, root / split)
    tasks = cached(root, split, _files_of, lambda: _read_split(root, split)) if (root / split).is_dir() else []
    if not tasks:
        raise GamesNotFound(
            f"split {split!r} has no playable game below {root} (splits there: {', '.join(_splits_in(root))}); "
            f"get the games with `{GET_DATA}`"
        )
    if check_counts and len(tasks) != expected.get(split):
        raise GamesNotFound(
            f"split {split!r} has {len(tasks)} games below {root}, expected {expected.get(split, 0)}; "
            f"complete the data with `{GET_DATA}`, or set env.check_counts=false to use what is there"
        )
    return tasks


def load_game(path: str | os.PathLike[str]) -> Game:
    """The game in ``path`` (a ``game.tw-pddl`` or its folder), from a cache of the last few hundred.

    Raises:
        GameFileError: the file is missing, not JSON, or refused by :func:`~.game.parse_game`; the message names it.
    """
    file = Path(path)
    if file.name != GAME_FILE:
        file = file / GAME_FILE
    try:
        stat = file.stat()
    except OSError as error:
        raise GameFileError(f"{file}: cannot be read ({error.strerror})") from error
    return _load_cached(str(file), stat.st_mtime_ns, stat.st_size)


def validate_games(tasks: Iterable[Task]) -> list[str]:
    """Decodes every game in full; returns one sentence per bad one (empty: all are well).

    Beyond what :func:`load_game` checks, the task type in ``traj_data.json`` must be the folder's.
    """
    complaints = []
    for task in tasks:
        try:
            _parse_file(task.path)
            recorded = trajectory_task_type(Path(task.path).parent)
            if recorded != task.task_type:
                raise GameFileError(f"{task.path}: the folder says {task.task_type}, {TRAJECTORY_FILE} says {recorded}")
        except GameFileError as error:
            complaints.append(str(error))
    return complaints


def trajectory_task_type(folder: Path) -> str:
    """The task type that ``traj_data.json`` in ``folder`` records."""
    file = folder / TRAJECTORY_FILE
    try:
        return str(json.loads(file.read_text())["task_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise GameFileError(f"{file}: cannot be read as a trajectory ({error!r})") from error


def task_of(root: Path, folder: Path) -> Task:
    """The :class:`Task` of the game in ``folder``, a folder two levels below a split of ``root``."""
    game_id = folder.relative_to(root).as_posix()
    split, kind_folder, *_ = game_id.split("/")
    task_type = kind_folder.partition("-")[0]
    if task_type not in TASK_TYPES:
        task_type = trajectory_task_type(folder)
        if task_type not in TASK_TYPES:
            raise GameFileError(f"{folder}: unknown task type {task_type!r}")
    return Task(game_id=game_id, split=split, task_type=task_type, path=str(folder / GAME_FILE))


def _splits_in(root: Path) -> list[str]:
    return [split for split in EXPECTED if (root / split).is_dir()]


def _files_of(kind_folder: str) -> tuple[str, ...]:
    """The files of a game that discovery reads."""
    named = kind_folder.partition("-")[0] in TASK_TYPES
    return (GAME_FILE,) if named else (GAME_FILE, TRAJECTORY_FILE)


def _read_split(root: Path, split: str) -> list[Task]:
    return sorted(_playable(root, split), key=lambda task: task.game_id)


def _playable(root: Path, split: str) -> Iterator[Task]:
    """Games that ALFWorld would play: not those without a game file, with movable receptacles, or unsolvable."""
    with os.scandir(root / split) as kinds:
        for kind in kinds:
            if not kind.is_dir() or any(mark in kind.name for mark in _UNPLAYABLE_MARKS):
                continue
            with os.scandir(kind.path) as trials:
                for trial in trials:
                    if kind.is_symlink() or trial.is_symlink():
                        _require_inside(root, Path(trial.path))
                    for file in (GAME_FILE, TRAJECTORY_FILE):
                        if os.path.islink(os.path.join(trial.path, file)):
                            _require_inside(root, Path(trial.path, file))
                    if trial.is_dir() and _has_solvable_game(os.path.join(trial.path, GAME_FILE)):
                        yield task_of(root, Path(trial.path))


def _require_inside(root: Path, path: Path) -> None:
    """A link in the data must not make the run read files from elsewhere."""
    if not path.resolve().is_relative_to(root.resolve()):
        raise GameFileError(f"{path}: a link that leaves {root}: copy the game into the data, or remove the link")


def _has_solvable_game(file: str) -> bool:
    """The file exists and does not end in ``"solvable": false``; a damaged one passes, to be refused when loaded."""
    try:
        with open(file, "rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - _TAIL_BYTES))
            return b'"solvable": false' not in handle.read()
    except FileNotFoundError:
        return False


def _parse_file(file: str) -> Game:
    try:
        with open(file, encoding="utf-8") as handle:
            data = json.load(handle)
    except (OSError, ValueError, RecursionError) as error:
        raise GameFileError(f"{file}: not readable as JSON ({error}); fetch it again with `{GET_DATA}`") from error
    if not isinstance(data, dict):
        raise GameFileError(f"{file}: not a game file (a JSON {type(data).__name__}, not an object)")
    return parse_game(data, where=file)


@lru_cache(maxsize=512)
def _load_cached(file: str, _mtime_ns: int, _size: int) -> Game:
    return _parse_file(file)
