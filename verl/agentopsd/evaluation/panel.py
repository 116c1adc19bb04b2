"""A panel: the fixed games a model is judged on, with a name and a hash over what the games are."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl.agentopsd.envs.base import Task

SPLITS: Mapping[str, tuple[str, ...]] = {
    "valid_seen": ("valid_seen",),
    "valid_unseen": ("valid_unseen",),
    "all": ("valid_seen", "valid_unseen"),
}


class PanelError(ValueError):
    """A panel that cannot be built as asked: unknown name, missing games, wrong counts."""


@dataclass(frozen=True)
class Panel:
    """Games in the order of their ids; ``hash`` covers ids and contents, so equal hashes mean equal games."""

    name: str
    hash: str
    tasks: tuple[Task, ...]

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def counts(self) -> dict[str, int]:
        """Games per split."""
        return dict(Counter(task.split for task in self.tasks))


def build_panel(
    spec: str,
    tasks_of: Callable[[str], Sequence[Task]],
    *,
    limit_per_split: int | None = None,
    expected: Mapping[str, int] | None = None,
) -> Panel:
    """The panel that ``spec`` names.

    Args:
        spec: ``valid_seen``, ``valid_unseen``, ``all`` (both), another split such as ``train``, or a file with one game
            id per line.
        tasks_of: all games of a split, for instance ``EnvFamily.tasks``.
        limit_per_split: take this many games of each split, spread evenly over the task types.
        expected: games that each split must have, where ``tasks_of`` does not check that itself.

    Raises:
        PanelError: a split has the wrong number of games, a game of the file does not exist, or nothing is left.
    """
    if limit_per_split is not None and limit_per_split < 1:
        raise PanelError(f"limit per split must be at least 1, got {limit_per_split}")
    if Path(spec).is_file():
        name, tasks = Path(spec).stem, _from_file(Path(spec), tasks_of, expected)
    else:
        name, tasks = spec, []
        for split in SPLITS.get(spec, (spec,)):
            tasks += _split(split, tasks_of, expected)
    if limit_per_split is not None:
        name = f"{name}-{limit_per_split}"
        by_split: dict[str, list[Task]] = {}
        for task in tasks:
            by_split.setdefault(task.split, []).append(task)
        tasks = [task for games in by_split.values() for task in spread(games, limit_per_split)]
    if not tasks:
        raise PanelError(f"panel {spec!r} has no games")
    tasks = sorted(tasks, key=lambda task: task.game_id)
    return Panel(name, panel_hash(tasks), tuple(tasks))


def panel_hash(tasks: Iterable[Task]) -> str:
    """16 hex digits over the sorted game ids and what the games contain.

    A game file's JSON is hashed in canonical form, so that white space and the order of keys do not matter.
    """
    digest = hashlib.sha256()
    for task in sorted(tasks, key=lambda task: task.game_id):
        digest.update(task.game_id.encode() + b"\0" + _content(Path(task.path)) + b"\0")
    return digest.hexdigest()[:16]


def _content(path: Path) -> bytes:
    file = path / "game.tw-pddl" if path.is_dir() else path
    if not file.is_file():
        raise PanelError(f"game file {file} is missing: get the games again, or generate them")
    raw = file.read_bytes()
    try:
        raw = json.dumps(json.loads(raw), sort_keys=True, separators=(",", ":")).encode()
    except ValueError:
        pass
    return hashlib.sha256(raw).digest()


def _split(split: str, tasks_of: Callable[[str], Sequence[Task]], expected: Mapping[str, int] | None) -> list[Task]:
    tasks = list(tasks_of(split))
    twice = [game for game, n in Counter(task.game_id for task in tasks).items() if n > 1]
    if twice:
        raise PanelError(f"split {split!r} holds {twice[0]} more than once")
    if expected is not None and split in expected and len(tasks) != expected[split]:
        raise PanelError(
            f"split {split!r} has {len(tasks)} games, the complete split has {expected[split]}: results would not be "
            "comparable; get the whole data set, or ask for a limit per split or a file of game ids"
        )
    return tasks


def _from_file(path: Path, tasks_of: Callable[[str], Sequence[Task]], expected: Mapping[str, int] | None) -> list[Task]:
    ids = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    ids = [line for line in ids if line and not line.startswith("#")]
    if twice := [game for game, n in Counter(ids).items() if n > 1]:
        raise PanelError(f"{path} names {twice[0]} more than once")
    known: dict[str, Task] = {}
    for split in dict.fromkeys(game.split("/", 1)[0] for game in ids):
        known |= {task.game_id: task for task in _split(split, tasks_of, None)}
    if missing := [game for game in ids if game not in known]:
        raise PanelError(f"{len(missing)} games of {path} do not exist in the data, the first is {missing[0]!r}")
    return [known[game] for game in ids]


def spread(tasks: Sequence[Task], limit: int) -> list[Task]:
    """The first ``limit`` games when task types take turns, each in the order of its game ids."""
    queues: dict[str, list[Task]] = {}
    for task in sorted(tasks, key=lambda task: task.game_id):
        queues.setdefault(task.task_type, []).append(task)
    rounds = [(place, kind, task) for kind, games in queues.items() for place, task in enumerate(games)]
    rounds.sort(key=lambda item: item[:2])
    return [task for _, _, task in rounds[:limit]]
