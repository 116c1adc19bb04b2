"""Weights of a run reach the rollout engine of that run and no other.

verl's training worker hands its weights to vLLM through a socket in /tmp whose name holds Ray's job id, the replica and
the rank (``verl/workers/rollout/vllm_rollout``). Job ids are counted by each Ray cluster: every run that starts its own
has the first one. Two such runs on one machine meet in the same file, and one's engine plays with the other's weights,
without any error. So the name gets a part of its own, which all processes of a run know from their environment.

Installed in every process by the ``verl.plugins`` entry point; the modules are changed when they are imported.
"""

from __future__ import annotations

import functools
import os
import uuid
from types import ModuleType
from typing import Any

import wrapt

VARIABLE = "AGENTOPSD_WEIGHT_CHANNEL"


def variables() -> dict[str, str]:
    """A channel for a new run, as part of its workers' environment."""
    return {VARIABLE: uuid.uuid4().hex[:16]}


def own(handle: str) -> str:
    """``handle``, an address ``ipc://….sock``, for this process's run; the same address where no run has named one."""
    channel = os.environ.get(VARIABLE, "")
    return handle.replace(".sock", f"-{channel}.sock") if channel else handle


def install() -> None:
    """Changes both ends of the socket as soon as they are imported."""
    folder = "verl.workers.rollout.vllm_rollout"
    wrapt.register_post_import_hook(_sender, f"{folder}.vllm_rollout")
    wrapt.register_post_import_hook(_receiver, f"{folder}.utils")


def _sender(module: ModuleType) -> None:
    original = module.ServerAdapter.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.zmq_handle = own(self.zmq_handle)

    module.ServerAdapter.__init__ = init


def _receiver(module: ModuleType) -> None:
    original = module.vLLMColocateWorkerExtension._get_zmq_handle

    @functools.wraps(original)
    def get(self: Any) -> str:
        return own(original(self))

    module.vLLMColocateWorkerExtension._get_zmq_handle = get
