"""Log-probs of the sampled tokens alone: no logits for observations, prompts and padding, and never all at once.

A training engine that multiplies every hidden state with the output matrix builds (tokens × vocabulary) numbers: 622 MB
for 1,024 tokens of Qwen's 151,936. What the method needs is one number per action token.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 128
"""Positions per block of logits."""


def action_log_probs(
    hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, temperature: float = 1.0, chunk: int = CHUNK
) -> Tensor:
    """(A,) float32: log-prob of each token where ``mask`` is True, in row-major order.

    Equal to ``log_softmax(hidden @ weight.T / temperature)`` at the position before the token.

    Args:
        hidden: (N,T,H) last hidden states.
        weight: (V,H) output matrix.
        ids: (N,T) token ids.
        mask: (N,T) bool, True on the tokens to score; column 0 must be False, nothing predicts it.
    """
    if mask[:, 0].any():
        raise ValueError("the first token of a row has no log-prob: nothing stands before it")
    before = hidden[:, :-1][mask[:, 1:]]
    targets = ids[:, 1:][mask[:, 1:]]
    parts = [
        _block(states, weight, wanted, temperature)
        for states, wanted in zip(before.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)


def _block(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight).float()
    if temperature != 1.0:
        logits /= temperature
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)
