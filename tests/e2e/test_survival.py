"""A run is struck at every stage and in every process, blow after blow, and ends like one that never was."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import sabotage
import torch
from stack import SMALL, Run, environment, left_behind, texts

from verl.agentopsd.checkpoints import latest_step
from verl.agentopsd.evaluation.records import read_records
from verl.agentopsd.evaluation.run_metrics import read_metrics

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

# four games: every update is an epoch, so that each resume is one at an epoch's end
SETTINGS = ["data.train_max_samples=4", "trainer.test_freq=2"]
CLOCKS = ("seconds", "env_seconds", "gen_seconds", "run")
MEASURED = ("timing", "perf/", "actor/perf/", "teacher/seconds", "env/seconds", "rollout/tokens", "rollout/straggler")
MEASURED += ("rollout/prefix_cache",)  # episodes of a game share its prompt, and the first of them has to read it
SAMPLER = ("training/rollout", "rollout_corr/", "rollout/logprob_gap")
"""Metrics of the sampler's own log-probs: vLLM rounds by which requests share a forward pass, in the sixth digit."""


@pytest.fixture(scope="module")
def straight(train: Callable[..., Run]) -> Run:
    """Two updates without any disturbance, a checkpoint after each."""
    done = train(*SETTINGS, "trainer.total_training_steps=2", "trainer.save_freq=1")
    assert done.returncode == 0, done.output[-4000:]
    return done


