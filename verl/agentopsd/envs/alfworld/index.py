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
from collections.abc import Callable
from pathlib import Path

from verl.agentopsd.envs.base import Task

VERSION = 1
Stamps = dict[str, list[int]]
"""Path below the split -> [modification time in ns, size] of a file, [modification time in ns] of a folder."""


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
            return [Task(game, split, kind, path) for game, kind, path in stored["games"]]
    stamps = stamps_of(root / split, files_of)  # before reading: a change in between leaves a stamp that is too old
    tasks = read()
    games = [[task.game_id, task.task_type, task.path] for task in tasks]
    content = {"version": VERSION, "stamps": stamps, "games": games}
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
    stamps: Stamps = {"": [os.stat(folder).st_mtime_ns]}
    with os.scandir(folder) as kinds:
        for kind in kinds:
            if not kind.is_dir():
                continue
            stamps[kind.name] = [os.stat(kind.path).st_mtime_ns]
            with os.scandir(kind.path) as trials:
                for trial in trials:
                    if not trial.is_dir():
                        continue
                    name = f"{kind.name}/{trial.name}"
                    stamps[name] = [os.stat(trial.path).st_mtime_ns]
                    for file in files_of(kind.name):
                        with contextlib.suppress(FileNotFoundError):
                            found = os.stat(os.path.join(trial.path, file))
                            stamps[f"{name}/{file}"] = [found.st_mtime_ns, found.st_size]
    return stamps


def unchanged(folder: Path, stamps: Stamps) -> bool:
    """Whether everything has the stamp it had; what was not there is noticed by the stamp of its folder."""
    base = str(folder)
    for name, stamp in stamps.items():
        try:
            found = os.stat(os.path.join(base, name))
        except OSError:
            return False
        if found.st_mtime_ns != stamp[0] or (len(stamp) > 1 and found.st_size != stamp[1]):
            return False
    return True
