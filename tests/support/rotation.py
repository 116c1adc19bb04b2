"""The main command with another method at every update: all methods see the real stack for the price of one start."""

from __future__ import annotations

import functools
import sys
from typing import Any

from omegaconf import OmegaConf, open_dict
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from verl.agentopsd.main import compose_config, main
from verl.agentopsd.methods import METHODS
from verl.agentopsd.methods.base import DistillConfig
from verl.agentopsd.methods.loss import distilled_loss
from verl.agentopsd.trainer import AgentOPSDTrainer

ORDER = ("agentopsd", "step_opsd", "rlsd", "opd", "sdar", "grpo_opsd", "skill_sd")
"""Every method with a teacher."""
BASELINES = ("rloo", "dr_grpo")
"""Configurations of ``method/`` that only change what verl itself does; they come after :data:`ORDER`."""
SWITCHED = (
    *("agentopsd.base_estimator", "algorithm.norm_adv_by_std_in_grpo", "actor_rollout_ref.actor.loss_agg_mode"),
    "actor_rollout_ref.actor.loss_scale_factor",
)


def rotate() -> None:
    """From here on, update n trains with the n-th method."""
    compute_advantage = AgentOPSDTrainer._compute_advantage

    def rotating(self: AgentOPSDTrainer, batch: Any, metrics: dict) -> Any:
        name = (*ORDER, *BASELINES)[self.global_steps - 1]
        if name in BASELINES:
            self.method, self.teacher = METHODS["grpo"], None
            wanted = compose_config([f"method={name}", "model=tiny", "device=cpu"])
            with open_dict(self.config):
                for key in SWITCHED:
                    OmegaConf.update(self.config, key, OmegaConf.select(wanted, key))
                self.config.algorithm.adv_estimator = self.config.agentopsd.base_estimator
            actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            self.actor_rollout_wg.set_loss_fn(functools.partial(ppo_loss, config=actor))
            return compute_advantage(self, batch, metrics)
        self.method = METHODS[name]
        with open_dict(self.config):  # the control of one method
            self.config.agentopsd.shuffle_evidence = self.config.agentopsd.shuffle_evidence and name == "agentopsd"
        self.distill = DistillConfig(coef=0.5)
        if self.method.loss_term is not None:
            actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            loss = functools.partial(distilled_loss, config=actor, method=self.method.name, distill=self.distill)
            self.actor_rollout_wg.set_loss_fn(loss)
        return compute_advantage(self, batch, metrics)

    AgentOPSDTrainer._compute_advantage = rotating  # type: ignore[method-assign]


if __name__ == "__main__":
    rotate()
    sys.exit(main(sys.argv[1:]))
