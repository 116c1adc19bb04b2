"""What a killed process leaves behind is ended; what it ends itself is left alone, and so is everybody else's."""

import errno
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
# ends by itself, a moment after this process has
tidy = subprocess.Popen(["sh", "-c", "read line; sleep 1; echo done > " + sys.argv[1]], stdin=subprocess.PIPE,
                        start_new_session=True)
gone = subprocess.Popen(["true"])
gone.wait()
watching = reaper.watch_over([mine.pid, tidy.pid, gone.pid])
print(mine.pid, other.pid, watching.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_process_leaves_behind_is_ended(number: signal.Signals, tmp_path: Path):
    wrote = tmp_path / "wrote"
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(wrote)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    mine, other, watching = (psutil.Process(int(one)) for one in driver.stdout.readline().split())
    try:
        driver.send_signal(number)
        driver.wait(timeout=10)
        gone, _ = psutil.wait_procs([mine, watching], timeout=reaper.GRACE_SECONDS + 20)
        assert {one.pid for one in gone} == {mine.pid, watching.pid}
        assert other.is_running()
        assert wrote.read_text() == "done\n", "what ends by itself has time for it"
    finally:
        driver.stdout.close()
        for one in (mine, other):
            if one.is_running():
                one.kill()


def test_it_waits_as_long_as_its_driver_lives():
    child = subprocess.Popen(["sleep", "600"])
    before = os.listdir("/proc/self/fd")
    watching = reaper.watch_over([child.pid])
    assert watching is not None
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            watching.wait(timeout=0.5)
        assert child.poll() is None
        assert os.listdir("/proc/self/fd") == before, "its descriptors are closed here"
    finally:
        watching.kill()
        watching.wait()
        child.kill()
        child.wait()


def test_a_system_without_descriptors_of_processes_does_without(monkeypatch: pytest.MonkeyPatch):
    def hidden(number: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", hidden)
    assert reaper.watch_over([1]) is None
    monkeypatch.delattr(os, "pidfd_open")
    assert reaper.watch_over([1]) is None
