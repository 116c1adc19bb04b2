"""Shards for another number of ranks hold the same numbers, cut where FSDP2 cuts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

from verl.agentopsd import run_guard
from verl.agentopsd.reshard import CannotReshard, reshard, resharded, saved_ranks

SHAPES = {"embed": (7, 3), "norm": (5,), "scale": (1,), "layer": (12, 4)}


def whole() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def shard(tensor: torch.Tensor, rank: int, ranks: int, dim: int = 0) -> DTensor:
    """As FSDP2 leaves it on ``rank``."""
    chunks = torch.chunk(tensor, ranks, dim)
    local = chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)
    mesh = DeviceMesh("cpu", torch.arange(ranks), mesh_dim_names=("fsdp",), _init_backend=False, _rank=rank)
    return DTensor.from_local(
        local.clone(), mesh, [Shard(dim)], run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def write(actor: Path, ranks: int, version: int = 2, dim: int = 0) -> None:
    """A checkpoint with weights, two moments of Adam and generators that tell the rank."""
    actor.mkdir(parents=True)
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": ranks}))
    for rank in range(ranks):
        model = {name: shard(tensor, rank, ranks, dim if tensor.ndim > dim else 0) for name, tensor in whole().items()}
        model["buffer"] = torch.arange(3)
        state = {
            index: {"step": torch.tensor(5.0), "exp_avg": shard(2 * tensor, rank, ranks)}
            for index, tensor in enumerate(whole().values())
        }
        optim = {"state": state, "param_groups": [{"lr": 0.5, "betas": (0.9, 0.95), "params": list(state)}]}
        extra = {"lr_scheduler": {"last_epoch": 5}, "rng": {"cpu": torch.tensor([rank]), "random": (3, (rank,), None)}}
        for kind, content in (("model", model), ("optim", optim), ("extra_state", extra)):
            torch.save(content, actor / f"{kind}_world_size_{ranks}_rank_{rank}.pt")


def read(actor: Path, kind: str, ranks: int, rank: int) -> Any:
    return torch.load(actor / f"{kind}_world_size_{ranks}_rank_{rank}.pt", weights_only=False)


@settings(max_examples=12, deadline=None)
@given(before=st.integers(1, 5), after=st.integers(1, 9), dim=st.integers(0, 1))
def test_every_rank_has_what_fsdp_would_have_given_it(tmp_path_factory, before: int, after: int, dim: int):
    folder = tmp_path_factory.mktemp("shards")
    write(folder / "old", before, dim=dim)
    reshard(folder / "old", folder / "new", after)
    for rank in range(after):
        model, optim = read(folder / "new", "model", after, rank), read(folder / "new", "optim", after, rank)
        for index, (name, tensor) in enumerate(whole().items()):
            expected = shard(tensor, rank, after, dim if tensor.ndim > dim else 0)
            assert torch.equal(model[name].to_local(), expected.to_local())
            assert model[name].shape == tensor.shape and model[name].placements == expected.placements
            assert model[name].device_mesh.mesh.tolist() == list(range(after))
            moment = optim["state"][index]["exp_avg"]
            assert torch.equal(moment.to_local(), shard(2 * tensor, rank, after).to_local())
            assert optim["state"][index]["step"] == 5
        assert model["buffer"].tolist() == [0, 1, 2]
        assert optim["param_groups"] == [{"lr": 0.5, "betas": (0.9, 0.95), "params": [0, 1, 2, 3]}]
        extra = read(folder / "new", "extra_state", after, rank)
        assert extra["lr_scheduler"] == {"last_epoch": 5}
        assert extra["rng"]["cpu"].item() == rank % before and extra["rng"]["random"] == (3, (rank % before,), None)


def test_a_replicated_tensor_stays_whole(tmp_path: Path):
    write(tmp_path / "old", 1)
    mesh = DeviceMesh("cpu", torch.arange(1), mesh_dim_names=("fsdp",), _init_backend=False, _rank=0)
    same = DTensor.from_local(torch.ones(4), mesh, [Replicate()], run_check=False)
    torch.save({"same": same}, tmp_path / "old" / "model_world_size_1_rank_0.pt")
    reshard(tmp_path / "old", tmp_path / "new", 3)
    assert [read(tmp_path / "new", "model", 3, rank)["same"].to_local().tolist() for rank in range(3)] == [
        [1.0] * 4
    ] * 3


def test_the_checkpoint_stays_as_it_is_and_the_copy_goes(tmp_path: Path):
    checkpoint, scratch = tmp_path / "global_step_8", tmp_path / ".resharded"
    write(checkpoint / "actor", 2)
    (checkpoint / "data.pt").write_text("order")
    before = {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")}
    (scratch / "left").mkdir(parents=True)  # by a run that was killed here
    with resharded(checkpoint, 3, scratch) as folder:
        assert folder.name == "global_step_8" and (folder / "data.pt").read_text() == "order"
        assert saved_ranks(folder / "actor") == 3
        for file in folder.rglob("*.pt"):
            if file.name != "data.pt":
                run_guard._check_pickle(file)
    assert {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")} == before
    assert not scratch.exists()


def test_the_same_number_of_ranks_makes_no_copy(tmp_path: Path):
    checkpoint = tmp_path / "global_step_8"
    write(checkpoint / "actor", 2)
    with resharded(checkpoint, 2, tmp_path / ".resharded") as folder:
        assert folder == checkpoint


def test_shards_of_fsdp1_are_refused(tmp_path: Path):
    write(tmp_path / "old", 2, version=1)
    with pytest.raises(CannotReshard, match="only shards of FSDP2 can be cut anew"):
        reshard(tmp_path / "old", tmp_path / "new", 3)
    assert not (tmp_path / "new").exists()


def test_replicas_of_shards_are_refused(tmp_path: Path):
    write(tmp_path / "old", 1)
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), _init_backend=False, _rank=0)
    two = DTensor.from_local(
        torch.ones(4), mesh, [Replicate(), Shard(0)], run_check=False, shape=torch.Size([8]), stride=(1,)
    )
    torch.save({"two": two}, tmp_path / "old" / "model_world_size_1_rank_0.pt")
    with pytest.raises(CannotReshard, match=r"a mesh of 2 dimensions \(2, 2\)"):
        reshard(tmp_path / "old", tmp_path / "new", 3)
