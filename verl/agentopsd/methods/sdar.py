"""SDAR: distillation behind a gate that opens where the teacher likes a token better than the student does.

    L = L_GRPO − coef · mean_t σ(β d_t) · log π_θ(y_t)  + const        β 5, coef .01

written as L_GRPO + coef · mean_t σ(β d_t)(log π_T − log π_θ). The gate and log π_T are detached: the gradient runs
through log π_θ alone and raises the sampled token's probability, most where d_t > 0. ``mean`` is the run's own
``actor.loss_agg_mode``. Source: Self-Distilled Agentic Reinforcement Learning, arXiv 2605.15155.
"""

import torch
from torch import Tensor

from verl.agentopsd.methods.base import DistillConfig, LossInputs, Method, even_credit


def sdar_loss(inputs: LossInputs, config: DistillConfig) -> Tensor:
    """mean σ(β d)(log π_T − log π_θ), a scalar."""
    gate = torch.sigmoid(config.beta * inputs.gap)
    return inputs.aggregate(gate * (inputs.teacher_log_probs.detach() - inputs.log_probs))


METHOD = Method("sdar", rescored="valid", credit=even_credit, loss_term=sdar_loss)
