"""A stage that hangs ends the process with a clear sentence and the stacks; one that finishes does nothing."""

import subprocess
import sys
from pathlib import Path

from verl.agentopsd.watchdog import STALLED_EXIT_CODE, stage

HANG = """
import subprocess, sys, time
from pathlib import Path
from verl.agentopsd.watchdog import stage
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(sys.argv[1], "child").write_text(str(child.pid))
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
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))
