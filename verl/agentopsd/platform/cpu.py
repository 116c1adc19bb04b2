"""A CPU platform for verl, through its own hook ``verl.plugin.platform.PlatformRegistry``.

Selected by ``VERL_PLATFORM=cpu``. FSDP2 then runs over gloo, weights go to vLLM through shared memory, and Ray's
"GPU" is a logical resource that only counts how many ranks fit.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _CpuDeviceModule(types.ModuleType):
    """``torch.cpu`` completed by the names of ``torch.cuda`` that verl calls on its device module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def _virtual_memory() -> tuple[int, int]:
    """(available, total) in bytes; stands in for ``torch.cuda.mem_get_info``."""
    import psutil

    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _device_module() -> types.ModuleType:
    module = _CpuDeviceModule("verl_agentopsd_cpu_device")
    members: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: "cpu",
        "get_device_name": lambda *_: "cpu",
        "mem_get_info": lambda *_: _virtual_memory(),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }
    for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
        members[name] = lambda *_, **__: 0
    for name in (
        "empty_cache",
        "synchronize",
        "set_device",
        "ipc_collect",
        "reset_peak_memory_stats",
        "manual_seed",
        "manual_seed_all",
    ):
        members[name] = lambda *_, **__: None
    for name, value in members.items():
        setattr(module, name, value)
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The host itself as verl's device."""

    device_name = "cpu"
    vendor_name = "cpu"
    _module = _device_module()

    @property
    def device_module(self) -> types.ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:  # type: ignore[override]
        return "cpu"  # verl hands this to torch.device(...) and .to(...)

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None:
        pass

    def synchronize(self, device_index: Any = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"  # logical: ray.init(num_gpus=<ranks>) on a machine that has none

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # weights travel through shared memory instead of CUDA IPC

    def cudart(self) -> None:
        return None
