"""``python -m verl.agentopsd.evaluate MODEL``: plays a panel of games with a model, one record per episode.

MODEL is a Hugging Face folder or id, a LoRA adapter's folder, or a training run of ours: the run directory (its latest
checkpoint), checkpoints/global_step_N, or the actor folder in it. Without MODEL: the model of the configuration, which
is the shipped one. Anything of the form KEY=VALUE is a Hydra override, as in training.
"""

from __future__ import annotations

import argparse
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl.agentopsd.config import ConfigError, env_section, teacher_config, validate
from verl.agentopsd.envs.base import make_family
from verl.agentopsd.evaluation.checkpoint import Source, find_model, model_hash, preset, run_overrides
from verl.agentopsd.evaluation.output import Output, check_free
from verl.agentopsd.evaluation.panel import Panel, PanelError, build_panel
from verl.agentopsd.main import compose_config
from verl.agentopsd.platform.environment import activate_cpu
from verl.agentopsd.preflight import chat_format, require_engine
from verl.agentopsd.redact import redact
from verl.agentopsd.skills.bank import SkillBank

if TYPE_CHECKING:
    from verl.agentopsd.evaluation.runner import Evaluation

EPILOG = """\
examples:
  python -m verl.agentopsd.evaluate outputs/RUN --panel valid_unseen
  python -m verl.agentopsd.evaluate outputs/RUN/checkpoints/global_step_20 --samples 8 --temperature 0.4
  python -m verl.agentopsd.evaluate Qwen/Qwen2.5-3B-Instruct device=gpu trainer.n_gpus_per_node=8
  python -m verl.agentopsd.evaluate outputs/RUN --resume          after an interruption
"""


@dataclass(frozen=True)
class Request:
    """The command line."""

    model: str | None = None
    panel: str = "all"
    limit_per_split: int | None = None
    samples: int = 1
    temperature: float | None = None
    with_skill: bool = False
    out: Path | None = None
    resume: bool = False
    overwrite: bool = False
    workers: int | None = None
    dry_run: bool = False
    overrides: list[str] = field(default_factory=list)


def parse(arguments: Sequence[str] | None = None) -> Request:
    """Reads the command line.

    Raises:
        ConfigError: options that exclude each other or cannot be.
    """
    parser = _parser()
    known = vars(parser.parse_intermixed_args(arguments))
    words = known.pop("words")
    overrides = [word for word in words if "=" in word and not Path(word).exists()]
    models = [word for word in words if word not in overrides]
    if len(models) > 1:
        raise ConfigError(f"one MODEL at a time, got {' and '.join(models)}; overrides have the form KEY=VALUE")
    request = Request(model=models[0] if models else None, overrides=overrides, **known)
    for name in ("samples", "limit_per_split", "workers"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if request.temperature is not None and not 0 <= request.temperature < float("inf"):
        raise ConfigError(f"--temperature {request.temperature:g}: must be 0 (greedy) or a positive number")
    if request.resume and request.overwrite:
        raise ConfigError("--resume and --overwrite exclude each other: continue the file, or drop it")
    return request


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m verl.agentopsd.evaluate",
        description=__doc__.split("\n\n", 1)[1] if __doc__ else None,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="MODEL | KEY=VALUE", help="what to evaluate, and Hydra overrides")
    add("--panel", default="all", metavar="NAME|FILE", help="valid_seen, valid_unseen, all (both; the default), train, "
        "valid_train, or a file with one game id per line")  # fmt: skip
    add("--limit-per-split", type=int, metavar="N", help="only N games of each split, spread over the task types")
    add("--samples", type=int, default=1, metavar="K", help="episodes per game, for pass@k and avg@k (1)")
    add("--temperature", type=float, metavar="T", help="sampling temperature (0: greedy)")
    add("--with-skill", action="store_true", help="control: put the skill of each game into the prompt; labelled")
    add("--out", type=Path, metavar="FILE", help="the records (outputs/evaluation/MODEL-PANEL.jsonl)")
    add("--resume", action="store_true", help="continue an interrupted file with the missing games")
    add("--overwrite", action="store_true", help="drop an existing file")
    add("--workers", type=int, metavar="N", help="agent-loop processes; changes no result")
    add("--dry-run", action="store_true", help="check everything, print the plan and stop")
    return parser


