"""vLLM worker extension for the CPU: verl's own, with linear layers that accept new weights.

Named in ``actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls``.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


def keep_linear_weights_loadable() -> None:
    """``vllm/model_executor/layers/utils.py:dispatch_cpu_unquantized_gemm`` packs a linear layer's weight for oneDNN
    and drops the original, so that the next weight update finds nothing to write to. Multiply with the plain weight.
    """
    import vllm.model_executor.layers.utils as layers

    def dispatch(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]

    layers.dispatch_cpu_unquantized_gemm = dispatch


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension (weight updates, vocabulary mask) on vLLM's CPU worker."""

    def __new__(cls, **kwargs: Any) -> CPUWorkerExtension:
        keep_linear_weights_loadable()
        return vLLMColocateWorkerExtension.__new__(cls, **kwargs)
