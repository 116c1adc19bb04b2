"""Runs one training from a checked configuration: Ray, transfer queue, trainer, and the clean end of all of them.

verl's own runner is a Ray actor; ours runs in the driver process: one process less to start, Ctrl-C and errors arrive
where the user is, and the progress bar has a terminal.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import psutil
from omegaconf import DictConfig, OmegaConf, open_dict

from verl.agentopsd import trackers
from verl.agentopsd.checkpoints import out_of_space, write_atomically
from verl.agentopsd.doctor import resources
from verl.agentopsd.platform import reaper, weight_channel
from verl.agentopsd.platform.forked import preload
from verl.agentopsd.platform.loopback import loopback_only
from verl.agentopsd.ray_auth import use_token_if_there
from verl.agentopsd.redact import RedactingFile, redact, redact_yaml, without_secrets
from verl.agentopsd.rollout.failures import FILE_NAME as FAILURES
from verl.agentopsd.run_guard import lock_run_dir
from verl.agentopsd.submit import for_workers
from verl.agentopsd.termination import Stopped, Termination
from verl.agentopsd.watchdog import kill_children, stage

logger = logging.getLogger(__name__)


MIN_FREE_BYTES = 2 * 2**30


class RunDirError(RuntimeError):
    """The run directory cannot take this run."""


class WorkerFailed(RuntimeError):
    """A worker process died or raised an error."""


class ResourceError(RuntimeError):
    """The Ray cluster cannot hold this run."""


def run(config: DictConfig, environment: dict[str, str]) -> None:
    """Trains until ``trainer.total_training_steps`` or SIGTERM; leaves no process behind, however it ends.

    Args:
        config: composed, validated; resolved here.
        environment: variables that every worker process must have.

    Raises:
        WorkerFailed: a worker died or raised; its trace is in ``verl.log``.
        RunDirError: the disk is full.
    """
    termination = Termination()
    termination.install()

    lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    try:
        run_dir = prepare_run_dir(config)
        lock = take_run_dir(run_dir)
        start_ray(config, environment)
        termination.install()  # Ray has taken the signal over
        with (run_dir / "verl.log").open("a", encoding="utf-8") as log:
            quiet: Any = RedactingFile(log)
            with contextlib.redirect_stdout(quiet), warnings.catch_warnings(), explained(run_dir, quiet):
                warnings.simplefilter("ignore")  # of the libraries; what concerns the user is an error or a metric
                _train(config, termination)
    except OSError as error:  # of verl.log too, whose last lines are written when it is closed
        if out_of_space(error):
            raise RunDirError(_DISK_FULL.format(run_dir=config.run_dir)) from error
        raise
    except (Stopped, KeyboardInterrupt) as stop:
        if not termination.requested:
            raise
        print(stop if isinstance(stop, Stopped) else "stopped by SIGTERM before the first update", flush=True)
    finally:
        stop_ray()
        with lock:
            pass  # released last: until here another run would meet our processes


@contextlib.contextmanager
def explained(run_dir: Path, log: TextIO) -> Iterator[None]:
    """Turns what a dead or failing worker and a full disk look like from here into one sentence each."""
    import ray

    try:
        yield
    except ray.exceptions.RayError as error:
        log.write("".join(traceback.format_exception(error)))
        if out_of_space(error):
            raise RunDirError(_DISK_FULL.format(run_dir=run_dir)) from error
        kind = "has died" if isinstance(error, ray.exceptions.RayActorError) else "failed"
        raise WorkerFailed(
            f"a worker process {kind}: {cause_of(error)} (all of it in {run_dir / 'verl.log'}). The same command with "
            "the same run_dir continues from the last checkpoint"
        ) from error
    except OSError as error:
        if out_of_space(error):
            raise RunDirError(_DISK_FULL.format(run_dir=run_dir)) from error
        raise


_DISK_FULL = (
    "no space left on the disk of run_dir={run_dir}: what was written until here is intact; free some space and give "
    "the same run_dir to continue from the last checkpoint"
)


def cause_of(error: BaseException) -> str:
    """One line of a remote error: the error itself stands last, behind its traceback; a death is told first."""
    import ray

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[0] if isinstance(error, ray.exceptions.RayActorError) else lines[-1]


_reapers: list[subprocess.Popen[bytes] | None] = []
"""End, should this process be killed, what it has started; referred to as long as they run."""


def start_ray(config: DictConfig, environment: dict[str, str]) -> None:
    """Starts or joins Ray with verl's runtime environment and ours, then checks that the run fits.

    Raises:
        ResourceError: with the arithmetic.
    """
    import ray
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    if not ray.is_initialized():
        defaults = get_ppo_ray_runtime_env(config)
        variables = {"TRANSFER_QUEUE_ENABLE": "1", **environment, **weight_channel.variables()}
        defaults.setdefault("env_vars", {}).update(variables)
        options = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
        assert isinstance(options, dict)
        given = {key: value for key, value in (options.pop("runtime_env", None) or {}).items() if value is not None}
        given["env_vars"] = {**defaults.pop("env_vars"), **given.get("env_vars", {})}
        if os.environ.get("RAY_ADDRESS"):
            # its nodes were started from other shells
            given["env_vars"] = {**for_workers(os.environ), **given["env_vars"]}
            use_token_if_there()
            # in a Ray job: a variable that the job has too (HF_HUB_OFFLINE, say) is no conflict, the run's value counts
            os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
            # a running cluster has its own resources
            options = {key: options[key] for key in options if key in ("log_to_driver", "namespace", "address")}
        elif config.trainer.nnodes == 1 or config.trainer.device == "cpu":
            options["address"] = "local"  # never a cluster that happens to run here
            if options.get("num_cpus") is None:  # counted, not used: what the run asks for must be there
                options["num_cpus"] = max(os.cpu_count() or 1, resources.needs(config).cpus)
        if config.trainer.device == "cpu" and not os.environ.get("RAY_ADDRESS"):
            loopback_only()
            if server := preload.current():
                given.setdefault("py_executable", shlex.quote(str(server.python)))  # Ray gives it to a shell
        options |= {"runtime_env": {**defaults, **given}, "logging_level": logging.ERROR}
        init_ray({str(name): value for name, value in options.items()})
        started = psutil.Process().children(recursive=True)
        _reapers.append(reaper.watch_over([process.pid for process in started]))
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if problem := resources.cluster_problem(resources.needs(config), nodes):
        raise ResourceError(problem)


def stop_ray() -> None:
    """Ends Ray and every process that descends from this one; a cluster that was joined is not ours."""
    import ray

    with contextlib.suppress(Exception):
        ray.shutdown()
    kill_children()


def init_ray(options: dict[str, Any]) -> None:
    """``ray.init``, once more when a local node was too slow: Ray allows it 30 s, which a busy machine can exceed."""
    import ray

    try:
        ray.init(**options)
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        print("Ray did not start within its 30 s; trying once more", file=sys.stderr)
        ray.shutdown()
        kill_children(spare=[server.process.pid] if (server := preload.current()) else [])
        ray.init(**options)


def _train(config: DictConfig, termination: Termination) -> None:
    import transfer_queue as tq
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ, trainer_base
    from verl.workers.rollout.replica import get_rollout_replica_class

    from verl.agentopsd.trainer import AgentOPSDTrainer

    with open_dict(config):
        config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    write_run_files(config)
    trackers.set_aside(config)
    quiet_libraries()
    # upstream draws a bar of its own; ours has the success rate in it
    trainer_base.tqdm = functools.partial(trainer_base.tqdm, disable=True)
    trainer_base.Tracking = without_secrets(trainer_base.Tracking)  # type: ignore[misc, assignment]
    with stage("start", float(config.limits.start), Path(config.run_dir)):
        get_rollout_replica_class(config.actor_rollout_ref.rollout.name)  # imports the engine while others start
        preload.wait(0.9 * float(config.limits.start))  # before the stage, which could not say what is missing
        tq.init(config.transfer_queue)
    trainer, finished = None, False
    try:
        trainer = AgentOPSDTrainer(config)
        trainer.termination = termination
        trainer.init()
        agent_loops = AgentLoopManagerTQ.create(
            config=config,
            llm_client=trainer.get_llm_client(),
            teacher_client=None,
            reward_loop_worker_handles=trainer.get_reward_handles(),
        )
        trainer.fit(agent_loops)
        finished = True
    finally:
        if trainer is not None and trainer.logger is not None:
            trainer.logger.finish(exit_code=0 if finished else 1)
        with contextlib.suppress(Exception):
            tq.close()


def prepare_run_dir(config: DictConfig) -> Path:
    """Makes the run directory. A finished or interrupted run in it is continued, never overwritten.

    Raises:
        RunDirError: it cannot be written, has too little space, or holds a run while resuming is switched off.
    """
    run_dir = Path(config.run_dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / ".writable").touch()
        (run_dir / ".writable").unlink()
    except OSError as error:
        raise RunDirError(f"run_dir={run_dir} cannot be written ({error.strerror}): choose another folder") from error
    if (free := shutil.disk_usage(run_dir).free) < MIN_FREE_BYTES:
        raise RunDirError(
            f"run_dir={run_dir}: {free / 2**30:.1f} GiB free, a run needs {MIN_FREE_BYTES / 2**30:.0f} GiB for "
            "checkpoints and records: free some space or choose a folder on another disk"
        )
    if config.trainer.resume_mode == "disable" and (run_dir / "metrics.jsonl").exists():
        raise RunDirError(
            f"run_dir={run_dir} already holds a run and trainer.resume_mode=disable would overwrite it: choose another "
            "run_dir, or trainer.resume_mode=auto to continue it"
        )
    return run_dir


def take_run_dir(run_dir: Path) -> TextIO:
    """Locks the run directory (:func:`~.run_guard.lock_run_dir`) and clears what workers of an earlier run reported."""
    lock = lock_run_dir(run_dir)
    (run_dir / FAILURES).unlink(missing_ok=True)
    return lock


def quiet_libraries() -> None:
    """Their loggers were made when verl was imported, before the environment could be set for this process."""
    import transformers

    transformers.logging.set_verbosity_error()
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("transfer_queue"):
            logging.getLogger(name).setLevel(os.environ.get("TQ_LOGGING_LEVEL", "WARNING"))


def write_run_files(config: DictConfig) -> None:
    """The resolved configuration and what it ran on, in the run directory."""
    run_dir = Path(config.run_dir)
    text, stored = redact_yaml(config), run_dir / "config.yaml"
    if stored.is_file() and stored.read_text(encoding="utf-8") != text:
        number = len(list(run_dir.glob("config-*.yaml"))) + 1
        stored.rename(run_dir / f"config-{number}.yaml")  # what the run had until now
    write_atomically(stored, text)
    write_atomically(run_dir / "versions.json", redact(json.dumps(versions(), indent=2)) + "\n")


def versions() -> dict[str, str]:
    """Versions of what decides the numbers, and the git revision when there is one."""
    import importlib.metadata
    import platform
    import subprocess

    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("verl-agentopsd", "verl", "vllm", "torch", "ray", "transformers", "tensordict", "TransferQueue"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        found["git"] = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    found["argv"] = redact(" ".join(sys.argv[1:]))
    return found
