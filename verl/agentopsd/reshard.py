"""A checkpoint of the training engine for another number of ranks, so that a run can go on with more or fewer GPUs.

verl writes one file per rank and kind (``model_world_size_W_rank_r.pt``, ``optim_…``, ``extra_state_…``) and loads only
those of its own number of ranks. Every FSDP2 tensor is cut along one dimension into equal parts, the last ones shorter
or empty; here the parts are cut anew, without a rounding. What every rank has alike (step counts, learning rates, the
scheduler) is copied; the generators, of which each rank has its own, go round. The parts of one new rank are in memory
at a time, those of the old ones stay on disk.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

KINDS = ("model", "optim", "extra_state")


class CannotReshard(ValueError):
    """The shards are of a kind whose parts cannot be cut anew."""


@contextlib.contextmanager
def resharded(checkpoint: Path, ranks: int, scratch: Path) -> Iterator[Path]:
    """A folder ``global_step_N`` that ``ranks`` ranks can load: ``checkpoint`` itself, or one made for the occasion.

    The latter holds the new shards and links to everything else, lies in ``scratch`` and is gone afterwards;
    ``checkpoint`` stays as it is.

    Raises:
        CannotReshard: not shards of FSDP2 over one dimension of ranks (``backend=fsdp``, replicas).
    """
    if saved_ranks(checkpoint / "actor") in (None, ranks):
        yield checkpoint
        return
    shutil.rmtree(scratch, ignore_errors=True)
    folder = scratch / checkpoint.name
    folder.mkdir(parents=True)
    try:
        for path in checkpoint.iterdir():
            if path.name != "actor":
                (folder / path.name).symlink_to(path.absolute())
        reshard(checkpoint / "actor", folder / "actor", ranks)
        yield folder
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def saved_ranks(actor: Path) -> int | None:
    """How many ranks wrote the shards in ``actor``; None where there are none (Megatron's are of another kind)."""
    found = [re.fullmatch(r"model_world_size_(\d+)_rank_0\.pt", path.name) for path in actor.glob("model_world_size_*")]
    return next((int(match[1]) for match in found if match), None)


def check_reshardable(actor: Path) -> None:
    """Says early, from one small file, what :func:`reshard` would find out.

    Raises:
        CannotReshard: written by FSDP1.
    """
    file = actor / "fsdp_config.json"
    version = json.loads(file.read_text(encoding="utf-8")).get("FSDP_version") if file.is_file() else None
    if version != 2:
        raise CannotReshard("only shards of FSDP2 can be cut anew (backend=fsdp2), and these are of another kind")


def reshard(actor: Path, target: Path, ranks: int) -> None:
    """Writes to ``target`` the files of ``ranks`` ranks, made from those in ``actor``."""
    check_reshardable(actor)
    # that meshes are read before there are process groups is intended: there will be none in this process
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    target.mkdir()
    before = saved_ranks(actor)
    assert before is not None
    for kind in KINDS:
        if not _file(actor, kind, before, 0).is_file():
            continue
        old = [_load(_file(actor, kind, before, rank)) for rank in range(before)]
        for rank in range(ranks):
            parts = old[rank % before :] if kind == "extra_state" else old
            torch.save(_cut(parts, rank, ranks), _file(target, kind, ranks, rank))


def _file(folder: Path, kind: str, ranks: int, rank: int) -> Path:
    return folder / f"{kind}_world_size_{ranks}_rank_{rank}.pt"


def _load(file: Path) -> Any:
    import torch.distributed.tensor  # makes its classes known to torch.load

    # what the file asks for was looked at before (run_guard), or it is trusted
    return torch.load(file, map_location="cpu", weights_only=False, mmap=True)


def _cut(values: Sequence[Any], rank: int, ranks: int) -> Any:
    """What ``rank`` of ``ranks`` has of a value, or of a tree of values, of which every old rank has its own."""
    from torch.distributed.tensor import DTensor

    first = values[0]
    if isinstance(first, dict):
        return type(first)((key, _cut([value[key] for value in values], rank, ranks)) for key in first)
    if isinstance(first, list | tuple):
        return type(first)(_cut(parts, rank, ranks) for parts in zip(*values, strict=True))
    if isinstance(first, DTensor):
        return _cut_tensor(values, rank, ranks)
    return first.clone() if isinstance(first, torch.Tensor) else first


def _cut_tensor(values: Sequence[Any], rank: int, ranks: int) -> Any:
    from torch.distributed.tensor import DeviceMesh, DTensor

    first = values[0]
    mesh, placement = first.device_mesh, first.placements[0]
    if mesh.ndim != 1:
        raise CannotReshard(
            f"their ranks form a mesh of {mesh.ndim} dimensions {tuple(mesh.shape)}: replicas of shards"
        )
    parts = [value.to_local() for value in values]
    local = parts[0].clone() if placement.is_replicate() else _part(parts, placement.dim, rank, ranks)
    names = mesh.mesh_dim_names
    new = DeviceMesh(mesh.device_type, torch.arange(ranks), mesh_dim_names=names, _init_backend=False, _rank=rank)
    made = DTensor.from_local(local, new, [placement], run_check=False, shape=first.shape, stride=first.stride())
    return made.requires_grad_(first.requires_grad)


def _part(parts: Sequence[torch.Tensor], dim: int, rank: int, ranks: int) -> torch.Tensor:
    """The rank's part of what ``parts`` are together along ``dim``: ``torch.chunk``'s, empty behind its last."""
    total = sum(part.shape[dim] for part in parts)
    size = -(-total // ranks)
    begin, end = min(rank * size, total), min((rank + 1) * size, total)
    pieces, offset = [], 0
    for part in parts:
        first, last = max(begin - offset, 0), min(end - offset, part.shape[dim])
        if first < last:
            pieces.append(part.narrow(dim, first, last - first))
        offset += part.shape[dim]
    return torch.cat(pieces, dim) if pieces else parts[0].narrow(dim, 0, 0).clone()