def configure(request: Request) -> tuple[DictConfig, Source]:
    """The configuration for a request, and the model it is about.

    Settings of the checkpoint's own training run (prompts, limits) come before the command line's.

    Raises:
        ConfigError, CheckpointError: with one sentence.
    """
    overrides = list(request.overrides)
    given = request.model or str(compose_config(overrides).actor_rollout_ref.model.path)
    source = find_model(given)
    before = run_overrides(source)
    if not any(override.startswith("model=") for override in overrides):
        before.insert(0, f"model={preset(source)}")
    config = compose_config([*before, *overrides])
    if config.trainer.device != "cpu" and not any("gpu_memory_utilization" in override for override in overrides):
        config.actor_rollout_ref.rollout.gpu_memory_utilization = 0.85  # there is no trainer to share with
    temperature = config.actor_rollout_ref.rollout.val_kwargs.temperature
    if request.temperature is not None:
        temperature = request.temperature
    if request.samples > 1 and temperature == 0:
        raise ConfigError(
            f"--samples {request.samples} at temperature 0 plays the same episode {request.samples} times: add "
            "--temperature, for example 0.4"
        )
    _stand_alone(config, request, float(temperature))
    _check(config)
    return config, source


def _stand_alone(config: DictConfig, request: Request, temperature: float) -> None:
    """Sets what an engine without training workers needs."""
    rollout = config.actor_rollout_ref.rollout
    with open_dict(config):
        rollout.nnodes = config.trainer.nnodes
        rollout.n_gpus_per_node = config.trainer.n_gpus_per_node
        rollout.load_format = "auto"  # no trainer will send weights
        rollout.val_kwargs.n = request.samples
        rollout.val_kwargs.temperature = temperature
        rollout.val_kwargs.do_sample = temperature > 0
        if request.workers is not None:
            rollout.agent.num_workers = request.workers
        config.transfer_queue.enable = True


def _check(config: DictConfig) -> None:
    """The training's checks, without those that are about sharing a batch among ranks."""
    alone = config.copy()
    with open_dict(alone):
        alone.trainer.n_gpus_per_node, alone.trainer.nnodes = 1, 1
        # an evaluation has servers alone, which a training run refuses; their size is checked below
        alone.actor_rollout_ref.rollout.nnodes = 0
        alone.actor_rollout_ref.rollout.tensor_model_parallel_size = 1
    validate(alone)
    rollout = config.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    devices = rollout.nnodes * rollout.n_gpus_per_node
    if devices < size:
        raise ConfigError(
            f"one server needs {size} devices (tensor × data × pipeline parallel), but trainer.nnodes × "
            f"trainer.n_gpus_per_node is {devices}"
        )


def default_out(source: Source, panel: Panel, request: Request, temperature: float) -> Path:
    """``outputs/evaluation/MODEL-PANEL[-T0.4x8][-skill].jsonl``."""
    how = f"-T{temperature:g}x{request.samples}" if temperature else ""
    skill = "-skill" if request.with_skill else ""
    return Path("outputs") / "evaluation" / f"{source.name}-{panel.name}{how}{skill}.jsonl"


