"""Skill-SD: an importance-weighted reverse KL to the teacher with the skill.

    L = L_GRPO + coef · mean_t ρ_t k3_t,   ρ = π_θ/π_old,   k3 = e^u − u − 1,   u = log π_T − log π_θ
    coef .001, falling linearly to 0 over the run

Tokens come from π_old, so E_old[ρ k3] = KL(π_θ ‖ π_T) with the right gradient only when it runs through ρ as well as
through k3; with ρ detached it would be the gradient of another divergence. Source: arXiv 2604.10674. The decay is
applied at every update (``agentopsd.distill.warmdown_steps``). u and log ρ are cut at ±20 as in verl's own losses.
"""

import torch
from torch import Tensor

from verl.agentopsd.methods.base import DistillConfig, LossInputs, Method, even_credit


def importance_weighted_kl_loss(inputs: LossInputs, config: DistillConfig) -> Tensor:
    """mean ρ k3(teacher, student), a scalar."""
    ratio = torch.exp((inputs.log_probs - inputs.old_log_probs).clamp(-20, 20))
    u = (inputs.teacher_log_probs.detach() - inputs.log_probs).clamp(-20, 20)
    return inputs.aggregate(ratio * (torch.exp(u) - u - 1))


METHOD = Method("skill_sd", rescored="valid", credit=even_credit, loss_term=importance_weighted_kl_loss)
