"""A checkpoint is there whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler

from verl.agentopsd import checkpoints as module
from verl.agentopsd.checkpoints import (
    POINTER,
    CheckpointFailed,
    Checkpoints,
    latest_step,
    random_state,
    restore_random_state,
    run_state,
    step_folder,
    write_atomically,
)


def writer(step: int, text: str = "weights"):
    def write(folder: Path) -> None:
        actor = step_folder(folder, step) / "actor"
        actor.mkdir(parents=True)
        (actor / "model_world_size_1_rank_0.pt").write_text(text)

    return write


def save(checkpoints: Checkpoints, step: int, text: str = "weights") -> None:
    checkpoints.save(step, writer(step, text), {"step": step})
    checkpoints.commit(step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_pointer_follows_the_commit_and_old_ones_go(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert latest_step(tmp_path) is None
    for step in (1, 2, 3):
        checkpoints.save(step, writer(step), {"step": step})
        assert latest_step(tmp_path) == (step - 1 or None)
        checkpoints.commit(step)
        assert latest_step(tmp_path) == step
        (tmp_path / "global_step_1_best").mkdir(exist_ok=True)  # a copy that somebody keeps
    assert names(tmp_path) == ["global_step_1_best", "global_step_2", "global_step_3", POINTER]
    assert run_state(tmp_path / "global_step_3") == {"step": 3}
    assert run_state(tmp_path) is None
    checkpoints.commit(4)
    assert latest_step(tmp_path) == 3


def test_all_are_kept_when_asked_for_and_those_of_another_branch_are_left_alone(tmp_path: Path):
    keep_all = Checkpoints(tmp_path)
    for step in (1, 2, 9):
        save(keep_all, step)
    (tmp_path / POINTER).write_text("2")  # the user went back to update 2
    save(Checkpoints(tmp_path, keep=1), 3)
    assert names(tmp_path) == ["global_step_3", "global_step_9", POINTER]


def test_a_left_over_of_an_unfinished_save_is_replaced(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=5)
    checkpoints.save(1, writer(1, "unnamed"), {})
    (tmp_path / ".saving" / "global_step_2").mkdir(parents=True)
    save(Checkpoints(tmp_path, keep=5), 1, "again")
    assert (tmp_path / "global_step_1" / "actor" / "model_world_size_1_rank_0.pt").read_text() == "again"
    assert names(tmp_path) == ["global_step_1", POINTER]


KILLED = """
    import os, sys
    from pathlib import Path
    from verl.agentopsd import checkpoints as module

    point, folder = sys.argv[1], Path(sys.argv[2])

    def write(target):
        actor = target / "global_step_2" / "actor"
        actor.mkdir(parents=True)
        if point == "in the shards":
            os.kill(os.getpid(), 9)
        (actor / "model_world_size_1_rank_0.pt").write_text("new")

    def kill(*args, **kwargs):
        os.kill(os.getpid(), 9)

    if point == "before the rename":
        module._sync_tree = kill
    checkpoints = module.Checkpoints(folder, keep=1)
    checkpoints.save(2, write, {})
    if point == "before the pointer":
        kill()
    if point == "before the removal":
        module._remove = kill
    checkpoints.commit(2)
"""


@pytest.mark.parametrize(
    ("point", "latest"),
    [("in the shards", 1), ("before the rename", 1), ("before the pointer", 1), ("before the removal", 2)],
)
def test_a_kill_while_saving_leaves_a_usable_checkpoint(tmp_path: Path, point: str, latest: int):
    save(Checkpoints(tmp_path, keep=1), 1, "old")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), point, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert latest_step(tmp_path) == latest
    weights = step_folder(tmp_path, latest) / "actor" / "model_world_size_1_rank_0.pt"
    assert weights.read_text() == {1: "old", 2: "new"}[latest]
    save(Checkpoints(tmp_path, keep=1), 2, "again")
    assert names(tmp_path) == ["global_step_2", POINTER]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("ray::save_checkpoint() OSError: [Errno 28] No space left on device: '/x/model.pt'"),
    ],
)
def test_a_full_disk_is_said_and_the_last_checkpoint_stays(tmp_path: Path, error: Exception):
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1, "old")

    def write(folder: Path) -> None:
        writer(2)(folder)
        raise error

    with pytest.raises(CheckpointFailed) as failed:
        checkpoints.save(2, write, {})
    assert "no space left for the checkpoint of update 2" in str(failed.value)
    assert "The checkpoint of update 1 is intact: free some space" in str(failed.value)
    assert names(tmp_path) == ["global_step_1", POINTER]


def test_a_write_that_torch_could_not_finish_is_a_full_disk_if_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def write(folder: Path) -> None:
        writer(1)(folder)
        torch.save({"a": torch.ones(300_000)}, "/dev/full")

    with pytest.raises(RuntimeError, match="inline_container") as failed:
        Checkpoints(tmp_path).save(1, write, {})
    assert not isinstance(failed.value, CheckpointFailed)
    free = {True: 4096, False: 2**40}
    monkeypatch.setattr(
        module.shutil, "disk_usage", lambda _: SimpleNamespace(free=free[(tmp_path / ".saving").exists()])
    )
    with pytest.raises(CheckpointFailed, match=r"no space left for the checkpoint of update 1 in .* \(0 MiB free\)"):
        Checkpoints(tmp_path).save(1, write, {})
    assert names(tmp_path) == []


LIMITED = """
    import resource, sys
    from pathlib import Path
    import torch
    from verl.agentopsd import checkpoints as module

    def write(folder):
        (folder / "global_step_2").mkdir()
        torch.save({"a": torch.ones(300_000)}, folder / "global_step_2" / "weights.pt")

    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, 2**19))
    try:
        module.Checkpoints(Path(sys.argv[1])).save(2, write, {})
    except module.CheckpointFailed as error:
        print(error)
