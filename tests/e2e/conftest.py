"""Runs of the real stack, each started once and looked at by many tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

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
        """Parameters of rank 0."""
        import torch

        folder = self.directory / "checkpoints" / f"global_step_{step}" / "actor"
        state = torch.load(next(folder.glob("model_world_size_*_rank_0.pt")), weights_only=False)
        return {name: getattr(value, "_local_tensor", value) for name, value in state.items()}


def command(directory: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "verl.agentopsd.main", *SMALL, f"run_dir={directory}", *overrides]


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory, alfworld_data: Path) -> Callable[..., Run]:
    """Runs the command line to its end."""

    def start(*overrides: str, directory: Path | None = None, timeout: float = 420) -> Run:
        directory = directory or tmp_path_factory.mktemp("run") / "out"
        done = subprocess.run(
            command(directory, *overrides), capture_output=True, text=True, timeout=timeout, cwd=directory.parent
        )
        return Run(directory, done.returncode, done.stdout + done.stderr)

    return start


@pytest.fixture(scope="session")
def run(train: Callable[..., Run]) -> Run:
    """Two updates of AgentOPSD with a checkpoint after each, and a validation at the end."""
    done = train("trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.test_freq=2")
    assert done.returncode == 0, done.output[-4000:]
    return done


def descendants_of_stack() -> list[psutil.Process]:
    """Processes of Ray and vLLM on this machine."""
    names = ("raylet", "gcs_server", "ray::", "VLLM::", "EngineCore")
    found = []
    for process in psutil.process_iter(["cmdline", "name", "status"]):
        text = " ".join(process.info["cmdline"] or []) or process.info["name"] or ""
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(name in text for name in names):
            found.append(process)
    return found


def interrupt_when(directory: Path, sign: str, signum: signal.Signals, *overrides: str) -> Run:
    """Starts a run and signals it as soon as ``sign`` appears in its output or ``sign`` exists in its directory."""
    log = directory.parent / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            command(directory, *overrides), stdout=output, stderr=subprocess.STDOUT, cwd=directory.parent
        )
        deadline = time.monotonic() + 300
        while sign not in log.read_text() and not (directory / sign).exists():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        os.kill(process.pid, signum)
        returncode = process.wait(timeout=120)
    return Run(directory, returncode, log.read_text())