@pytest.fixture(scope="module")
def battered(straight: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run as it was after its first update; the tests below strike it one after another."""
    directory = tmp_path_factory.mktemp("battered") / "out"
    shutil.copytree(straight.directory, directory)
    shutil.rmtree(directory / "checkpoints" / "global_step_2")
    (directory / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    return directory


def struck(directory: Path, victim: str, moment: str, step: int, *overrides: str) -> Run:
    """Resumes the run in ``directory`` and strikes it; it ends within a minute of the blow, and half a minute later
    no process of it is left."""
    blow, log = directory.parent / f"{victim}-{moment}", directory.parent / f"{victim}-{moment}.log"
    command = [sys.executable, sabotage.__file__, victim, moment, str(step), str(blow), "--", *SMALL, *SETTINGS]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, f"run_dir={directory}", *overrides],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory.parent,
            env=environment(directory),
        )
        deadline = time.monotonic() + 400
        while not blow.exists():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.05)
        try:
            returncode = process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(f"still running a minute after the blow: {log.read_text()[-4000:]}")
    seen = json.loads(blow.read_text())
    sockets = {(name, address.removeprefix("::ffff:")) for name, address in seen["sockets"]}
    for kind in ("WorkerDict", "vLLMHttpServer", "VLLM::EngineCore", "AgentLoopWorker", "TransferQueueController"):
        assert any(kind in name for name in seen["forks"]), f"{kind} is no fork: {seen['forks']}"
    assert len(sockets) > 3, "Ray, the queue and the rollout server listen somewhere"
    assert [one for one in sockets if one[1] not in ("127.0.0.1", "::1")] == [], "and on the loopback interface only"
    gone(directory, seen["living"])
    return Run(directory, returncode, log.read_text())


def gone(directory: Path, before: list[tuple[int, float, str]]) -> None:
    """Of the processes ``before`` the blow too, some of which have written their titles over the mark."""
    deadline = time.monotonic() + 30
    while (rest := left_behind(directory) + still_there(before)) and time.monotonic() < deadline:
        time.sleep(0.2)  # Ray's processes need a moment
    assert rest == []


def still_there(before: list[tuple[int, float, str]]) -> list[str]:
    found = []
    for pid, start, name in before:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.create_time() == start and process.status() != psutil.STATUS_ZOMBIE:
                found.append(name)
    return found


def digest(folder: Path) -> str:
    """Over names and bytes of every file."""
    sha = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        sha.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()


@pytest.mark.parametrize(
    ("victim", "moment", "message"),
    [
        ("driver", "rollout", None),
        ("driver", "teacher", None),
        ("driver", "update", None),
        ("driver", "saving", None),
        ("engine", "rollout", "games could not be played|the rollout server 0 has died"),
        ("player", "rollout", "the agent-loop worker 0 has died"),
        ("engine", "update", "the engine of the rollout server 0 has died.*continues from the last checkpoint"),
        ("learner", "rollout", "the training worker 0 has died|a worker process has died"),
        ("learner", "update", "a worker process has died: .*continues from the last checkpoint"),
    ],
)
def test_a_blow_leaves_everything_before_it_intact(battered: Path, victim: str, moment: str, message: str | None):
    """SIGKILL: the run ends by itself, leaves no process, and the directory is as resumable as before."""
    import re

    before = digest(battered / "checkpoints" / "global_step_1")
    # a dead engine is noticed within seconds, in which a small model's update may be over and saved
    frequency = 50 if (victim, moment) == ("engine", "update") else 1
    done = struck(battered, victim, moment, 2, "trainer.total_training_steps=50", f"trainer.save_freq={frequency}")
    if message is None:
        assert done.returncode == -9
    else:
        assert done.returncode == 1, done.output[-4000:]
        errors = [line for line in done.output.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and re.search(message, errors[0]), done.output[-4000:]
        assert "Traceback" not in done.output
    assert latest_step(battered / "checkpoints") == 1
    assert digest(battered / "checkpoints" / "global_step_1") == before
    assert sorted(path.name for path in (battered / "checkpoints").glob("global_step_*")) == ["global_step_1"]
    assert list(read_metrics(battered).steps) == [1]
    for file in (battered / "rollouts").glob("*.jsonl"):
        assert len(read_records(file).episodes) == 16


def test_sigterm_saves_and_what_was_struck_ends_like_a_straight_run(battered: Path, straight: Run):
    """After all blows above, with another number of agent-loop workers and a save_freq that does not divide: update 2
    is the straight run's, bit for bit, and SIGTERM in the middle of it costs nothing."""
    done = struck(
        *(battered, "terminate", "update", 2, "trainer.total_training_steps=50", "trainer.save_freq=5"),
        "actor_rollout_ref.rollout.agent.num_workers=2",
    )
    assert done.returncode == 0, done.output[-4000:]
    assert "stopped by SIGTERM after update 2, which is saved in" in done.output
    assert latest_step(battered / "checkpoints") == 2
    for kind in ("model", "optim"):
        ours, theirs = (state(one.directory, kind) for one in (done, straight))
        assert ours == theirs, kind
    assert comparable_records(done) == comparable_records(straight)
    assert comparable_metrics(done) == comparable_metrics(straight)


def state(directory: Path, kind: str) -> str:
    """SHA-256 over every number of rank 0's parameters or optimizer states after update 2."""
    file = directory / "checkpoints" / "global_step_2" / "actor" / f"{kind}_world_size_1_rank_0.pt"
    sha = hashlib.sha256()

    def add(value: Any) -> None:
        value = getattr(value, "_local_tensor", value)
        if isinstance(value, torch.Tensor):
            sha.update(value.contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                sha.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        else:
            sha.update(repr(value).encode())

    add(torch.load(file, weights_only=True))
    return sha.hexdigest()


def comparable_records(run: Run) -> list[dict[str, Any]]:
    """Every field of every training episode but what a clock measured and the sampler's own log-probs."""
    records = []
    for file in sorted((run.directory / "rollouts").glob("*.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            for turn in row["turns"]:
                del turn["rollout_logprob_sum"]
            records.append({key: value for key, value in row.items() if key not in CLOCKS})
    assert len(records) == 32
    return records


def comparable_metrics(run: Run) -> dict[int, dict[str, float]]:
    """Every training metric but what a clock measured or the sampler rounded. Only the straight run validated."""
    left_out = (*MEASURED, *SAMPLER, "val/")
    return {
        step: {name: value for name, value in data.items() if not name.startswith(left_out)}
        for step, data in run.metrics.items()
    }


def test_a_run_goes_on_with_two_ranks_and_then_with_one_again(straight: Run, train: Callable[..., Run], tmp_path: Path):
    """Two ranks play and learn update 2 as one does, to the rounding of sums in another order; of Adam's second step,
    whose size is about the learning rate, 2 % and less."""
    directory = tmp_path / "out"
    shutil.copytree(straight.directory, directory)
    shutil.rmtree(directory / "checkpoints" / "global_step_2")
    (directory / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    before = digest(directory / "checkpoints" / "global_step_1")
    settings = [*SETTINGS, "trainer.save_freq=1"]
    two = train(*settings, "trainer.total_training_steps=2", "trainer.n_gpus_per_node=2", directory=directory)
    assert two.returncode == 0, two.output[-4000:]
    assert digest(directory / "checkpoints" / "global_step_1") == before
    assert not (directory / "checkpoints" / ".resharded").exists()
    assert texts(two.rollouts(2)) == texts(straight.rollouts(2))
    ours, theirs, start = two.checkpoint(2), straight.checkpoint(2), straight.checkpoint(1)
    moved = max(float((theirs[name] - start[name]).abs().max()) for name in theirs)
    apart = max(float((theirs[name] - ours[name]).abs().max()) for name in theirs)
    print(f"moved {moved:.2e}, apart {apart:.2e}")
    assert apart < 0.02 * moved
    one = train(*settings, "trainer.total_training_steps=3", directory=directory)
    assert one.returncode == 0, one.output[-4000:]
    assert list(one.metrics) == [1, 2, 3] and latest_step(directory / "checkpoints") == 3


def test_two_runs_in_one_directory_are_refused_and_so_is_a_changed_config(straight: Run, train: Callable[..., Run]):
    """Neither costs a start, and neither touches the run."""
    before = digest(straight.directory / "checkpoints")
    changed = train(
        *(*SETTINGS, "trainer.total_training_steps=3", "agentopsd.lambda=0.3", "env.seed=4"),
        directory=straight.directory,
    )
    assert changed.returncode == 1
    assert "would be resumed after update 2 with other settings:" in changed.output
    assert "  agentopsd.lambda: 0.5 -> 0.3" in changed.output and "  env.seed: 0 -> 4" in changed.output
    assert "--allow-config-change agentopsd.lambda (and so on for each)" in changed.output
    holder = psutil.Process(os.getpid())
    from verl.agentopsd.run_guard import lock_run_dir

    with lock_run_dir(straight.directory):
        second = train(*SETTINGS, "trainer.total_training_steps=3", directory=straight.directory)
    assert second.returncode == 1
    assert f"is being used by process {holder.pid} on" in second.output
    assert digest(straight.directory / "checkpoints") == before
