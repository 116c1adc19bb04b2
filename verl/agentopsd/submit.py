"""Submits a run to a Ray cluster, follows its output, ends with the job's exit code (see examples/ray_submit.sh)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from verl.agentopsd.ray_auth import use_token_if_there

EXCLUDES = (
    # AgentOPSD is imported from the nodes' environment: a copy of a part of it in the working directory would mix
    # with that one
    "verl",
    "agentopsd_config",
    ".git",
    ".venv",
    ".ci",
    ".cache",
    "**/__pycache__",
    "outputs",
    "runs",
    "wandb",
    "tests",
    "docs",
    "benchmarks",
    "*.egg-info",
)
"""Not sent to the cluster: what a run does not read, and what may be large."""

PASSED = (
    "ALFWORLD_DATA",
    "VERL_USE_EXTERNAL_MODULES",
    "HF_HOME",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "WANDB_MODE",
    "WANDB_ENTITY",
    "WANDB_BASE_URL",
    "SWANLAB_MODE",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_TRACKING_USERNAME",
    "TENSORBOARD_DIR",
    "VERL_FILE_LOGGER_PATH",
    "VERL_FILE_LOGGER_ROOT",
)
PASSED_PREFIXES = ("NCCL_", "GLOO_")
"""Every variable of the network between GPUs and between nodes is passed."""
SECRET = ("WANDB_API_KEY", "SWANLAB_API_KEY", "HF_TOKEN", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")
"""Passed when they are set here, like the others, and shown by name only."""

STOP_SECONDS = 1800
"""Ray kills a stopped job after 3 s unless told otherwise; a run completes its update and saves before it ends."""

FOLLOW_ATTEMPTS = 12
LONGEST_WAIT = 30.0
"""Seconds before the output is followed again; the first waits are shorter. All of them: 4 minutes."""


class Refused(RuntimeError):
    """The cluster does not accept the job."""


class Lost(RuntimeError):
    """The job's output cannot be followed any more; the job itself may go on."""


def runtime_env(root: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The job's runtime environment.

    The working directory is the checkout without :data:`EXCLUDES`: it carries files that overrides name (a folder of
    skills, say). Workers import AgentOPSD from the environment that is installed on the nodes.
    """
    secrets = {name: environment[name] for name in SECRET if environment.get(name)}
    variables = {**for_workers(environment), **secrets, "PYTHONUNBUFFERED": "1"}
    variables["RAY_JOB_STOP_WAIT_TIME_S"] = environment.get("RAY_JOB_STOP_WAIT_TIME_S", str(STOP_SECONDS))
    return {"working_dir": root, "excludes": list(EXCLUDES), "env_vars": variables}


def for_workers(environment: Mapping[str, str]) -> dict[str, str]:
    """What workers on other nodes need to know of this environment; no secrets but the Hub's token."""
    network = sorted(name for name in environment if name.startswith(PASSED_PREFIXES))
    return {name: environment[name] for name in (*PASSED, *network, "HF_TOKEN") if environment.get(name)}


def entrypoint(python: str, overrides: Sequence[str]) -> str:
    """The job's command; every override is one word, whatever is in it."""
    return shlex.join([python, "-m", "verl.agentopsd.main", *overrides])


def run_dir_problem(overrides: Sequence[str]) -> str | None:
    """A job's working directory is deleted with the job: a run must be written elsewhere."""
    named = [override.partition("=")[2].strip("'\"") for override in overrides if override.startswith("run_dir=")]
    if named and os.path.isabs(named[-1]):
        return None
    return (
        f"run_dir={named[-1] if named else '(not given)'} would lie in the job's working directory, which Ray deletes: "
        "give run_dir=/an/absolute/path on a disk that all nodes see"
    )


def shown(environment: Mapping[str, Any]) -> dict[str, Any]:
    """``environment`` with secrets replaced by dots."""
    hidden = {name: "…" if name in SECRET else value for name, value in environment["env_vars"].items()}
    return {**environment, "env_vars": hidden}


def submit(address: str, command: str, environment: dict[str, Any], wait: bool) -> int:
    """Submits, and with ``wait`` prints the job's output until it ends.

    Returns:
        The driver's exit code; 1 when the job never ran.

    Raises:
        Refused: in the cluster's words.
        Lost: the job's output broke off again and again.
    """
    from ray.exceptions import RayError
    from ray.job_submission import JobStatus, JobSubmissionClient

    use_token_if_there()
    try:
        client = JobSubmissionClient(address)
        job = client.submit_job(entrypoint=command, runtime_env=environment)
    except (RuntimeError, RayError) as error:
        raise Refused(str(error).strip().splitlines()[0]) from error
    print(f"job {job} at {address}", file=sys.stderr, flush=True)
    if not wait:
        return 0
    info = asyncio.run(_follow(client, job))
    if info.status == JobStatus.SUCCEEDED:
        return 0
    print(f"job {job}: {info.status.value.lower()}: {info.message}", file=sys.stderr)
    return int(info.driver_exit_code or 1)


async def _follow(client: Any, job: str) -> Any:
    """Prints the job's output until the job has ended, and returns what Ray knows of it.

    The stream may break off before (a proxy, a head that is busy): it is followed again. Ray then sends the output from
    its beginning; what was printed is left out.

    Raises:
        Lost: nothing new came in :data:`FOLLOW_ATTEMPTS` attempts in a row.
    """
    from aiohttp import ClientError

    printed = failures = 0
    while True:
        reason, sent = "the stream ended while the job was running", 0
        try:
            async for text in client.tail_job_logs(job):
                new = text[max(0, printed - sent) :]
                sent += len(text)
                if new:
                    print(new, end="", flush=True)
                    printed, failures = sent, 0
        except (RuntimeError, OSError, ClientError) as error:
            reason = _first_line(error)
        try:
            info = client.get_job_info(job)
        except (RuntimeError, OSError) as error:
            reason = _first_line(error)
        else:
            if info.status.is_terminal():
                with contextlib.suppress(RuntimeError, OSError):  # of a node that is gone
                    print(client.get_job_logs(job)[printed:], end="", flush=True)
                return info
        failures += 1
        if failures == FOLLOW_ATTEMPTS:
            raise Lost(f"the output of {job} broke off {failures} times in a row: {reason}")
        await asyncio.sleep(min(2.0**failures, LONGEST_WAIT))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl.agentopsd.submit")
    parser.add_argument("--root", required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--dry-run", type=int, default=0)
    parser.add_argument("--wait", type=int, default=1)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    environment = runtime_env(options.root, os.environ)
    command = entrypoint(options.python, options.overrides)
    if problem := run_dir_problem(options.overrides):
        print(f"error: {problem}", file=sys.stderr)
        return 1
    if options.dry_run:
        print(json.dumps(shown(environment), indent=1, ensure_ascii=False))
        print(command)
        return 0
    try:
        return submit(options.address, command, environment, bool(options.wait))
    except ConnectionError as error:
        print(f"error: no Ray cluster answers at {options.address}: start one (docs/cluster.md)", file=sys.stderr)
        print(f"  {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    except Refused as error:
        print(f"error: the Ray cluster at {options.address} does not take the job: {error}", file=sys.stderr)
        return 1
    except Lost as error:
        print(f"error: {error}", file=sys.stderr)
        print("  the job may go on: 'ray job status ID' says, 'ray job logs --follow ID' shows it", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
