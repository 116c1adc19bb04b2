"""The main command with another method at every update: all methods see the real stack for the price of one start."""

from __future__ import annotations

import functools
import sys
from typing import Any

from verl.utils.config import omega_conf_to_dataclass

from verl.agentopsd.main import main
from verl.agentopsd.methods import METHODS
from verl.agentopsd.methods.base import DistillConfig
from verl.agentopsd.methods.loss import distilled_loss
from verl.agentopsd.trainer import AgentOPSDTrainer

ORDER = ("agentopsd", "step_opsd", "rlsd", "opd", "sdar", "grpo_opsd", "skill_sd")


def rotate() -> None:
    """From here on, update n trains with the n-th method."""
    compute_advantage = AgentOPSDTrainer._compute_advantage

    def rotating(self: AgentOPSDTrainer, batch: Any, metrics: dict) -> Any:
        self.method = METHODS[ORDER[(self.global_steps - 1) % len(ORDER)]]
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
