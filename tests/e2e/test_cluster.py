"""A Ray cluster of two nodes on this machine, started as docs/cluster.md says: a training over both, and Ray jobs.

The nodes are 127.0.0.2 and 127.0.0.3, one logical GPU each. The token is a file in a home of the cluster's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from stack import MARK, SMALL, Run, command, environment, left_behind

from verl.agentopsd.checkpoints import latest_step
from verl.agentopsd.config import TINY_MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
RAY = str(Path(sys.executable).parent / "ray")
HEAD, OTHER = "127.0.0.2", "127.0.0.3"
PROMISED_SECONDS = 60
"""Within which nothing of a run may be left (docs/reliability.md)."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster, and what a user of it exports."""

    home: Path
    address: str
    dashboard: str
    environment: dict[str, str]
    daemons: frozenset[int]

    def ray(self, *arguments: str, timeout: float = 120) -> str:
        """Output of a ``ray`` command that ends with 0."""
        done = subprocess.run(
            [RAY, *arguments], env=self.environment, capture_output=True, text=True, timeout=timeout, cwd=self.home
        )
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def workers(self) -> list[str]:
        """Titles of the cluster's processes, on both nodes, but for the daemons that were there before any run and for
        the empty processes that a node keeps for the next comer (a run's have the run's variables)."""
        titles = []
        for process in marked(self.home):
            with contextlib.suppress(psutil.Error):
                title = " ".join(process.cmdline()).strip() or process.name()
                spare = title == "ray::IDLE" and "TRANSFER_QUEUE_ENABLE" not in process.environ()
                if process.pid not in self.daemons and not spare:
                    titles.append(title)
        return titles


def marked(home: Path) -> list[psutil.Process]:
    """Living processes that descend from this cluster's ``ray start``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_for(what: str, look: Callable[[], Any], seconds: float, told: Callable[[], object] = lambda: "") -> Any:
    """The first true value of ``look``."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s; {told()}"
        time.sleep(0.2)
    return found


