"""Checkpoints that a kill at any moment leaves usable: written under another name, renamed when complete, named last.

``checkpoints/latest_checkpointed_iteration.txt`` names the checkpoint that a resume starts from. It moves only when the
update's metrics and episode records are on disk as well, so that a resumed run misses none of them; older checkpoints
are removed after that. What the learner's own checkpoint (verl's) does not hold is in ``run_state.pt`` beside it.
"""

from __future__ import annotations

import errno
import os
import random
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

POINTER = "latest_checkpointed_iteration.txt"
STATE_FILE = "run_state.pt"
_STAGING = ".saving"
_REMOVING = ".removing"


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written or read; the message says what is still intact."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"global_step_{step}"


def saved_steps(folder: Path) -> list[int]:
    """The updates whose checkpoints lie in ``folder``; a copy under another name is none."""
    names = [path.name for path in folder.glob("global_step_*") if path.is_dir()]
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"global_step_(\d+)", name)))


def latest_step(folder: Path) -> int | None:
    """The update that a resume continues after, None without a checkpoint.

    Raises:
        CheckpointFailed: the pointer is damaged, or what it names is not there: never a silent start from nothing.
    """
    pointer = folder / POINTER
    if not pointer.is_file():
        return None
    text = pointer.read_text(encoding="utf-8", errors="replace").strip()
    there = saved_steps(folder)
    if text.isdecimal() and int(text) in there:
        return int(text)
    remedy = (
        f"write one of {there} into the file to continue from it" if there else "remove the file to start from nothing"
    )
    raise CheckpointFailed(f"{pointer} says {text!r}, which is no checkpoint in {folder}: {remedy}")


def run_state(checkpoint: Path) -> dict[str, Any] | None:
    """``run_state.pt`` of a checkpoint's folder; None where there is none."""
    file = checkpoint / STATE_FILE
    return torch.load(file, weights_only=True) if file.is_file() else None


@dataclass
class Checkpoints:
    """The folder ``checkpoints`` of one run.

    Args:
        folder: made when needed.
        keep: how many to keep, None for all (``trainer.max_actor_ckpt_to_keep``).

    Attributes:
        pending: the update whose checkpoint is complete but not yet named by the pointer.
    """

    folder: Path
    keep: int | None = None
    pending: int | None = None

    def save(self, step: int, write: Callable[[Path], None], state: Mapping[str, Any]) -> None:
        """Writes the checkpoint of ``step`` so that it is there whole or not at all.

        Args:
            write: makes ``global_step_<step>`` in the folder that it is given.
            state: goes into ``run_state.pt``; plain data and tensors.

        Raises:
            CheckpointFailed: no space; earlier checkpoints are untouched.
        """
        staging, final = self.folder / _STAGING, step_folder(self.folder, step)
        self._require_space(step)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            write(staging)
            complete = step_folder(staging, step)
            torch.save(dict(state), complete / STATE_FILE)
            _require_all_shards(complete)
            _sync_tree(complete)
        except Exception as error:
            full, message = out_of_space(error, self.folder), self._no_space(step)  # before the half-written one goes
            shutil.rmtree(staging, ignore_errors=True)
            if full:
                raise CheckpointFailed(message) from error
            raise
        if final.exists():  # left by a run that ended before it was named, or of a run that went on from an earlier one
            _remove(final)
        complete.rename(final)
        sync_folder(self.folder)
        shutil.rmtree(staging, ignore_errors=True)
        self.pending = step

    def commit(self, step: int) -> None:
        """Names the checkpoint of ``step``, if there is a new one, and removes those beyond ``keep``."""
        if self.pending != step:
            return
        write_atomically(self.folder / POINTER, str(step))
        self.pending = None
        if self.keep is None or self.keep < 1:
            return
        for old in [saved for saved in saved_steps(self.folder) if saved <= step][: -self.keep]:
            _remove(step_folder(self.folder, old))

    def _require_space(self, step: int) -> None:
        sizes = [_size(path) for path in self.folder.glob("global_step_*")]
        if sizes and shutil.disk_usage(self.folder).free < max(sizes):
            raise CheckpointFailed(self._no_space(step))

    def _no_space(self, step: int) -> str:
        free = shutil.disk_usage(self.folder).free / 2**20
        sizes = [_size(path) for path in self.folder.glob("global_step_*")]
        needed = f", the last one took {max(sizes) / 2**20:.0f} MiB" if sizes else ""
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit != resource.RLIM_INFINITY:
            needed += f", and no file may be larger than {limit / 2**20:.1f} MiB: see ulimit -f"
        try:
            before = latest_step(self.folder)
        except CheckpointFailed:
            before = None
        kept = "There is none before it" if before is None else f"The checkpoint of update {before} is intact"
        return (
            f"no space left for the checkpoint of update {step} in {self.folder} ({free:.0f} MiB free{needed}). "
            f"{kept}: free some space, or lower trainer.max_actor_ckpt_to_keep, and give the same run_dir to continue"
        )


def random_state() -> dict[str, Any]:
    """The states of this process's random generators, as plain data and tensors."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), int(position), has_gauss, gauss],
        "torch": torch.get_rng_state(),
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Continues the generators from :func:`random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])


def write_atomically(path: Path, text: str) -> None:
    """The file has the old text or the new one, whatever happens."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def out_of_space(error: BaseException | None, folder: Path | None = None) -> bool:
    """Whether an error, or one that it came from, says that a disk is full; also across Ray's process boundary.

    Args:
        folder: where was written. ``torch.save`` only says that a write failed; its word is taken for a full disk if
            that disk is full, or if the size of files is limited.
    """
    while error is not None:
        text = str(error)
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        if any(sign in text for sign in _NO_SPACE):
            return True
        if folder is not None and _TORCH_WRITE_FAILED.search(text) and _nothing_fits(folder):
            return True
        error = error.__cause__ or error.__context__
    return False


_NO_SPACE = ("No space left on device", "Disk quota exceeded", "File too large")
_TORCH_WRITE_FAILED = re.compile(r"PytorchStreamWriter failed|file write failed|unexpected pos \d+ vs \d+")
_FULL = 16 * 2**20
"""Bytes: with less than this left, a write that failed has failed for want of space."""


def _nothing_fits(folder: Path) -> bool:
    limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    return limited or shutil.disk_usage(folder).free < _FULL


def _require_all_shards(folder: Path) -> None:
    """Every rank's shard must be where the driver can rename it."""
    for first in folder.glob("*/model_world_size_*_rank_0.pt"):
        ranks = int(first.name.split("_")[3])
        names = [f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
        if missing := [name for name in names if not (first.parent / name).is_file()]:
            raise CheckpointFailed(
                f"{len(missing)} of {ranks} shards are not in {first.parent} as this node sees it, the first is "
                f"{missing[0]}: run_dir must be on a file system that all nodes share"
            )


def _remove(path: Path) -> None:
    """Renames before deleting, so that half a checkpoint never has a checkpoint's name."""
    target = path.with_name(f"{_REMOVING}-{path.name}")
    shutil.rmtree(target, ignore_errors=True)
    path.rename(target)
    shutil.rmtree(target, ignore_errors=True)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in _files(folder))


def _sync_tree(folder: Path) -> None:
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        sync_folder(path)


def sync_folder(folder: Path) -> None:
    """The names of the files in ``folder`` are on disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