def prepare(request: Request) -> tuple[Evaluation, Path, dict[str, str], list[str]]:
    """Everything that can be found out before the engine starts; cheap checks come first.

    Returns:
        The evaluation, its file, the environment of the workers, and the plan.
    """
    config, source = configure(request)
    environment = activate_cpu() if config.trainer.device == "cpu" else {}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl lists the engines that are not installed
        from verl.agentopsd.evaluation.checkpoint_merge import materialize
        from verl.agentopsd.evaluation.runner import Evaluation, check_prompts
    require_engine(config)
    family = make_family(env_section(config))
    try:
        panel = build_panel(request.panel, family.tasks, limit_per_split=request.limit_per_split)
    except PanelError:
        raise
    except ValueError as error:
        raise ConfigError(f"--panel {request.panel}: {error}, and no such file") from error
    settings = teacher_config(config)
    bank = SkillBank.load(settings.skills, family.task_types, on_missing=settings.on_missing_skill)
    temperature = float(config.actor_rollout_ref.rollout.val_kwargs.temperature)
    out = (request.out or default_out(source, panel, request, temperature)).absolute()
    check_free(out, overwrite=request.overwrite, resume=request.resume)
    folder = materialize(source, str(config.actor_rollout_ref.rollout.dtype))
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with open_dict(config):
        config.actor_rollout_ref.model.path = str(folder)
        loops = files("agentopsd_config").joinpath("agent_loops.yaml")
        config.actor_rollout_ref.rollout.agent.agent_loop_config_path = str(loops)
        config.run_dir = str(out.with_name(out.name + ".work"))
    chat = chat_format(config, str(folder))
    tokens = check_prompts(config, family, panel, chat, bank if request.with_skill else None)
    OmegaConf.resolve(config)
    evaluation = Evaluation(
        config=config,
        family=family,
        panel=panel,
        chat=chat,
        bank=bank,
        model=str(Path(source.path)) if source.kind != "hub" else source.path,
        name=source.name,
        step=source.step,
        model_hash=model_hash(folder),
        samples=request.samples,
        skill=request.with_skill,
    )
    return evaluation, out, environment, [*plan(evaluation, folder, out), tokens]


def plan(evaluation: Evaluation, folder: Path, out: Path) -> list[str]:
    """What is going to happen, in a few lines."""
    config, panel = evaluation.config, evaluation.panel
    rollout, env = config.actor_rollout_ref.rollout, config.env
    temperature = rollout.val_kwargs.temperature
    counts = ", ".join(f"{split} {count}" for split, count in panel.counts.items())
    lines: dict[str, Any] = {
        "model": f"{folder} ({evaluation.model_hash})",
        "panel": f"{panel.name} ({panel.hash}): {counts}",
        "episodes": f"{evaluation.samples} per game, at most {env.max_turns} turns, "
        + (f"temperature {temperature:g}" if temperature else "greedy"),
        "prompts": f"{env.prompt_style}, {env.action_format}"
        + (" — control: with the skill of each game" if evaluation.skill else ", no skill"),
        "engine": f"{rollout.name}, {rollout.nnodes} × {rollout.n_gpus_per_node} {config.trainer.device}, "
        f"{rollout.agent.num_workers} agent-loop workers",
        "records": out,
    }
    return [f"{name:8s} {text}" for name, text in lines.items()]


def evaluate(request: Request) -> int:
    """Runs one evaluation. Returns the exit status."""
    from rich.console import Console

    evaluation, out, environment, lines = prepare(request)
    print("\n".join(lines), flush=True)
    if request.dry_run:
        return 0

    from verl.agentopsd.evaluation.runner import print_table, run

    output = Output(
        out,
        evaluation.settings(),
        [task.game_id for task in evaluation.panel.tasks],
        evaluation.samples,
        overwrite=request.overwrite,
        resume=request.resume,
    )
    summary = output.summary
    if summary is not None:
        print(f"{out} is already finished")
        output.writer.close()
    else:
        done = evaluation.episodes - len(output.missing)
        if done:
            print(f"continues after {done} of {evaluation.episodes} episodes", flush=True)
        summary = run(evaluation, output, environment)
    console = Console()
    print_table(summary, output.episodes(), console if console.is_terminal else Console(width=140))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. Returns 0 when the file is finished, 1 after one clear sentence, 130 when interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return evaluate(parse(arguments))
    except KeyboardInterrupt:
        print("\nstopped; what was played is kept: the same command with --resume continues", file=sys.stderr)
        return 130
    except Exception as error:
        if not type(error).__module__.startswith("verl.agentopsd"):
            raise
        print(redact(f"error: {error}"), file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
