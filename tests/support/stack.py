"""Starting the main command, reading what a run left, and the processes of the stack on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from verl.agentopsd.evaluation.records import EpisodeRecord, read_records

SMALL = [
    "model=tiny",
    "device=cpu",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    "env.max_turns=12",
    "data.val_max_samples=6",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
]


MARK = "AGENTOPSD_TEST_RUN"


@dataclass(frozen=True)
class Run:
    """A finished run of the command line."""

    directory: Path
    returncode: int
    output: str

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return {row["step"]: row["data"] for row in map(json.loads, lines)}

    def rollouts(self, step: int) -> list[EpisodeRecord]:
        return read_records(self.directory / "rollouts" / f"{step:06d}.jsonl").episodes

    def checkpoint(self, step: int) -> dict[str, Any]:
        """Parameters, put together from all ranks."""
        from verl.agentopsd.evaluation.checkpoint_merge import read_shards

        return dict(read_shards(self.directory / "checkpoints" / f"global_step_{step}" / "actor"))


def texts(records: list[EpisodeRecord]) -> list[list[str]]:
    """What the model answered, turn by turn."""
    return [[turn.text for turn in record.turns] for record in records]


def command(directory: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "verl.agentopsd.main", *SMALL, f"run_dir={directory}", *overrides]


def environment(directory: Path) -> dict[str, str]:
    """The environment of a run; every process that descends from it inherits the mark."""
    return {**os.environ, MARK: str(directory)}


def left_behind(directory: Path) -> list[str]:
    """Command lines of living processes that a run started, whoever their parent is now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(directory) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()) or process.name())
    return found


def heed_interrupts() -> None:
    """For ``preexec_fn``: what a shell puts into the background ignores SIGINT, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupt_when(directory: Path, sign: str, signum: signal.Signals, *overrides: str) -> Run:
    """Starts a run and signals it as soon as ``sign`` appears in its output or ``sign`` exists in its directory."""
    log = directory.parent / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command(directory, *overrides),
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=directory.parent,
            env=environment(directory),
            preexec_fn=heed_interrupts,
        )
        try:
            deadline = time.monotonic() + 300
            while sign not in log.read_text() and not (directory / sign).exists():
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.1)
            os.kill(process.pid, signum)
            returncode = process.wait(timeout=120)
        finally:
            process.kill()
    return Run(directory, returncode, log.read_text())
