"""Runs of the real stack, each started once and looked at by many tests."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from stack import Run, command, environment


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory, alfworld_data: Path) -> Callable[..., Run]:
    """Runs the command line to its end."""

    def start(*overrides: str, directory: Path | None = None, timeout: float = 420) -> Run:
        directory = directory or tmp_path_factory.mktemp("run") / "out"
        done = subprocess.run(
            command(directory, *overrides),
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=directory.parent,
            env=environment(directory),
        )
        return Run(directory, done.returncode, done.stdout + done.stderr)

    return start


@pytest.fixture(scope="session")
def run(train: Callable[..., Run]) -> Run:
    """Two updates of AgentOPSD with a checkpoint after each, and a validation at the end."""
    done = train("trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.test_freq=2")
    assert done.returncode == 0, done.output[-4000:]
    return done
