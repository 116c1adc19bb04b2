"""GRPO: one advantage for the whole trajectory, no teacher.

    A_i = (R_i − mean_j R_j) / (std_j R_j + 1e-6)        over the valid episodes j of the group, sample std

on every action token of episode i. Source: arXiv 2402.03300; the estimator is verl's. ``method=rloo`` takes verl's
leave-one-out baseline instead, ``method=dr_grpo`` drops the division by std and by length (arXiv 2503.20783).
"""

from verl.agentopsd.methods.base import Method

METHOD = Method("grpo")
