"""Runs that each started a Ray cluster of their own have the same job id and must not share the weights' socket."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest

from verl.agentopsd.platform import weight_channel

HANDLE = "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"


def said(code: str, channel: str | None = None) -> str:
    """The last line of a process that a run with this channel has started."""
    environment = {name: value for name, value in os.environ.items() if name != weight_channel.VARIABLE}
    environment |= {"VERL_PLATFORM": "cpu", "VERL_RAY_JOB_ID": "01000000", "VERL_REPLICA_RANK": "0"}
    if channel is not None:
        environment[weight_channel.VARIABLE] = channel
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


RECEIVER = """
from verl.workers.rollout.vllm_rollout import utils
worker = object.__new__(utils.vLLMColocateWorkerExtension)
worker.local_rank, worker.model_runner = 0, None
print(worker._get_zmq_handle())
"""
SENDER = """
import inspect
from verl.workers.rollout.vllm_rollout import vllm_rollout
original = vllm_rollout.ServerAdapter.__init__.__wrapped__
print([line.strip() for line in inspect.getsource(original).splitlines() if "zmq_handle =" in line])
"""


def test_the_receiving_end_has_its_run_in_the_address():
    assert said(RECEIVER, "one") == "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0-one.sock"
    assert said(RECEIVER) == HANDLE, "upstream's address: job ids of two clusters are equal"


def test_the_sending_end_has_the_same_address(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(weight_channel.VARIABLE, "one")

    class Adapter:
        def __init__(self, address: str) -> None:
            self.zmq_handle = address

    fake = ModuleType("fake")
    fake.ServerAdapter = Adapter  # type: ignore[attr-defined]
    weight_channel._sender(fake)
    assert Adapter(HANDLE).zmq_handle == "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0-one.sock"


def test_the_real_sending_end_is_changed_and_names_its_address_in_the_constructor():
    lines = said(SENDER, "one")
    assert "rl-colocate-zmq-{job_id}-replica-{self.replica_rank}-rank-{local_rank}.sock" in lines


def test_every_run_has_another_channel():
    assert weight_channel.variables() != weight_channel.variables()
