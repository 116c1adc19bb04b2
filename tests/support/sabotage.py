"""Runs the main command and strikes it at a chosen moment: ``python sabotage.py VICTIM MOMENT STEP LOG -- ARGUMENTS``.

VICTIM: ``driver`` (SIGKILL to this process), ``terminate`` (SIGTERM to it), ``server``, ``engine``, ``player``,
``learner`` (SIGKILL to the vLLM server, its engine, the agent-loop worker, the training worker). MOMENT: ``rollout``,
``saving`` or the name of a stage with a limit. The blow falls in update STEP. Before it, LOG gets all that the run
listens on, as process and address, the names of the workers that are forks, and every process with its id and start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

from verl.agentopsd.platform.environment import activate_cpu

activate_cpu()  # before anything that asks verl for its platform

from verl.agentopsd import checkpoints, durable, main, replay  # noqa: E402

PROCESSES = {
    "server": "vLLMHttpServer",
    "engine": "VLLM::EngineCore",
    "player": "AgentLoopWorker",
    "learner": "WorkerDict",
}
RENDEZVOUS = ("ray::WorkerDict", "VLLM::EngineCore")
"""Where torch's process groups meet: their store listens on every interface and cannot be told otherwise."""


def strike(victim: str, log: Path) -> None:
    """Falls once."""
    if log.exists():
        return
    children = psutil.Process().children(recursive=True)
    sockets = [(process.name(), c.laddr.ip) for process in [psutil.Process(), *children] for c in listening(process)]
    sockets = [(name, address) for name, address in sockets if not (address == "::" and name in RENDEZVOUS)]
    servers = [child.pid for child in children if "forked/server.py" in " ".join(child.cmdline())]
    forks = [child.name() for child in children if child.ppid() in servers]
    living = [(child.pid, child.create_time(), child.name()) for child in children if child.is_running()]
    log.with_suffix(".new").write_text(json.dumps({"sockets": sockets, "forks": forks, "living": living}))
    log.with_suffix(".new").replace(log)
    if victim in ("driver", "terminate"):
        os.kill(os.getpid(), signal.SIGKILL if victim == "driver" else signal.SIGTERM)
        return
    found = [child for child in children if PROCESSES[victim] in " ".join(child.cmdline())]
    assert found, [" ".join(child.cmdline())[:80] for child in children]
    for process in found:
        process.kill()


def listening(process: psutil.Process) -> list[Any]:
    try:
        return [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return []


def sabotage(victim: str, moment: str, step: int, log: Path) -> None:
    """Puts the blow where it belongs."""

    def before(owner: Any, name: str, due: Any) -> None:
        original = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if due(*args, **kwargs):
                strike(victim, log)
            return original(*args, **kwargs)

        setattr(owner, name, wrapped)

    current: dict[str, int] = {}

    def remember(buffer: Any, *args: Any, **kwargs: Any) -> bool:
        current["step"] = kwargs["global_steps"]
        return False

    if moment == "rollout":
        before(replay.EpisodeBuffer, "sample", remember)
        before(replay.EpisodeBuffer, "_wait_for_next_poll", lambda *args, **kwargs: current["step"] == step)
    elif moment == "saving":  # everything is written, nothing is named yet
        before(checkpoints, "_sync_tree", lambda folder: folder.name == f"global_step_{step}")
    else:
        before(
            durable.DurableTrainer,
            "_limited",
            lambda trainer, name: (name, getattr(trainer, "global_steps", None)) == (moment, step),
        )


if __name__ == "__main__":
    _, victim, moment, step, log, dashes, *arguments = sys.argv
    assert dashes == "--"
    sabotage(victim, moment, int(step), Path(log))
    raise SystemExit(main.main(arguments))
