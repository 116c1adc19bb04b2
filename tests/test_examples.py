"""The examples: what they pass on, that nothing is lost in quoting, and what the Slurm script does with its nodes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import ClientError
from omegaconf import OmegaConf
from ray.job_submission import JobStatus

from verl.agentopsd import run_guard, submit
from verl.agentopsd.config import has_teacher, method_of
from verl.agentopsd.main import compose_config
from verl.agentopsd.methods import METHODS as METHOD_RULES

ROOT = Path(__file__).resolve().parents[1]

# Stands in for the environment's python: writes its arguments, one JSON list per call.
PYTHON = """#!/usr/bin/env bash
"{python}" - "$@" <<'PY'
import json, os, sys
with open(os.environ["CALLS"], "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
PY
{then}
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The examples with an installer that only names a python, and a PATH without a GPU."""
    target = tmp_path / "checkout"
    for folder in ("examples", "scripts"):
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (target / "bin").mkdir()
    program(target / "scripts" / "install.sh", f"echo {target}/bin/python")
    fake_python(target)
    return target


def program(path: Path, script: str) -> None:
    path.write_text(script if script.startswith("#!") else f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


def fake_python(checkout: Path, then: str = "") -> None:
    program(checkout / "bin" / "python", PYTHON.format(python=sys.executable, then=then))


def environment(checkout: Path, **extra: str) -> dict[str, str]:
    return {"PATH": f"{checkout}/bin:/usr/bin:/bin", "HOME": str(checkout), "CALLS": str(checkout / "calls"), **extra}


def calls(checkout: Path) -> list[list[str]]:
    log = checkout / "calls"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def run(checkout: Path, script: str, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(checkout / "examples" / script), *arguments],
        env=environment(checkout, **extra), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def with_gpus(checkout: Path, count: int) -> None:
    program(checkout / "bin" / "nvidia-smi", "\n".join(f"echo GPU {index}: H100" for index in range(count)))


def overrides(checkout: Path) -> list[str]:
    (call,) = calls(checkout)
    assert call[:2] == ["-m", "verl.agentopsd.main"]
    return call[2:]


def values(arguments: list[str]) -> dict:
    config = OmegaConf.to_container(compose_config([*arguments, "run_dir=x"]), resolve=False)
    assert isinstance(config, dict)
    return config


@pytest.mark.parametrize(
    ("gpus", "preset"),
    [(0, ["model=tiny", "device=cpu"]), (8, ["model=qwen2.5_3b", "device=gpu"])],
)
def test_what_the_script_shows_is_what_the_preset_says(checkout: Path, gpus: int, preset: list[str]):
    if gpus:
        with_gpus(checkout, gpus)
    assert run(checkout, "alfworld_agentopsd.sh").returncode == 0
    assert values(overrides(checkout)) == values(preset)


def test_another_number_of_gpus(checkout: Path):
    with_gpus(checkout, 4)
    run(checkout, "alfworld_agentopsd.sh")
    assert values(overrides(checkout))["hardware"]["gpus_per_node"] == 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model=smollm2_135m"], ["model=smollm2_135m", "device=cpu"]),
        (["method=grpo"], ["model=tiny", "device=cpu", "method=grpo"]),
        (["algorithm.adv_estimator=grpo"], ["model=tiny", "device=cpu", "algorithm.adv_estimator=grpo"]),
    ],
)
def test_a_named_preset_or_method_brings_its_own_values(checkout: Path, arguments: list[str], expected: list[str]):
    run(checkout, "alfworld_agentopsd.sh", *arguments)
    assert values(overrides(checkout)) == values(expected)


METHODS = sorted(path.stem for path in (ROOT / "agentopsd_config" / "method").glob("*.yaml"))


@pytest.mark.parametrize("method", ["dr_grpo", "rlsd", "agentopsd_token"])
@pytest.mark.parametrize(
    ("gpus", "preset"), [(0, ["model=tiny", "device=cpu"]), (8, ["model=qwen2.5_3b", "device=gpu"])]
)
def test_a_named_method_is_not_overruled(checkout: Path, method: str, gpus: int, preset: list[str]):
    if gpus:
        with_gpus(checkout, gpus)
    run(checkout, "alfworld_agentopsd.sh", f"method={method}")
    assert values(overrides(checkout)) == values([*preset, f"method={method}"])


def test_the_script_names_no_value_that_a_method_sets(checkout: Path):
    """Every method's file against the lines that stay when a method is named: an override would win over the file."""
    with_gpus(checkout, 8)
    run(checkout, "alfworld_agentopsd.sh", "method=grpo")
    named = {argument.split("=")[0] for argument in overrides(checkout)}
    for method in METHODS:
        file = OmegaConf.to_container(OmegaConf.load(ROOT / "agentopsd_config" / "method" / f"{method}.yaml"))
        assert isinstance(file, dict)
        assert named.isdisjoint({key for key, _ in run_guard._leaves(file)}), method


@pytest.mark.parametrize(("gpus", "device", "model"), [(8, "cpu", "tiny"), (0, "gpu", "qwen2.5_3b")])
def test_a_named_device_brings_the_model_for_it(checkout: Path, gpus: int, device: str, model: str):
    if gpus:
        with_gpus(checkout, gpus)
    run(checkout, "alfworld_agentopsd.sh", f"device={device}")
    assert values(overrides(checkout)) == values([f"model={model}", f"device={device}"])


@pytest.mark.parametrize(("visible", "count"), [("3,5", 2), ("GPU-ab", 1), ("", 0), ("-1", 0)])
def test_only_visible_gpus_count(checkout: Path, visible: str, count: int):
    with_gpus(checkout, 8)
    run(checkout, "alfworld_agentopsd.sh", CUDA_VISIBLE_DEVICES=visible)
    expected = [f"hardware.gpus_per_node={count}", "device=gpu"] if count else ["device=cpu"]
    assert set(expected) <= set(overrides(checkout))


def test_parts_of_a_gpu_are_not_counted_as_gpus(checkout: Path):
    program(checkout / "bin" / "nvidia-smi", "echo 'GPU 0: H100'; echo '  MIG 3g.40gb Device 0: (UUID: MIG-1)'")
    run(checkout, "alfworld_agentopsd.sh")
    assert "hardware.gpus_per_node=1" in overrides(checkout)


def test_a_preset_for_gpus_is_rehearsed_without_one_and_not_started(checkout: Path):
    done = run(checkout, "alfworld_agentopsd.sh", "model=qwen2.5_7b")
    assert done.returncode == 1 and "model=qwen2.5_7b needs GPUs and this machine shows none" in done.stderr
    assert calls(checkout) == []
    assert run(checkout, "alfworld_agentopsd.sh", "--dry-run", "model=qwen2.5_7b").returncode == 0
    (call,) = calls(checkout)
    assert values([one for one in call[2:] if one != "--dry-run"]) == values(["model=qwen2.5_7b", "device=gpu"])


def test_the_one_gpu_preset_stays_at_one(checkout: Path):
    with_gpus(checkout, 8)
    run(checkout, "alfworld_agentopsd.sh", "model=qwen2.5_1.5b_1gpu")
    assert values(overrides(checkout))["hardware"]["gpus_per_node"] == 1


TRICKY = [
    "trainer.logger=['console','file']",
    "trainer.logger=[console, tensorboard]",
    "trainer.experiment_name=lr=1e-6 and b=.2",
    'trainer.project_name=it\'s $HOME "here"',
    "run_dir=/tmp/a b*",
]


@pytest.mark.parametrize("script", ["alfworld_agentopsd.sh", "alfworld_grpo.sh"])
def test_arguments_arrive_as_they_were_given(checkout: Path, script: str):
    run(checkout, script, *TRICKY, "--dry-run")
    assert overrides(checkout)[-len(TRICKY) - 1 :] == [*TRICKY, "--dry-run"]


@pytest.mark.parametrize(("gpus", "preset"), [(0, ["model=tiny"]), (8, ["model=qwen2.5_3b"])])
def test_the_baseline_trains_grpo_and_is_the_same_run_otherwise(checkout: Path, gpus: int, preset: list[str]):
    """GRPO: an advantage divided by the group's deviation, one per episode, and nobody who rereads."""
    if gpus:
        with_gpus(checkout, gpus)
    assert run(checkout, "alfworld_grpo.sh").returncode == 0
    config = compose_config([*overrides(checkout), "run_dir=x"])
    assert config.algorithm.adv_estimator == "grpo" and config.algorithm.norm_adv_by_std_in_grpo is True
    assert method_of(config) is METHOD_RULES["grpo"] and not has_teacher(config)
    assert values(overrides(checkout)) == values([*preset, f"device={'gpu' if gpus else 'cpu'}", "method=grpo"])


def test_the_exit_code_is_the_runs(checkout: Path):
    fake_python(checkout, then="exit 3")
    assert run(checkout, "alfworld_agentopsd.sh").returncode == 3


# -- evaluation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "machine"), [(0, ["device=cpu"]), (4, ["device=gpu", "trainer.n_gpus_per_node=4"])])
def test_an_evaluation_gets_the_machine_the_model_and_the_options(checkout: Path, gpus: int, machine: list[str]):
    if gpus:
        with_gpus(checkout, gpus)
    given = ["outputs/a run", "--panel", "valid_unseen", "--temperature", "0.4", "env.max_turns=5"]
    assert run(checkout, "alfworld_eval.sh", *given).returncode == 0
    assert calls(checkout) == [["-m", "verl.agentopsd.evaluate", *machine, *given]]


def test_an_evaluation_without_arguments_leaves_the_model_to_the_command(checkout: Path):
    fake_python(checkout, then="exit 3")
    assert run(checkout, "alfworld_eval.sh").returncode == 3, "the evaluation's exit code"
    assert calls(checkout) == [["-m", "verl.agentopsd.evaluate", "device=cpu"]]


def test_the_evaluation_s_own_help(checkout: Path):
    """The real command behind the script: it knows the options that the script's header shows."""
    program(checkout / "scripts" / "install.sh", f"echo {sys.executable}")
    done = run(checkout, "alfworld_eval.sh", "--help", PYTHONPATH=os.environ.get("PYTHONPATH", ""))
    assert done.returncode == 0, done.stderr
    header = (ROOT / "examples" / "alfworld_eval.sh").read_text().split("set -euo")[0]
    shown = set(re.findall(r" (--[a-z]+)", header))
    assert shown >= {"--panel", "--samples", "--resume"}
    assert [option for option in shown if option not in done.stdout] == []


# -- Ray jobs ----------------------------------------------------------------------------------------------------------


def test_arguments_survive_a_jobs_command_line():
    command = submit.entrypoint("/env/bin/python", TRICKY)
    words = subprocess.run(["sh", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True).stdout
    assert words.split("\0")[:-1] == ["/env/bin/python", "-m", "verl.agentopsd.main", *TRICKY]


def test_the_scripts_arguments_reach_the_submission(checkout: Path):
    run(checkout, "ray_submit.sh", "--no-wait", *TRICKY, RAY_API_SERVER_ADDRESS="http://head:8265")
    (call,) = calls(checkout)
    assert call[call.index("--") + 1 :] == TRICKY
    assert call[call.index("--address") + 1] == "http://head:8265"
    assert (call[call.index("--wait") + 1], call[call.index("--dry-run") + 1]) == ("0", "0")
    assert "unknown option '--now'" in run(checkout, "ray_submit.sh", "--now").stderr


def test_a_dry_run_prints_the_runtime_environment_without_secrets(capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "key-of-the-user")
    passed = {
        "NCCL_DEBUG": "WARN",
        "NCCL_IB_HCA": "mlx5_0",
        "NCCL_NET_GDR_LEVEL": "PHB",
        "GLOO_SOCKET_IFNAME": "ib0",
        "MLFLOW_TRACKING_USERNAME": "who",
        "VERL_FILE_LOGGER_ROOT": "/shared/log",
    }
    for name, value in {**passed, "NCCL_NET": "", "UNRELATED": "x"}.items():
        monkeypatch.setenv(name, value)
    code = submit.main(["--root", str(ROOT), "--address", "http://x", "--dry-run", "1", "--", "run_dir=/shared/a"])
    printed = capsys.readouterr().out
    shown, end = json.JSONDecoder().raw_decode(printed)
    assert code == 0 and "key-of-the-user" not in printed
    assert shown["env_vars"]["WANDB_API_KEY"] == "…"
    assert {name: shown["env_vars"].get(name) for name in passed} == passed
    assert not {"UNRELATED", "NCCL_NET"} & set(shown["env_vars"]), "what is not ours, and what is set to nothing"
    assert shown["working_dir"] == str(ROOT) and {"verl", "agentopsd_config", ".git"} <= set(shown["excludes"])
    assert printed[end:].strip().endswith("-m verl.agentopsd.main run_dir=/shared/a")
    # the job itself gets the real value
    assert submit.runtime_env("r", os.environ)["env_vars"]["WANDB_API_KEY"] == "key-of-the-user"


@pytest.mark.parametrize("given", [[], ["run_dir=outputs/x"]])
def test_a_job_must_not_write_into_its_working_directory(given: list[str], capsys):
    assert submit.main(["--root", ".", "--address", "http://x", "--dry-run", "1", "--", *given]) == 1
    assert "give run_dir=/an/absolute/path" in capsys.readouterr().err


def test_no_cluster_is_one_sentence(capsys):
    assert submit.main(["--root", ".", "--address", "http://127.0.0.1:9", "--", "run_dir=/tmp/x"]) == 1
    assert "error: no Ray cluster answers at http://127.0.0.1:9" in capsys.readouterr().err


class Head:
    """A cluster whose streams break off: each is the text it sends and what it ends with, the log is sent from its
    beginning. ``broken`` says how often the job's state cannot be asked for."""

    def __init__(self, streams: list[tuple[str, Exception | None]], log: str, broken: int = 0) -> None:
        self.streams, self.log, self.broken, self.followed = streams, log, broken, 0

    async def tail_job_logs(self, job: str):
        text, failure = self.streams[min(self.followed, len(self.streams) - 1)]
        self.followed += 1
        for start in range(0, len(text), 5):
            yield text[start : start + 5]
        if failure:
            raise failure

    def get_job_info(self, job: str):
        if self.broken:
            self.broken -= 1
            raise ConnectionError("nobody answers")
        over = self.followed >= len(self.streams)
        return SimpleNamespace(status=JobStatus.FAILED if over else JobStatus.RUNNING, driver_exit_code=7)

    def get_job_logs(self, job: str) -> str:
        return self.log


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were waited, none of which pass."""
    waited: list[float] = []

    async def note(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(submit.asyncio, "sleep", note)
    return waited


LOG = "update 1\nupdate 2\nerror: no more\n"


def test_output_that_breaks_off_is_followed_again_and_shown_once(capsys, waits: list[float]):
    """By an error, by a quiet end, by an end before the last line: all of the log, each line once, in order."""
    streams = [(LOG[:12], RuntimeError("1006")), ("", None), (LOG[:3], ClientError("reset")), (LOG[:20], None)]
    info = asyncio.run(submit._follow(Head(streams, LOG, broken=1), "job"))
    assert (info.status, info.driver_exit_code) == (JobStatus.FAILED, 7)
    assert capsys.readouterr().out == LOG
    assert len(waits) == 3 and max(waits) <= submit.LONGEST_WAIT


def test_output_that_stays_away_is_given_up_in_one_sentence(capsys, waits: list[float], monkeypatch):
    head = Head([("up", OSError("unreachable"))] * 100, LOG)
    with pytest.raises(submit.Lost, match="the output of job broke off 12 times in a row: unreachable"):
        asyncio.run(submit._follow(head, "job"))
    assert head.followed == 12
    assert 180 < sum(waits) < 300, "a head that restarts is waited for"

    def lost(*arguments) -> int:
        raise submit.Lost("the output of j broke off")

    monkeypatch.setattr(submit, "submit", lost)
    assert submit.main(["--root", ".", "--address", "http://x", "--", "run_dir=/tmp/x"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: the output of j broke off\n  the job may go on")


def test_a_job_whose_log_is_gone_has_ended_all_the_same(waits: list[float]):
    head = Head([("", RuntimeError("no agent"))], LOG)
    head.get_job_logs = lambda job: (_ for _ in ()).throw(RuntimeError("no agent"))
    assert asyncio.run(submit._follow(head, "job")).status == JobStatus.FAILED and waits == []


# -- Slurm -------------------------------------------------------------------------------------------------------------

# srun [options] COMMAND...: here, on this machine
# a step without --cpus-per-task gets one core, whatever the allocation has
SRUN = """cores=1
while [[ "$1" == -* ]]; do
  case "$1" in -w) shift ;; --cpus-per-task=*) cores="${1#*=}" ;; esac
  shift
