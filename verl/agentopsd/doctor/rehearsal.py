"""Makes everything that needs neither a GPU nor Ray, as the run will make it."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.agentopsd.doctor.finding import Finding, error, ok


def check(config: DictConfig) -> list[Finding]:
    """Data set, one game opened, agent loop, trainer class, and verl's typed actor, rollout and optimizer settings."""
    return [_typed_settings(config), _dataset(config), _agent_loop(config), _trainer(config)]


def _typed_settings(config: DictConfig) -> Finding:
    from verl.utils.config import omega_conf_to_dataclass

    actor: Any = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    rollout: Any = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    omega_conf_to_dataclass(config.algorithm)
    return ok(
        "settings",
        f"{type(actor).__name__}, {type(actor.optim).__name__} lr {actor.optim.lr:g}, {type(rollout).__name__}",
    )


def _dataset(config: DictConfig) -> Finding:
    from verl.agentopsd.dataset import EpisodeDataset
    from verl.agentopsd.envs.base import make_family

    data = EpisodeDataset(config.data.train_files, tokenizer=None, config=config.data)
    family = make_family({**OmegaConf.to_container(config.env, resolve=True), "backend": "exact"})  # type: ignore[dict-item]
    env = family.make(data.tasks[0])
    try:
        family.opening(data.tasks[0], env.reset())
    finally:
        env.close()
    games = config.data.train_batch_size
    return ok("data set", f"{len(data)} games, {len(data) // games} updates of {games} games per pass")


def _agent_loop(config: DictConfig) -> Finding:
    from hydra.utils import get_class

    loops: Any = OmegaConf.load(config.actor_rollout_ref.rollout.agent.agent_loop_config_path)
    wanted = config.actor_rollout_ref.rollout.agent.default_agent_loop
    targets = {str(loop.name): str(loop._target_) for loop in loops}
    if wanted not in targets:
        known = ", ".join(targets)
        return error("agent loop", f"actor_rollout_ref.rollout.agent.default_agent_loop={wanted}: known: {known}")
    return ok("agent loop", get_class(targets[wanted]).__name__)


def _trainer(config: DictConfig) -> Finding:
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

    from verl.agentopsd.trainer import AgentOPSDTrainer

    registered = get_trainer_cls("agentopsd")
    assert registered is AgentOPSDTrainer
    return ok("trainer", f"{registered.__name__} on verl's {registered.__mro__[1].__name__}")
