"""OPD: sampled-token distillation beside the RL loss, through the same clipping.

    L = pg_coef · L_clip(A) + coef · L_clip(d)        pg_coef 1, coef 1

L_clip(d) is the run's clipped policy loss with the teacher's gap d_t as the advantage of token t. Its gradient at
π_θ = π_old is that of the reverse KL to the teacher on sampled tokens. ``agentopsd.distill.pg_coef=0`` is pure
on-policy distillation. Source: on-policy distillation, arXiv 2306.13649, in its sampled-token form.

The two losses are clipped one by one: the sum A + d in one loss would let the sign of d decide which side of A is
clipped, and the two could not be weighted apart.
"""

from torch import Tensor

from verl.agentopsd.methods.base import DistillConfig, LossInputs, Method, even_credit


def opd_loss(inputs: LossInputs, config: DistillConfig) -> Tensor:
    """L_clip(d), a scalar."""
    return inputs.clipped(inputs.gap)


METHOD = Method("opd", rescored="valid", credit=even_credit, loss_term=opd_loss)