def free_port(host: str) -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(alfworld_data: Path) -> Iterator[Cluster]:
    # a short path: Ray's sockets lie below it, and their names may have 107 characters
    home = Path(tempfile.mkdtemp(prefix="rc-", dir="/tmp"))
    port, dashboard, client, agent = free_port(HEAD), free_port("127.0.0.1"), free_port(HEAD), free_port(HEAD)
    address, api = f"{HEAD}:{port}", f"http://127.0.0.1:{dashboard}"
    user = {name: value for name, value in environment(home).items() if not name.startswith("RAY_")}
    user |= {
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "ALFWORLD_DATA": str(alfworld_data),
        "RAY_AUTH_MODE": "token",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    node = ["--num-cpus=5", "--num-gpus=1", "--object-store-memory=268435456", "--disable-usage-stats"]
    head = [f"--port={port}", f"--node-ip-address={HEAD}", f"--temp-dir={home}/ray", "--dashboard-host=127.0.0.1"]
    head += [f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
    head += [f"--dashboard-agent-listen-port={agent}"]
    started = Cluster(home, address, api, user, frozenset())
    try:
        started.ray("get-auth-token", "--generate")
        started.ray("start", "--head", *head, *node)
        started.ray("start", f"--address={address}", f"--node-ip-address={OTHER}", *node)
        wait_for(
            "two nodes in 'ray status'",
            lambda: started.ray("status", "--address", address).count("\n 1 node_") == 2,
            *(60, lambda: started.ray("status", "--address", address)),
        )
        wait_for("the dashboard", lambda: listens("127.0.0.1", dashboard), 60)
        wait_for("the head's agent, which starts jobs", lambda: listens(HEAD, agent), 60)
        user |= {"RAY_ADDRESS": address, "RAY_API_SERVER_ADDRESS": api}
        yield Cluster(home, address, api, user, frozenset(process.pid for process in marked(home)))
    finally:
        # not 'ray stop', which would end every cluster on this machine
        for force in (signal.SIGTERM, signal.SIGKILL):
            processes = marked(home)
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(force)
            psutil.wait_procs(processes, timeout=10)
        assert left_behind(home) == []
        shutil.rmtree(home, ignore_errors=True)


def listens(host: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((host, port)) == 0


def gone(cluster: Cluster, directory: Path) -> None:
    """Nothing but the daemons is left of a run, whoever started it."""
    wait_for(
        f"the end of every process of {directory}",
        lambda: not cluster.workers() and not left_behind(directory),
        *(PROMISED_SECONDS, lambda: cluster.workers() + left_behind(directory)),
    )


def texts(run: Run, step: int = 1) -> list[list[str]]:
    return [[turn.text for turn in record.turns] for record in run.rollouts(step)]


# -- a training over two nodes -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def over_two_nodes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One update with a training rank and a vLLM server on each node."""
    directory = tmp_path_factory.mktemp("two") / "out"
    done = subprocess.run(
        command(directory, "trainer.total_training_steps=1", "trainer.nnodes=2", "trainer.n_gpus_per_node=1"),
        env=cluster.environment | {MARK: str(directory)},
        capture_output=True,
        text=True,
        timeout=600,
        cwd=directory.parent,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return Run(directory, done.returncode, done.stdout + done.stderr)


def test_a_run_over_two_nodes_is_the_run_on_one(over_two_nodes: Run, run: Run):
    two = over_two_nodes
    assert texts(two) == texts(run)
    for ours, theirs in zip(two.rollouts(1), run.rollouts(1), strict=True):
        assert [turn.advantage for turn in ours.turns] == pytest.approx(
            [turn.advantage for turn in theirs.turns], abs=1e-6
        )
    assert two.metrics[1]["actor/grad_norm"] == pytest.approx(run.metrics[1]["actor/grad_norm"], rel=1e-4)
    assert two.metrics[1]["rollout/logprob_gap_abs_max"] < 1e-4


def test_both_ranks_together_learn_what_one_learns(over_two_nodes: Run, run: Run):
    """The merged parameters after an update: apart by the rounding of sums in another order.

    Adam divides a gradient by its own size, so that the rounding of one near 0 becomes a visible part of a step: single
    parameters were 1.7 % of the largest step apart, all together 0.0035 % of the way. Rows in another mini-batch, or
    twice, or left out, would turn the whole step.
    """
    from transformers import AutoModelForCausalLM

    start = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).state_dict()
    two, one = over_two_nodes.checkpoint(1), run.checkpoint(1)
    assert {name: value.shape for name, value in two.items()} == {name: value.shape for name, value in one.items()}
    moved, apart = (torch.cat([(a[name] - b[name]).flatten() for name in one]) for a, b in ((one, start), (two, one)))
    assert moved.abs().max() > 1e-4, "of a learning rate of 3e-4"
    assert apart.abs().max() < 0.05 * moved.abs().max()
    assert apart.norm() < 1e-3 * moved.norm()


def test_every_node_trains_and_samples(over_two_nodes: Run, cluster: Cluster):
    """What Ray itself remembers of the run's actors: a training rank and a server on each of the two nodes."""
    actors = json.loads(cluster.ray("list", "actors", "--detail", "--format=json", "--limit=1000"))
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes_of(cluster)}
    for kind in ("WorkerDict", "vLLMHttpServer"):
        placed = sorted(nodes[actor["node_id"]] for actor in actors if kind in actor["class_name"])
        assert placed == [HEAD, OTHER], (kind, placed)


def nodes_of(cluster: Cluster) -> list[dict[str, str]]:
    rows = json.loads(cluster.ray("list", "nodes", "--detail", "--format=json"))
    return [{"NodeID": row["node_id"], "NodeManagerAddress": row["node_ip"]} for row in rows]


def test_both_ranks_left_their_part_of_the_checkpoint(over_two_nodes: Run):
    folder = over_two_nodes.directory / "checkpoints" / "global_step_1" / "actor"
    for kind in ("model", "optim", "extra_state"):
        files = sorted(file.name for file in folder.glob(f"{kind}_world_size_2_rank_*.pt"))
        assert files == [f"{kind}_world_size_2_rank_{rank}.pt" for rank in (0, 1)]


def test_a_run_leaves_the_cluster_as_it_was(over_two_nodes: Run, cluster: Cluster):
    gone(cluster, over_two_nodes.directory)
    assert len(nodes_of(cluster)) == 2


# -- jobs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def submit(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Run, str]]:
    """``examples/ray_submit.sh`` with an installer that names this Python; returns its run and the job's name."""
    checkout = tmp_path_factory.mktemp("checkout")
    for folder in ("examples", "scripts"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "scripts" / "install.sh").write_text(f"echo '{sys.executable}'\n")

    def start(*arguments: str, timeout: float = 420, **extra: str) -> tuple[Run, str]:
        directory = tmp_path_factory.mktemp("job") / "out"
        done = subprocess.run(
            ["bash", str(checkout / "examples" / "ray_submit.sh"), *SMALL, f"run_dir={directory}", *arguments],
            env={name: value for name, value in cluster.environment.items() if name != "RAY_ADDRESS"} | extra,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=directory.parent,
        )
        output = done.stdout + done.stderr
        names = [line.split()[1] for line in output.splitlines() if line.startswith("job raysubmit_")]
        return Run(directory, done.returncode, output), names[0] if names else ""

    return start


def test_a_job_runs_to_its_end(submit: Callable[..., tuple[Run, str]], cluster: Cluster):
    """Its variables reach the run, also one that the run sets too: with a folder as model the hub is switched off."""
    done, _ = submit("trainer.total_training_steps=1", "data.train_batch_size=2", "env.max_turns=4", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.output[-4000:]
    assert [line for line in done.output.splitlines() if line.startswith("update    1 ")], done.output[-4000:]
    assert len(done.rollouts(1)) == 8
    assert latest_step(done.directory / "checkpoints") == 1
    gone(cluster, done.directory)


def test_a_job_that_cannot_work_returns_the_run_s_exit_code_and_sentence(
    submit: Callable[..., tuple[Run, str]], cluster: Cluster
):
    done, _ = submit("trainer.total_training_steps=1", "trainer.n_gpus_per_node=2")
    assert done.returncode == 1
    followed = done.output[: done.output.index("failed: Job entrypoint command")]
    errors = [line for line in followed.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "needs 1 nodes with 2 GPUs each, which 0 of 2 nodes have" in errors[0], done.output
    assert "Traceback" not in done.output
    gone(cluster, done.directory)


def test_a_job_without_the_token_is_refused_in_one_sentence(submit: Callable[..., tuple[Run, str]]):
    done, job = submit(RAY_AUTH_MODE="disabled")
    assert (done.returncode, job) == (1, ""), done.output
    errors = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "does not take the job: Authentication required" in errors[0], done.output
    assert "Traceback" not in done.output


def test_a_job_whose_driver_is_killed_leaves_no_process(submit: Callable[..., tuple[Run, str]], cluster: Cluster):
    """SIGKILL in the middle of an update of several seconds, on both nodes; the cluster goes on."""
    both = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "actor_rollout_ref.actor.ppo_epochs=8"]
    done, job = submit("--no-wait", "trainer.total_training_steps=50", *both, timeout=120)
    assert done.returncode == 0, done.output
    log = lambda: cluster.ray("job", "logs", job)  # noqa: E731
    wait_for(
        "the update of the weights, by both ranks",
        lambda: any("update_actor" in title for title in cluster.workers()),
        *(480, log),
    )
    (driver,) = drivers(cluster, done.directory)
    driver.kill()
    gone(cluster, done.directory)
    status = lambda: cluster.ray("job", "status", job)  # noqa: E731
    wait_for("the failure of the job", lambda: "failed" in status(), PROMISED_SECONDS, status)
    assert len(nodes_of(cluster)) == 2


def drivers(cluster: Cluster, directory: Path) -> list[psutil.Process]:
    """The processes that run the job's command, without the shell around it, whose command line is one word."""
    found = []
    for process in marked(cluster.home):
        with contextlib.suppress(psutil.Error):
            if f"run_dir={directory}" in process.cmdline():
                found.append(process)
    return [process for process in found if process.ppid() not in {other.pid for other in found}]


def test_a_stopped_job_completes_its_update_saves_and_goes(submit: Callable[..., tuple[Run, str]], cluster: Cluster):
    """Stopped in the middle of an update of several seconds, more than Ray gives a job by itself."""
    done, job = submit(
        "--no-wait", "trainer.total_training_steps=50", "actor_rollout_ref.actor.ppo_epochs=8", timeout=120
    )
    assert done.returncode == 0, done.output
    log = lambda: cluster.ray("job", "logs", job)  # noqa: E731
    wait_for(
        "the update of the weights",
        lambda: any("update_actor" in title for title in cluster.workers()),
        *(300, log),
    )
    cluster.ray("job", "stop", job, timeout=300)
    assert "was stopped" in cluster.ray("job", "status", job)
    assert "stopped by SIGTERM after update 1, which is saved in" in log(), log()
    assert latest_step(done.directory / "checkpoints") == 1
    assert sorted(done.metrics) == [1] and len(done.rollouts(1)) == 16
    gone(cluster, done.directory)
