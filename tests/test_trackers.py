"""Trackers: what cannot work is said before the start, no variable of the user is overwritten, nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from verl.utils.tracking import Tracking

from verl.agentopsd import trackers
from verl.agentopsd.config import ConfigError
from verl.agentopsd.main import compose_config, prepare
from verl.agentopsd.run_log import RunLog

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch):
    """Restored afterwards, whatever the code under test sets."""
    for name in ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT", "TENSORBOARD_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def start(run_dir: Path, first_step: int, logger: str = "[file]") -> RunLog:
    config = compose_config([f"run_dir={run_dir}", f"trainer.logger={logger}"])
    trackers.set_aside(config)
    tracking = Tracking(config.trainer.project_name, config.trainer.experiment_name, list(config.trainer.logger))
    return RunLog(tracking, run_dir, total_steps=9, first_step=first_step)


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_the_file_tracker_survives_resumes(tmp_path: Path):
    log = start(tmp_path, first_step=0)
    for step in (1, 2, 3):
        log.log({"a": float(step)}, step)
    log.finish()
    # stopped after update 3, the last checkpoint is of update 2
    log = start(tmp_path, first_step=2)
    log.log({"a": 30.0}, 3)
    log.finish()
    assert steps(tmp_path / "tracking.jsonl") == [1, 2, 3]
    assert json.loads((tmp_path / "tracking.jsonl").read_text().splitlines()[-1])["data"]["a"] == 30.0
    assert not list(tmp_path.glob("*.earlier"))


def test_a_start_that_is_cut_short_loses_nothing(tmp_path: Path):
    log = start(tmp_path, first_step=0)
    log.log({"a": 1.0}, 1)
    log.finish()
    config = compose_config([f"run_dir={tmp_path}", "trainer.logger=[file]"])
    trackers.set_aside(config)
    Tracking("p", "e", ["file"])  # verl has emptied the file; killed before the first update
    log = start(tmp_path, first_step=1)
    log.log({"a": 2.0}, 2)
    log.finish()
    assert steps(tmp_path / "tracking.jsonl") == [1, 2]


def test_verl_still_empties_the_file():
    """When this fails, verl keeps its file and trackers.set_aside is no longer needed."""
    import inspect

    from verl.utils.tracking import FileLogger

    assert 'open(self.filepath, "wb"' in inspect.getsource(FileLogger)


def test_places_that_the_user_named_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "mine"))
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "board"))
    log = start(tmp_path / "run", first_step=0, logger="[file,tensorboard]")
    log.log({"a": 1.0}, 1)
    log.finish()
    assert steps(tmp_path / "mine" / "agentopsd" / "alfworld_agentopsd.jsonl") == [1]
    assert list((tmp_path / "board").iterdir())


def test_tensorboard_writes_into_the_run_directory(tmp_path: Path):
    log = start(tmp_path, first_step=0, logger="[console,tensorboard]")
    log.log({"a": 1.0}, 1)
    log.finish()
    assert list((tmp_path / "tensorboard").glob("events.*"))


@pytest.mark.parametrize(
    ("logger", "message"),
    [
        (
            "[consol]",
            "trainer.logger=consol: unknown tracker; known: console, file, tensorboard, wandb",
        ),
        ("swanlab", "trainer.logger=swanlab needs the package swanlab: pip install swanlab"),
        ("[console,mlflow]", "trainer.logger=mlflow needs the package mlflow"),
    ],
)
def test_a_tracker_that_cannot_work_is_said_before_the_start(logger: str, message: str, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=message):
        prepare(compose_config([f"trainer.logger={logger}"]))


def test_no_script_sets_a_users_key():
    """wandb's, swanlab's and mlflow's keys and addresses belong to the user; a script may read, never write them."""
    for path in [*ROOT.glob("examples/*"), *ROOT.glob("scripts/*.sh"), *ROOT.glob("docker/*")]:
        for line in path.read_text().splitlines():
            for name in ("WANDB_API_KEY", "SWANLAB_API_KEY", "MLFLOW_TRACKING_URI", "HF_TOKEN"):
                assert f"{name}=" not in line.replace(f"{name}=…", ""), f"{path.name}: {line}"
