"""A cache of which games a split has, so that a start does not read the end of every game file again.

The list is kept with the time stamps of every folder and file it was read from. It is used only while all of them are
unchanged: a game that was added, removed or replaced changes the stamp of its folder or file, and the split is read
anew. Nothing depends on the cache; a folder that cannot be written, or a damaged file, costs only time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

from verl.agentopsd.envs.base import Task

VERSION = 2


class Stamps(TypedDict):
    """Columns: path below the split, modification time in ns, size in bytes (-1 of a folder).

    Three long lists and not a short one per file: ten thousand of those keep Python's garbage collector busy for three
    times as long as the files take to be looked at.
    """

    path: list[str]
    time: list[int]
    size: list[int]


def cached(
    root: Path, split: str, files_of: Callable[[str], tuple[str, ...]], read: Callable[[], list[Task]]
) -> list[Task]:
    """The games of ``root/split``: from the cache while nothing has changed, else from ``read``, which refills it.

    Args:
        files_of: kind folder's name -> the files in its game folders that ``read`` looks at, the game file first.
    """
    file = index_file(root, split)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["version"] == VERSION and unchanged(root / split, stored["stamps"]):
            columns = zip(stored["games"], stored["types"], stored["paths"], strict=True)
            return [Task(game, split, task_type, path) for game, task_type, path in columns]
    stamps = stamps_of(root / split, files_of)  # before reading: a change in between leaves a stamp that is too old
    tasks = read()
    content = {
        "version": VERSION,
        "stamps": stamps,
        "games": [task.game_id for task in tasks],
        "types": [task.task_type for task in tasks],
        "paths": [task.path for task in tasks],
    }
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(content), encoding="utf-8")
        part.replace(file)
    return tasks


def index_file(root: Path, split: str) -> Path:
    """Where the cache of this split is: one file per folder of games, below ``$XDG_CACHE_HOME``."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(f"{root}\0{root.resolve()}\0{split}".encode()).hexdigest()[:16]
    return base / "verl-agentopsd" / "index" / f"{name}.json"


def stamps_of(folder: Path, files_of: Callable[[str], tuple[str, ...]]) -> Stamps:
    """The stamps of a split's folder, of the folders two levels below it and of the files that are read in them."""
    stamps = Stamps(path=[], time=[], size=[])

    def stamp(name: str) -> None:
        found = os.stat(os.path.join(folder, name))
        stamps["path"].append(name)
        stamps["time"].append(found.st_mtime_ns)
        stamps["size"].append(-1 if stat.S_ISDIR(found.st_mode) else found.st_size)

    stamp("")
    with os.scandir(folder) as kinds:
        for kind in kinds:
            if not kind.is_dir():
                continue
            stamp(kind.name)
            with os.scandir(kind.path) as trials:
                for trial in trials:
                    if not trial.is_dir():
                        continue
                    name = f"{kind.name}/{trial.name}"
                    stamp(name)
                    for file in files_of(kind.name):
                        with contextlib.suppress(FileNotFoundError):
                            stamp(f"{name}/{file}")
    return stamps


def unchanged(folder: Path, stamps: Stamps) -> bool:
    """Whether everything has the stamp it had; what was not there is noticed by the stamp of its folder."""
    base = f"{folder}/"
    for name, time, size in zip(stamps["path"], stamps["time"], stamps["size"], strict=True):
        try:
            found = os.stat(base + name)
        except OSError:
            return False
        if found.st_mtime_ns != time or (size >= 0 and found.st_size != size):
            return False
    return True
