"""Environment variables of a CPU run: what verl, vLLM, torch and Ray read at start-up, and why it is set.

A variable that the user has already set is left alone.
"""

from __future__ import annotations

import logging
import os

CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",  # verl picks platform/cpu.py
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engine under this device name only
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding threads to cores starves the other processes of a small machine
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",  # two threads were 5-12 times slower than one whenever a core was busy
    "MKL_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VERL_LOGGING_LEVEL": "WARNING",
    "TQ_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_task_events_report_interval_ms": "0",  # else Ray keeps the last 100,000 calls in memory, for its dashboard
    "TRANSFORMERS_VERBOSITY": "error",
}


def activate_cpu() -> dict[str, str]:
    """Makes this process, and through the returned variables every worker, use the CPU platform.

    Must run before the first CUDA query of verl in this process; replaces a platform that was detected earlier.
    """
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)

    # verl read VERL_LOGGING_LEVEL when it was imported, before it could be set for this process
    logging.getLogger("verl.plugin.platform.platform_manager").setLevel(os.environ["VERL_LOGGING_LEVEL"])
    from verl.plugin.platform import get_platform, set_platform

    from verl.agentopsd.platform import patches
    from verl.agentopsd.platform.cpu import PlatformCPU

    if not isinstance(get_platform(), PlatformCPU):
        set_platform(PlatformCPU())
    patches.apply()
    return {name: os.environ[name] for name in CPU_ENVIRONMENT}
