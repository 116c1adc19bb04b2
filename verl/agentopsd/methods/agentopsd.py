"""AgentOPSD: turn-level credit by a recursive belief; the rule and its symbols are in ``credit.py``.

    e_k = Σ_t d_t,   B_k = σ(logit B_0 + Σ_j γ^(k−j) e_j),   w_k = clip(1 + b z(sign(A) ΔB_k), 1 ± b)
    Ã_k = A [(1−λ) + λ w_k]

Source: arXiv 2608.05987. Defaults λ .5, γ .95, b .2, ε 1e-4. Ablations are constants of the same rule
(``method=agentopsd_token``, ``_no_recursion``, ``_magnitude``, ``_prior_half``, ``_shuffled``).
"""

from verl.agentopsd.credit import agentopsd_credit
from verl.agentopsd.methods.base import Method

METHOD = Method("agentopsd", rescored="nonzero", credit=agentopsd_credit, believes=True)
