"""The run directory is guarded before anything starts, and a slow Ray gets a second chance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl.agentopsd import task_runner
from verl.agentopsd.main import compose_config
from verl.agentopsd.rollout.failures import FILE_NAME
from verl.agentopsd.run_guard import RunDirLocked
from verl.agentopsd.task_runner import RunDirError, init_ray, prepare_run_dir, take_run_dir


def config(run_dir: Path, resume_mode: str = "auto"):
    return OmegaConf.create({"run_dir": str(run_dir), "trainer": {"resume_mode": resume_mode}})


def test_a_new_directory_is_made_and_an_old_run_s_errors_are_cleared(tmp_path: Path):
    run_dir = tmp_path / "deep" / "run"
    assert prepare_run_dir(config(run_dir)) == run_dir
    assert list(run_dir.iterdir()) == []
    (run_dir / FILE_NAME).write_text("yesterday's error")
    with take_run_dir(run_dir):
        assert not (run_dir / FILE_NAME).exists()


def test_a_second_run_clears_nothing_of_the_first(tmp_path: Path):
    with take_run_dir(tmp_path):
        (tmp_path / FILE_NAME).write_text("today's error")
        with pytest.raises(RunDirLocked):
            take_run_dir(prepare_run_dir(config(tmp_path)))
        assert (tmp_path / FILE_NAME).read_text() == "today's error"


def test_a_finished_run_is_never_overwritten(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    prepare_run_dir(config(tmp_path))
    with pytest.raises(RunDirError, match="already holds a run and trainer.resume_mode=disable would overwrite it"):
        prepare_run_dir(config(tmp_path, "disable"))


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match="cannot be written .*choose another folder"):
        prepare_run_dir(config(tmp_path / "file" / "run"))


def test_too_little_space_is_refused_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(task_runner.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    with pytest.raises(RunDirError, match=r"1.0 GiB free, a run needs 2 GiB"):
        prepare_run_dir(config(tmp_path))


def start(monkeypatch: pytest.MonkeyPatch, errors: list[Exception]) -> list[dict]:
    import ray

    calls: list[dict] = []

    def init(**options):
        calls.append(options)
        if errors:
            raise errors.pop(0)

    monkeypatch.setattr(ray, "init", init)
    init_ray({"address": "local"})
    return calls


def test_a_slow_node_is_started_once_more(monkeypatch: pytest.MonkeyPatch, capsys):
    slow = Exception("The current node timed out during startup. This could happen because ...")
    assert start(monkeypatch, [slow]) == [{"address": "local"}] * 2
    assert "trying once more" in capsys.readouterr().err


def test_another_error_is_not_tried_again(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="port is taken"):
        start(monkeypatch, [ValueError("port is taken")])
    with pytest.raises(Exception, match="timed out"):
        start(monkeypatch, [Exception("timed out during startup"), Exception("timed out during startup")])


def test_a_run_without_a_gpu_stays_on_this_machine(monkeypatch: pytest.MonkeyPatch):
    """What Ray will call its own address once clusters are switched off; a test of the switch, which is Ray's."""
    from ray._private import ray_constants, services, worker

    from verl.agentopsd.platform.loopback import VARIABLE, loopback_only

    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", True)
    monkeypatch.setattr(worker, "_global_node", None)
    loopback_only()
    assert services.get_node_ip_address() in ("127.0.0.1", "::1")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What ``ray.init`` would be called with."""
    import ray

    def start(*overrides: str, **environment: str) -> dict[str, Any]:
        made = compose_config([*overrides, "run_dir=x"])
        for name in ("RAY_ADDRESS", "NCCL_DEBUG", "HF_TOKEN", "WANDB_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        calls: list[dict[str, Any]] = []
        monkeypatch.setattr(task_runner, "init_ray", calls.append)
        monkeypatch.setattr(task_runner, "loopback_only", lambda: None)
        monkeypatch.setattr(task_runner.reaper, "watch_over", lambda pids: None)
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"GPU": 64, "CPU": 999}}] * 2)
        task_runner.start_ray(made, {"OWN": "1"})
        return calls[0]

    return start


def test_a_run_on_one_node_starts_a_ray_of_its_own(started: Callable[..., dict[str, Any]], monkeypatch):
    """With as many CPUs as it will count, whatever the machine has: 3 per GPU, a storage unit, the queue."""
    monkeypatch.setattr(task_runner.os, "cpu_count", lambda: 2)
    options = started("model=qwen2.5_1.5b_1gpu", "device=gpu")
    assert (options["address"], options["num_cpus"]) == ("local", 5)
    monkeypatch.setattr(task_runner.os, "cpu_count", lambda: 96)
    assert started("model=qwen2.5_1.5b_1gpu", "device=gpu")["num_cpus"] == 96


def test_a_run_over_nodes_looks_for_the_cluster_that_is_there(started: Callable[..., dict[str, Any]]):
    assert "address" not in started("model=qwen2.5_3b", "device=gpu", "trainer.nnodes=2")


def test_nodes_that_were_started_elsewhere_get_the_network_s_variables(started: Callable[..., dict[str, Any]]):
    here = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "t", "WANDB_API_KEY": "w"}
    joined = started("model=qwen2.5_3b", "device=gpu", RAY_ADDRESS="10.0.0.1:6379", **here)["runtime_env"]["env_vars"]
    assert (joined["NCCL_DEBUG"], joined["HF_TOKEN"], joined["OWN"]) == ("INFO", "t", "1")
    assert "WANDB_API_KEY" not in joined, "the driver talks to trackers"


def test_a_disk_that_is_full_when_the_log_is_closed_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "verl.log").symlink_to("/dev/full")
    monkeypatch.setattr(task_runner, "start_ray", lambda *_: None)
    monkeypatch.setattr(task_runner, "stop_ray", lambda: None)
    monkeypatch.setattr(task_runner, "_train", lambda *_: print("upstream says something"))
    with pytest.raises(RunDirError, match=f"no space left on the disk of run_dir={tmp_path}"):
        task_runner.run(config(tmp_path), {})