done
echo "srun $cores cores: $1" >> "$LOG"
exec "$@"
"""
# 'start' runs until it is ended, as with --block; the head answers once it was started
RAY = """echo "ray $*" >> "$LOG"
case "$1 $2" in
  "start --head") touch "$STATE/head"; trap 'echo head ended >> "$LOG"; exit 0' TERM; while :; do sleep 0.1; done ;;
  "start --address="*)
    touch "$STATE/worker"; trap 'echo worker ended >> "$LOG"; exit 0' TERM; while :; do sleep 0.1; done ;;
  "status --address") [[ -e "$STATE/head" ]] ;;
esac
"""
# as the doctor's cluster_nodes would count; as a run: logs and ends with $RUN_CODE, or waits to be told to stop
NODES = """case "$1" in
  -) if [[ -e "$STATE/worker" ]]; then echo "${NODES_SEEN:-2}"; else echo 1; fi ;;
  -m) echo "run $*" >> "$LOG"
      if [[ -n "${RUN_WAITS:-}" ]]; then
        trap 'echo "run saved" >> "$LOG"; exit 143' TERM; touch "$STATE/running"; while :; do sleep 0.1; done
      fi
      exit "${RUN_CODE:-0}" ;;
esac
"""


@pytest.fixture
def slurm(checkout: Path) -> Path:
    for name, script in (("srun", SRUN), ("ray", RAY), ("python", NODES)):
        program(checkout / "bin" / name, script)
    program(checkout / "bin" / "scontrol", "printf 'node1\\nnode2\\n'")
    program(checkout / "bin" / "hostname", "echo '10.0.0.1 fe80::1'")
    program(checkout / "bin" / "sleep", f"{shutil.which('sleep')} 0.1")
    (checkout / "state").mkdir()
    return checkout


def slurm_environment(checkout: Path, **extra: str) -> dict[str, str]:
    settings = {
        "SLURM_SUBMIT_DIR": str(checkout),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_ON_NODE": "8",
        "LOG": str(checkout / "log"),
        "STATE": str(checkout / "state"),
    }
    return environment(checkout, **(settings | extra))


def sbatch(checkout: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(checkout / "examples" / "slurm_multinode.sbatch"), *arguments],
        env=slurm_environment(checkout, **extra), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def log(checkout: Path) -> list[str]:
    return (checkout / "log").read_text().splitlines()


def test_slurm_starts_the_head_then_workers_then_the_run_and_stops_all(slurm: Path):
    done = sbatch(slurm, "model=qwen2.5_7b", "trainer.experiment_name=a=b c", RUN_CODE="5")
    assert done.returncode == 5, done.stderr
    lines = [line for line in log(slurm) if not line.startswith(("ray status", "srun "))]
    assert lines[0] == "ray get-auth-token --generate"
    assert lines[1].startswith("ray start --head --node-ip-address=10.0.0.1 --port=6379 --num-gpus=8")
    assert lines[2].startswith("ray start --address=10.0.0.1:6379 --num-gpus=8")
    assert lines[3].startswith("run -m verl.agentopsd.main device=gpu")
    assert lines[3].endswith("trainer.nnodes=2 hardware.gpus_per_node=8 model=qwen2.5_7b trainer.experiment_name=a=b c")
    assert sorted(lines[4:]) == ["head ended", "worker ended"]
    assert "2 nodes joined" in done.stderr


def test_slurm_s_steps_get_the_cores_that_ray_counts(slurm: Path):
    assert sbatch(slurm, SLURM_CPUS_PER_TASK="24").returncode == 0
    steps = [line for line in log(slurm) if line.startswith("srun ")]
    assert steps == ["srun 24 cores: hostname", "srun 24 cores: ray", "srun 24 cores: ray"]
    assert sum("--num-cpus=24 " in line for line in log(slurm)) == 2


def test_slurm_says_when_a_node_does_not_join(slurm: Path):
    done = sbatch(slurm, NODES_SEEN="1", AGENTOPSD_JOIN_SECONDS="5")
    assert done.returncode == 1 and "only 1 of 2 nodes joined within 5 s" in done.stderr
    assert not any(line.startswith("run ") for line in log(slurm)) and "head ended" in log(slurm)


def test_slurms_time_limit_lets_the_run_save(slurm: Path):
    process = subprocess.Popen(
        ["bash", str(slurm / "examples" / "slurm_multinode.sbatch")],
        env=slurm_environment(slurm, RUN_WAITS="1"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (slurm / "state" / "running").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143
    assert log(slurm).index("run saved") < log(slurm).index("head ended")


def test_the_batch_script_must_be_submitted_from_the_checkout(slurm: Path, tmp_path: Path):
    done = sbatch(slurm, SLURM_SUBMIT_DIR=str(tmp_path))
    assert done.returncode == 1 and "submit this from the checkout" in done.stderr


# -- the image ---------------------------------------------------------------------------------------------------------


def test_the_image_copies_what_exists_and_installs_the_pinned_gpu_set():
    lines = [line for line in (ROOT / "docker" / "Dockerfile").read_text().splitlines() if line[:1] not in ("#", " ")]
    for line in lines:
        if line.startswith("COPY"):
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), line
    assert any("scripts/install.sh --gpu" in line for line in lines)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"verl", "examples", "scripts", "requirements", "agentopsd_config", "docs"} & set(ignored)