"""


def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path):
    save(Checkpoints(tmp_path), 1)
    command = [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "no file may be larger than 0.5 MiB: see ulimit -f). The checkpoint of update 1 is intact" in said
    assert names(tmp_path) == ["global_step_1", POINTER]


def test_too_little_space_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    with pytest.raises(CheckpointFailed, match=r"\(0 MiB free, the last one took 0 MiB\). The checkpoint of update 1"):
        checkpoints.save(2, lambda folder: pytest.fail("written"), {})


def test_another_error_is_not_called_a_full_disk(tmp_path: Path):
    with pytest.raises(ValueError, match="no such layer"):
        Checkpoints(tmp_path).save(1, lambda folder: (_ for _ in ()).throw(ValueError("no such layer")), {})
    assert names(tmp_path) == []


def test_a_shard_on_another_node_s_own_disk_is_refused(tmp_path: Path):
    def write(folder: Path) -> None:
        actor = step_folder(folder, 1) / "actor"
        actor.mkdir(parents=True)
        (actor / "model_world_size_4_rank_0.pt").touch()

    with pytest.raises(CheckpointFailed, match="3 of 4 shards are not in .*a file system that all nodes share"):
        Checkpoints(tmp_path).save(1, write, {})


@pytest.mark.parametrize(
    ("pointer", "folders", "message"),
    [
        ("", [3], r"says '', which is no checkpoint in .*: write one of \[3\] into the file"),
        ("5", [3, 4], r"says '5', which is no checkpoint in .*: write one of \[3, 4\]"),
        ("\x00\xff", [3], "which is no checkpoint"),
        ("5", [], "remove the file to start from nothing"),
    ],
)
def test_a_damaged_pointer_is_never_a_start_from_nothing(tmp_path: Path, pointer: str, folders: list, message: str):
    (tmp_path / POINTER).write_text(pointer)
    for step in folders:
        step_folder(tmp_path, step).mkdir()
    with pytest.raises(CheckpointFailed, match=message):
        latest_step(tmp_path)


def test_generators_continue(tmp_path: Path):
    def draw() -> list[float]:
        return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]

    random.gauss(0, 1), np.random.randn()  # both keep a second number for later
    torch.save(random_state(), tmp_path / "state.pt")
    expected = draw()
    draw()
    restore_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == expected


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 6])
def test_the_order_of_the_games_continues_also_from_an_epoch_s_end(tmp_path: Path, stop: int):
    """Three updates an epoch; the loader is restored after ``stop`` of seven updates, in a new process's place."""

    def loader() -> StatefulDataLoader:
        settings = OmegaConf.create({"shuffle": True, "seed": 3})
        games = list(range(10))
        return StatefulDataLoader(games, batch_size=3, drop_last=True, sampler=create_rl_sampler(settings, games))

    def take(source: StatefulDataLoader, iterator, count: int):
        taken = []
        for _ in range(count):  # as verl's _fetch_one_gen_batch
            try:
                iterator = iterator or iter(source)
                batch = next(iterator)
            except StopIteration:
                iterator = iter(source)
                batch = next(iterator)
            taken.append(batch.tolist())
        return taken, iterator

    straight, _ = take(loader(), None, 7)
    first = loader()
    before, _ = take(first, None, stop)
    torch.save(first.state_dict(), tmp_path / "data.pt")
    second = loader()
    second.load_state_dict(torch.load(tmp_path / "data.pt", weights_only=True))
    after, _ = take(second, None, 7 - stop)
    assert before + after == straight


def test_atomic_writing_replaces_the_whole_text(tmp_path: Path):
    file = tmp_path / "file"
    write_atomically(file, "a long text")
    write_atomically(file, "short")
    assert file.read_text() == "short" and os.listdir(tmp_path) == ["file"]
