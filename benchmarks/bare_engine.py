"""verl's FSDP engine around any model, without a process group: what it does with a micro-batch, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl.agentopsd.platform.action_logits import engine_class

UPSTREAM, OURS = FSDPEngineWithLMHead, engine_class(FSDPEngineWithLMHead)


def bare_engine(kind: type, model: nn.Module, bucket: int = 0, ranks: int = 1) -> Any:
    """An engine on the CPU in float32 whose micro-batches are forwarded by ``model``.

    Args:
        kind: :data:`UPSTREAM` or :data:`OURS`.
        bucket: pads packed rows to a multiple of this many tokens; 0: does not.
        ranks: that share a row (Ulysses), in the group that was set for it.
    """
    for function in ("get_device_id", "get_device_name"):
        setattr(transformer_impl, function, lambda: "cpu")
    made: Any = kind.__new__(kind)
    made.module, made.pad_to_length, made.pad_to_length_bucket = model, bool(bucket), bucket
    made.use_ulysses_sp, made.ulysses_sequence_parallel_size = ranks > 1, ranks
    made.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    made.compute_entropy_from_logits = lambda logits: torch.distributions.Categorical(logits=logits).entropy()
    made._autocast_dtype = torch.float32
    made.get_data_parallel_group = lambda: None
    if kind is OURS:
        made.choose_positions(True)
    return made


def micro_batch(rows: list[Tensor], masks: list[Tensor], **settings: Any) -> TensorDict:
    """What the engine is given: jagged columns, and its settings.

    Args:
        rows: (L,) int64 ids of each row.
        masks: (T,) of each row, over its last T tokens.
    """
    columns = {"input_ids": rows, "position_ids": [torch.arange(len(row)) for row in rows], "loss_mask": masks}
    tensors: Any = {
        name: torch.nested.as_nested_tensor(column, layout=torch.jagged) for name, column in columns.items()
    }
    tensors |= {name: value for name, value in settings.items() if isinstance(value, Tensor)}
    return tu.get_tensordict(tensors, {name: value for name, value in settings.items() if name not in tensors})
