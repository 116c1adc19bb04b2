"""Step-OPSD: turns are weighted by their own evidence, without history.

    e_k = Σ_t d_t,   w_k = clip(1 + b z(sign(A) e_k), 1 ± b),   Ã_k = A [(1−λ) + λ w_k]

z standardises within the trajectory, so that the weights of an episode share one budget. Idea: StepOPSD, arXiv
2605.27140, which rereads with hindsight (``agentopsd.teacher.privilege=hindsight``) and also shapes tokens within a
turn. Here it is AgentOPSD's weight without the belief: the two differ in the recursion alone. Defaults λ .5, b .2.
"""

import dataclasses

from torch import Tensor

from verl.agentopsd.credit import Credit, CreditConfig, agentopsd_credit
from verl.agentopsd.methods.base import Method


def step_credit(
    advantages: Tensor, gaps: Tensor, turn_ids: Tensor, success_rate: Tensor, config: CreditConfig
) -> Credit:
    """The rule above, whatever ``agentopsd.recursion`` and ``agentopsd.granularity`` say."""
    alone = dataclasses.replace(config, recursion=False, granularity="turn")
    return agentopsd_credit(advantages, gaps, turn_ids, success_rate, alone)


METHOD = Method("step_opsd", rescored="nonzero", credit=step_credit)
