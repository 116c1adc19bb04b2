"""Makes ``verl.agentopsd`` importable from an uninstalled checkout, and finds the data that tests need."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).resolve().parent / "data"


def _use_this_checkout() -> None:
    """``import verl.agentopsd`` finds ROOT/verl/agentopsd: by itself if installed, else as a folder added to verl's.

    Raises:
        pytest.UsageError: another copy of AgentOPSD is installed, which would be tested instead of this one.
    """
    upstream = import_module("verl")
    found = find_spec("verl.agentopsd")
    if found is None:
        upstream.__path__.append(str(ROOT / "verl"))
    elif found.origin is not None and Path(found.origin).resolve() != ROOT / "verl" / "agentopsd" / "__init__.py":
        raise pytest.UsageError(
            f"verl.agentopsd is installed from {Path(found.origin).parent}, so these tests would not test {ROOT}; "
            f"run: pip install --no-deps -e {ROOT}"
        )


_use_this_checkout()


def _existing(variable: str, what: str, default: Path | None = None) -> Path:
    value = os.environ.get(variable) or (str(default) if default else None)
    if not value:
        pytest.fail(f"{variable} is not set; set it to {what} ('bash scripts/test.sh --help' says more)", pytrace=False)
    path = Path(value).expanduser()
    if not path.exists():
        pytest.fail(f"{variable}={value} does not exist; set it to {what}", pytrace=False)
    return path


@pytest.fixture(scope="session")
def alfworld_data() -> Path:
    """The folder that holds ``json_2.1.1``."""
    folder = _existing("ALFWORLD_DATA", "the folder that holds ALFWorld's json_2.1.1")
    if not (folder / "json_2.1.1").is_dir():
        pytest.fail(f"ALFWORLD_DATA={folder} holds no json_2.1.1 folder; set it to the folder that does", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def vectors() -> Path:
    """The folder with ``credit.json``: worked numbers of the credit rule."""
    return _existing("AGENTOPSD_VECTORS", "the folder that holds credit.json", DATA)


@pytest.fixture(scope="session")
def transcripts() -> Path:
    """A JSON-lines file of episodes recorded from the real ALFWorld engine."""
    return _existing("ALFWORLD_TRANSCRIPTS", "the recorded episodes, transcripts.jsonl", DATA / "transcripts.jsonl")
