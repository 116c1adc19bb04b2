"""Muon for matrices, AdamW for embeddings and norms: at this size about twice as fast per token as AdamW alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MuonAdamW:
    """Muon (Jordan et al. 2024) with momentum .95 and updates scaled to AdamW's size by 0.2·√max(shape).

    Matrices of one shape are orthogonalised together in one batch of Newton-Schulz iterations.
    """

    def __init__(self, model: nn.Module, weight_decay: float = 0.05) -> None:
        named = list(model.named_parameters())
        self.matrices = [p for name, p in named if p.dim() == 2 and "embed" not in name]
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        self.weight_decay = weight_decay
        embeddings = [p for name, p in named if "embed" in name]
        scales = [p for _, p in named if p.dim() < 2]
        self.adamw = torch.optim.AdamW(
            [{"params": embeddings, "weight_decay": weight_decay}, {"params": scales, "weight_decay": 0.0}],
            lr=0.0,
            betas=(0.9, 0.98),
        )

    def zero_grad(self) -> None:
        self.adamw.zero_grad()
        for matrix in self.matrices:
            matrix.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        by_shape: dict[torch.Size, list[int]] = {}
        nesterov = []
        for index, (matrix, momentum) in enumerate(zip(self.matrices, self.momenta, strict=True)):
            assert matrix.grad is not None, "step() comes after backward()"
            momentum.mul_(0.95).add_(matrix.grad)
            nesterov.append(matrix.grad + 0.95 * momentum)
            by_shape.setdefault(matrix.shape, []).append(index)
        for shape, indices in by_shape.items():
            for i, update in zip(indices, orthogonalized(torch.stack([nesterov[i] for i in indices])), strict=True):
                self.matrices[i].mul_(1 - learning_rate * self.weight_decay)
                self.matrices[i].add_(update, alpha=-learning_rate * 0.2 * max(shape) ** 0.5)

    def state_dict(self) -> dict:
        return {"adamw": self.adamw.state_dict(), "momenta": self.momenta}

    def load_state_dict(self, state: dict) -> None:
        self.adamw.load_state_dict(state["adamw"])
        self.momenta = state["momenta"]


def orthogonalized(batch: Tensor, iterations: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly: quintic Newton-Schulz on ``(N, rows, columns)``."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = batch.shape[1] > batch.shape[2]
    x = batch.mT if tall else batch
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
