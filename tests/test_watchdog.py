"""A stage that hangs ends the process with a clear sentence and the stacks; one that finishes does nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl.agentopsd import watchdog
from verl.agentopsd.watchdog import STALLED_EXIT_CODE, stage

HANG = """
import subprocess, sys, time
from pathlib import Path
from verl.agentopsd.watchdog import stage
engine = "import time\\ndef engine_loop(): time.sleep(600)\\nengine_loop()"
child = subprocess.Popen(["VLLM::EngineCore", "-c", engine], executable=sys.executable)
Path(sys.argv[1], "child").write_text(str(child.pid))
raylet = subprocess.Popen(["/ray/core/raylet", "600"], executable="/bin/sleep")
with stage("weight_sync", 0.5, Path(sys.argv[1])):
    time.sleep(600)
"""


def test_a_stage_within_its_limit_leaves_nothing(tmp_path: Path):
    with stage("update", 60, tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_hang_becomes_an_error_with_stacks_and_no_orphans(tmp_path: Path):
    import psutil

    done = subprocess.run([sys.executable, "-c", HANG, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == STALLED_EXIT_CODE
    assert "the stage 'weight_sync' was not over after 0 s" in done.stderr
    assert "raise limits.weight_sync" in done.stderr
    assert (
        "time.sleep" in (tmp_path / "stalled-weight_sync.txt").read_text()
        or "<string>" in (tmp_path / "stalled-weight_sync.txt").read_text()
    )
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child)
    stacks = (tmp_path / "stalled-weight_sync.txt").read_text()
    assert f"=== {child} VLLM::EngineCore" in stacks
    assert "engine_loop (<string>" in stacks or "ermission" in stacks
    assert "/ray/core/raylet" not in stacks


def test_a_missing_py_spy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watchdog.shutil, "which", lambda name: None)
    monkeypatch.setattr(watchdog.sys, "executable", str(tmp_path / "python"))
    watchdog.write_stacks(tmp_path / "stalled-save.txt")
    assert "py-spy is missing, install it with pip install py-spy" in (tmp_path / "stalled-save.txt").read_text()
