"""``python -m verl.agentopsd.main [overrides]``: composes the configuration, checks it and trains.

Overrides are Hydra's: ``agentopsd.lambda=0.3 algorithm.adv_estimator=grpo model=qwen2.5_3b device=gpu``.
``--dry-run`` stops after the checks and prints the plan; ``--cfg job`` prints the whole configuration.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib.resources import files
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf, open_dict

from verl.agentopsd.config import ConfigError, method_of, register_resolvers, suggest, validate
from verl.agentopsd.platform.environment import activate_cpu

USAGE = """usage: python -m verl.agentopsd.main [--dry-run] [--cfg job] [KEY=VALUE ...]

Trains with AgentOPSD on verl. Groups: model={models} device=cpu|gpu method={methods} env={envs}
Often changed:
  algorithm.adv_estimator=agentopsd|grpo      the method, or the same run without it
  agentopsd.lambda=0.5  agentopsd.gamma=0.95  agentopsd.bound=0.2
  trainer.total_training_steps=20  data.train_batch_size=8  actor_rollout_ref.rollout.n=8
  env.backend=exact|textworld  env.data_dir=DIR  env.seed=0
  run_dir=DIR                                 where everything is written; an existing run there is resumed
Every key:  python -m verl.agentopsd.main --cfg job
"""


def config_group(name: str) -> list[str]:
    """Choices of a configuration group."""
    folder = files("agentopsd_config").joinpath(name)
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def prepare(config: DictConfig) -> dict[str, str]:
    """Fills in what depends on this machine, then validates. Returns the environment of the workers."""
    environment = activate_cpu() if config.trainer.device == "cpu" else {}
    if Path(str(config.actor_rollout_ref.model.path)).is_dir():
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    with open_dict(config):
        loops = files("agentopsd_config").joinpath("agent_loops.yaml")
        config.actor_rollout_ref.rollout.agent.agent_loop_config_path = str(loops)
        config.run_dir = str(Path(config.run_dir).absolute())
    validate(config)
    _validate_upstream(config)
    return environment


def _validate_upstream(config: DictConfig) -> None:
    """verl's own checks, with the estimator that upstream will see."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    seen = config.copy()
    with open_dict(seen):
        seen.algorithm.adv_estimator = seen.agentopsd.base_estimator
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            validate_config(seen, use_reference_policy=need_reference_policy(seen), use_critic=need_critic(seen))
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"verl refuses this configuration: {error}") from error


def plan(config: DictConfig) -> str:
    """What the run is going to do, in a few lines."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    rule = config.agentopsd
    credit = f"λ {rule['lambda']}  γ {rule.gamma}  b {rule.bound}" if method_of(config) == "agentopsd" else "off"
    lines = {
        "run": config.run_dir,
        "model": config.actor_rollout_ref.model.path,
        "method": f"{method_of(config)}   credit: {credit}   base: {rule.base_estimator}",
        "update": f"{data.train_batch_size} games × {rollout.n} episodes, at most {config.env.max_turns} turns, "
        f"mini-batches of {config.actor_rollout_ref.actor.ppo_mini_batch_size} games",
        "lengths": f"prompt ≤ {data.max_prompt_length}, response ≤ {data.max_response_length} tokens",
        "updates": f"{config.trainer.total_training_steps}, validation on {data.val_files} every "
        f"{config.trainer.test_freq}, checkpoint every {config.trainer.save_freq}",
        "devices": f"{config.trainer.nnodes} × {config.trainer.n_gpus_per_node} {config.trainer.device}",
    }
    return "\n".join(f"{name:8s} {text}" for name, text in lines.items())


@hydra.main(version_base=None, config_path="pkg://agentopsd_config", config_name="agentopsd_trainer")
def _main(config: DictConfig) -> None:
    environment = prepare(config)
    print(plan(config), flush=True)
    if DRY_RUN:
        return
    from verl.agentopsd.task_runner import run

    run(config, environment)


DRY_RUN = False


def main() -> int:
    """Command line. 0 after a finished run, 1 with one clear sentence otherwise."""
    global DRY_RUN
    arguments = sys.argv[1:]
    if "--help" in arguments or "-h" in arguments:
        print(USAGE.format(**{f"{g}s": "|".join(config_group(g)) for g in ("model", "method", "env")}))
        return 0
    DRY_RUN = "--dry-run" in arguments
    sys.argv[1:] = [argument for argument in arguments if argument != "--dry-run"]
    register_resolvers()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # exceptions reach us instead of Hydra's printer
    try:
        _main()
    except KeyboardInterrupt:
        print("\nstopped; give the same run_dir to continue from the last checkpoint", file=sys.stderr)
        return 130
    except Exception as error:
        return _explain(error)
    return 0


def _explain(error: Exception) -> int:
    from hydra.errors import HydraException

    if isinstance(error, HydraException):
        print(f"error: {_hydra_message(error)}", file=sys.stderr)
        return 1
    if isinstance(error, ConfigError) or type(error).__module__.startswith("verl.agentopsd"):
        print(f"error: {error}", file=sys.stderr)
        return 1
    raise error


def _hydra_message(error: Exception) -> str:
    """Hydra's message, with the closest known key when an override names none."""
    text = str(error)
    for argument in sys.argv[1:]:
        key = argument.split("=", 1)[0].lstrip("+~")
        if "=" in argument and (f"'{key}'" in text or f"{key}" in text):
            from hydra import compose, initialize_config_module

            with initialize_config_module("agentopsd_config", version_base=None):
                known = OmegaConf.to_container(compose("agentopsd_trainer"), resolve=False)
            assert isinstance(known, dict)
            close = suggest(key, known)
            return f"unknown key or choice in {argument!r}" + (f"; did you mean {close}?" if close else f": {text}")
    return text


if __name__ == "__main__":
    raise SystemExit(main())
