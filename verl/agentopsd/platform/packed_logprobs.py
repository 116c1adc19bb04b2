"""Log-probabilities of packed tokens in chunks, not one by one.

Without flash-attn's cross entropy (always without a GPU) verl takes log-probs in
``verl/utils/torch_functional.py:logprobs_from_logits_v2``, which goes through (batch, tokens, vocabulary) row by row to
save memory. The FSDP engine hands it all tokens of a micro-batch as (tokens, vocabulary): its rows are single tokens,
and on a small model a loop over 10,000 of them, forth and back, takes longer than the model's own layers. Here a chunk
of tokens is a row.

Installed in every process by the ``verl.plugins`` entry point; the module is changed when it is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import torch
import wrapt
from torch import Tensor

CHUNK = 1024
"""Tokens. The memory beside the logits is that of a chunk's logits: 0.6 GB with 151,936 words in float32."""


def install() -> None:
    wrapt.register_post_import_hook(_change, "verl.utils.torch_functional")


def _change(module: ModuleType) -> None:
    module.logprobs_from_logits_v2 = in_chunks(module.logprobs_from_logits_v2)  # type: ignore[attr-defined]


def in_chunks(rowwise: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """``rowwise`` with logits (tokens, vocabulary) and labels (tokens,) taken as rows of :data:`CHUNK` tokens."""

    @functools.wraps(rowwise)
    def logprobs(logits: Tensor, labels: Tensor) -> Tensor:
        if logits.dim() != 2:
            return rowwise(logits, labels)
        chunks = zip(logits.split(CHUNK), labels.split(CHUNK), strict=True)
        return torch.cat([rowwise(some[None], own[None])[0] for some, own in chunks])

    return logprobs
