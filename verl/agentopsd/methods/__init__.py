"""Every way to train, one short file each. ``algorithm.adv_estimator`` names one; ``method=`` also sets constants."""

from __future__ import annotations

from verl.agentopsd.methods import agentopsd, grpo, grpo_opsd, opd, rlsd, sdar, skill_grpo, skill_sd, step_opsd
from verl.agentopsd.methods.base import Method

METHODS: dict[str, Method] = {
    module.METHOD.name: module.METHOD
    for module in (agentopsd, grpo, opd, rlsd, sdar, grpo_opsd, skill_sd, step_opsd, skill_grpo)
}
