"""The trackers of ``trainer.logger`` are verl's; what is added here is said before the start, or survives a resume.

verl imports a tracker once all workers stand, lets mlflow fail with a warning, and empties the file of its ``file``
tracker whenever a run starts, a resumed one too.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

PACKAGES = {
    "console": None,
    "file": None,
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "swanlab": "swanlab",
    "mlflow": "mlflow",
    "trackio": "trackio",
    "clearml": "clearml",
}


def names(config: DictConfig) -> list[str]:
    """The trackers that ``trainer.logger`` asks for."""
    asked = config.trainer.logger
    return [str(name) for name in asked] if isinstance(asked, ListConfig | list) else [str(asked)]


def problems(config: DictConfig) -> list[str]:
    """Trackers that are unknown or not installed, one line each."""
    found = []
    for name in names(config):
        package = PACKAGES.get(name)
        if name not in PACKAGES:
            found.append(f"trainer.logger={name}: unknown tracker; known: {', '.join(PACKAGES)}")
        elif package is not None and find_spec(package) is None:
            found.append(f"trainer.logger={name} needs the package {package}: pip install {package}, or leave it out")
    return found


def file_path(config: DictConfig) -> Path:
    """Where verl's ``file`` tracker writes; in the run directory unless the user's environment names a place."""
    if named := os.environ.get("VERL_FILE_LOGGER_PATH"):
        return Path(named)
    if root := os.environ.get("VERL_FILE_LOGGER_ROOT"):
        return Path(root).expanduser() / config.trainer.project_name / f"{config.trainer.experiment_name}.jsonl"
    return Path(config.run_dir) / "tracking.jsonl"


def set_aside(config: DictConfig) -> None:
    """Saves the file of an earlier start from verl, which empties it; :func:`restore` puts its lines back.

    Also gives trackers without a place of their own one in the run directory. Variables that the user set are kept.
    """
    if "tensorboard" in names(config):
        os.environ.setdefault("TENSORBOARD_DIR", str(Path(config.run_dir) / "tensorboard"))
    if "file" not in names(config):
        return
    path = file_path(config)
    os.environ["VERL_FILE_LOGGER_PATH"] = str(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        with _earlier(path).open("ab") as earlier:  # a start that was cut short may have left one
            earlier.write(path.read_bytes())
        path.unlink()


def restore(tracking: Any, last_step: int) -> None:
    """Writes the lines of earlier starts up to update ``last_step`` in front of what verl's ``file`` tracker writes."""
    logger = getattr(tracking, "logger", {}).get("file")
    if logger is None:
        return
    earlier = _earlier(Path(logger.filepath))
    if not earlier.exists():
        return
    for line in earlier.read_bytes().splitlines():
        try:
            kept = int(json.loads(line)["step"]) <= last_step
        except (ValueError, KeyError, TypeError):
            kept = False  # cut off in the middle of a line
        if kept:
            logger.fp.write(line + b"\n")
    earlier.unlink()


def _earlier(path: Path) -> Path:
    return path.with_name(path.name + ".earlier")
