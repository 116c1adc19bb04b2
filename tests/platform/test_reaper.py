"""What a killed process leaves behind is ended; what it ends itself is left alone, and so is everybody else's."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from verl.agentopsd.platform import reaper

DRIVER = """
import subprocess, sys, time
from verl.agentopsd.platform import reaper
mine, other = (subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2))
gone = subprocess.Popen(["true"])
gone.wait()
watching = reaper.watch_over([mine.pid, gone.pid])
print(mine.pid, other.pid, watching.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_process_leaves_behind_is_ended(number: signal.Signals):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    mine, other, watching = (psutil.Process(int(one)) for one in driver.stdout.readline().split())
    try:
        driver.send_signal(number)
        driver.wait(timeout=10)
        gone, _ = psutil.wait_procs([mine, watching], timeout=reaper.GRACE_SECONDS + 20)
        assert {one.pid for one in gone} == {mine.pid, watching.pid}
        assert other.is_running()
    finally:
        driver.stdout.close()
        for one in (mine, other):
            if one.is_running():
                one.kill()


def test_it_waits_as_long_as_its_driver_lives():
    child = subprocess.Popen(["sleep", "600"])
    watching = reaper.watch_over([child.pid])
    assert watching is not None
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            watching.wait(timeout=0.5)
        assert child.poll() is None
        number = os.pidfd_open(child.pid)
        assert number <= 3 + len(list(Path("/proc/self/fd").iterdir()))  # its descriptors are closed here
        os.close(number)
    finally:
        watching.kill()
        watching.wait()
        child.kill()
        child.wait()


def test_a_system_without_descriptors_of_processes_does_without(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "pidfd_open")
    assert reaper.watch_over([1]) is None
