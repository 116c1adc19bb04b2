"""What the planner knows about devices: data sheets for GPUs, a measured machine for the CPU."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One accelerator (or one CPU process).

    Attributes:
        memory: bytes.
        flops: dense multiply-adds in the training precision, 2 per multiply-add, per second (data sheet).
        bandwidth: bytes per second between memory and the arithmetic units (data sheet).
        step_overhead: seconds that one decoding step of the rollout engine takes whatever it computes: scheduling,
            kernel starts, sampling, the way to the agent loop and back.
    """

    name: str
    memory: int
    flops: float
    bandwidth: float
    step_overhead: float = 0.006


DEVICES = {
    device.name: device
    for device in (
        Device("A100-40GB", 40 * GIB, 312e12, 1.555e12),
        Device("A100-80GB", 80 * GIB, 312e12, 2.039e12),
        Device("H100-80GB", 80 * GIB, 989e12, 3.35e12),
        Device("H200", 141 * GIB, 989e12, 4.8e12),
        Device("H20", 96 * GIB, 148e12, 4.0e12),
        Device("B200", 180 * GIB, 2250e12, 8.0e12),
        Device("L40S", 48 * GIB, 362e12, 0.864e12),
        Device("A10G", 24 * GIB, 70e12, 0.6e12),
        Device("RTX4090", 24 * GIB, 165e12, 1.008e12),
        # One thread of AVX2 in float32; its speed is that of the old log-probs of the run in README.md.
        Device("cpu", 8 * GIB, 84e9, 20e9, step_overhead=0.016),
    )
}

DEFAULT = "H100-80GB"


def device_of(product: str) -> Device | None:
    """The entry for a product name of ``nvidia-smi``, such as ``NVIDIA A100-SXM4-80GB``; None when it is not listed."""
    text = product.upper().replace(" ", "").replace("-", "")
    for name, device in DEVICES.items():
        model, _, size = name.upper().partition("-")
        if model in text and f"G{model}" not in text and (not size or size in text or model == "H100"):
            return device
    return None
