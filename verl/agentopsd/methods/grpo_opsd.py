"""GRPO + OPSD: a reverse KL to the privileged teacher on sampled tokens.

    L = L_GRPO + coef · mean_t KL(π_θ ‖ π_T)_t        coef .01

estimated on the sampled token with r = log π_θ − log π_T by k2 = r²/2, or by ``k3+``: the value of k3 = e^(−r) + r − 1
(never negative, low variance) with the gradient of k2, which is r ∇log π_θ and so the gradient of the KL when y_t comes
from π_θ. Plain k3 has another gradient, that of the forward KL. Source: OPSD, arXiv 2601.18734; estimators:
Schulman, "Approximating KL divergence" (2020); both are verl's ``kl_penalty``.

A form found in released code multiplies log π_θ by a gate that does not depend on the teacher: the gradient is then the
same for every teacher and only makes sampled tokens more likely. It is not reproduced here.
"""

from typing import Any

from torch import Tensor

from verl.agentopsd.methods.base import DistillConfig, LossInputs, Method, even_credit


def reverse_kl_loss(inputs: LossInputs, config: DistillConfig) -> Tensor:
    """Mean reverse KL to the teacher, a scalar."""
    from verl.trainer.ppo.core_algos import kl_penalty

    kl: Any = kl_penalty  # annotated for CUDA's float32 alone
    return inputs.aggregate(kl(inputs.log_probs, inputs.teacher_log_probs.detach(), config.kl))


METHOD = Method("grpo_opsd", rescored="valid", credit=even_credit, loss_term=reverse_kl_loss)
