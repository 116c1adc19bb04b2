"""What the run will ask of Ray, GPUs, disk and network, against what is there."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl.agentopsd.config import teacher_gpus
from verl.agentopsd.doctor.finding import Finding, error, ok, unchecked, warning
from verl.agentopsd.doctor.gpus import GIB
from verl.agentopsd.doctor.shapes import ModelShape
from verl.agentopsd.ray_auth import use_token_if_there

CPUS_PER_GPU = 3
"""verl reserves so many Ray CPUs beside every GPU of a pool."""


@dataclass(frozen=True)
class Gpu:
    """One GPU of this machine."""

    name: str
    total: int
    used: int


@dataclass(frozen=True)
class Needs:
    """What the configuration will ask Ray for."""

    nodes: int
    gpus_per_node: int
    teacher_gpus: int
    cpus: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node + self.teacher_gpus

    def arithmetic(self) -> str:
        """``9 GPUs: 8 actor + 1 teacher``."""
        actor = f"{self.nodes * self.gpus_per_node} actor (trainer.nnodes {self.nodes} × trainer.n_gpus_per_node "
        actor += f"{self.gpus_per_node})"
        teacher = f" + {self.teacher_gpus} teacher" if self.teacher_gpus else ""
        return f"{self.gpus} GPUs: {actor}{teacher}"


def needs(config: DictConfig) -> Needs:
    """GPUs of the actor and of a teacher with GPUs of its own, and CPUs for everything that runs beside them."""
    nodes, per_node = int(config.trainer.nnodes), int(config.trainer.n_gpus_per_node)
    teacher = teacher_gpus(config)
    storage = OmegaConf.select(config, "transfer_queue.backend.SimpleStorage.num_data_storage_units", default=1)
    # actors that are not in a pool count while they are placed, not while they run
    return Needs(nodes, per_node, teacher, CPUS_PER_GPU * (nodes * per_node + teacher) + int(storage) + 1)


def cluster_problem(wanted: Needs, nodes: list[dict[str, float]]) -> str | None:
    """Why a Ray cluster cannot hold the run, with the arithmetic; None when it can.

    Args:
        nodes: the resources (``{"GPU": 8.0, "CPU": 96.0}``) of every living node.
    """
    have = int(sum(node.get("GPU", 0) for node in nodes))
    if have < wanted.gpus:
        return (
            f"the run needs {wanted.arithmetic()}; the Ray cluster has {have} on {len(nodes)} "
            f"node{'s' if len(nodes) != 1 else ''}: lower them, add nodes, or stop the running cluster (ray stop) and "
            "unset RAY_ADDRESS to start a local one"
        )
    able = sum(node.get("GPU", 0) >= wanted.gpus_per_node for node in nodes)
    if able < wanted.nodes:
        found = ", ".join(str(int(node.get("GPU", 0))) for node in nodes)
        return (
            f"the run needs {wanted.nodes} nodes with {wanted.gpus_per_node} GPUs each, which {able} of {len(nodes)} "
            f"nodes have (GPUs per node: {found}): set trainer.n_gpus_per_node to what one node has and trainer.nnodes "
            "to match"
        )
    cpus = int(sum(node.get("CPU", 0) for node in nodes))
    if cpus < wanted.cpus:
        return (
            f"the run needs {wanted.cpus} Ray CPUs ({CPUS_PER_GPU} per GPU, one for the transfer queue, one per "
            f"storage unit); the Ray cluster has {cpus}: start its nodes with a larger --num-cpus (counted, not used)"
        )
    # the transfer queue is placed first, on any node, where the actor's share must still fit: Ray would wait for ever
    each = wanted.cpus - CPUS_PER_GPU * (wanted.gpus - wanted.gpus_per_node)
    fit = sum(node.get("GPU", 0) >= wanted.gpus_per_node and node.get("CPU", 0) >= each for node in nodes)
    if fit < wanted.nodes:
        found = ", ".join(str(int(node.get("CPU", 0))) for node in nodes)
        return (
            f"the run needs {wanted.nodes} nodes with {each} Ray CPUs each ({CPUS_PER_GPU} per GPU, and the transfer "
            f"queue on any of them), which {fit} of {len(nodes)} nodes have (CPUs per node: {found}): start them with "
            "a larger --num-cpus (counted, not used)"
        )
    return None


def check(config: DictConfig, shape: ModelShape | None) -> list[Finding]:
    """GPUs, Ray, disk, memory and network of this machine."""
    wanted = needs(config)
    on_cpu = config.trainer.device == "cpu"
    findings = [ok("gpus", "none needed: device=cpu")] if on_cpu else _gpus(wanted, gpus())
    findings.append(_ray(wanted, on_cpu))
    findings += [_disk(config, shape), _shared_memory(), _network(wanted.nodes)]
    return findings


def gpus() -> list[Gpu]:
    """The GPUs that ``nvidia-smi`` lists and ``CUDA_VISIBLE_DEVICES`` leaves; empty without it."""
    command = ["nvidia-smi", "--query-gpu=uuid,name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in output.splitlines() if line.count(",") == 3]
    found = {uuid: Gpu(name, int(total) * 2**20, int(used) * 2**20) for uuid, name, total, used in rows}
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return list(found.values())
    chosen = []
    for name in map(
        str.strip, visible.split(",")
    ):  # a number, or the beginning of a UUID; CUDA stops at the first other
        known = [uuid for number, uuid in enumerate(found) if name and (name == str(number) or uuid.startswith(name))]
        if not known:
            break
        chosen.append(found[known[0]])
    return chosen


def _gpus(wanted: Needs, found: list[Gpu]) -> list[Finding]:
    if not found:
        return [unchecked("gpus", f"no GPU on this machine; the run needs {wanted.arithmetic()}")]
    findings = [ok("gpus", f"{len(found)} × {found[0].name}, {found[0].total / GIB:.0f} GiB")]
    if len(found) < wanted.gpus_per_node + wanted.teacher_gpus and "RAY_ADDRESS" not in os.environ:
        findings.append(
            error(
                "gpus",
                f"the run needs {wanted.arithmetic()}; this machine has {len(found)}: set hardware.gpus_per_node="
                f"{len(found)}, or join a cluster with RAY_ADDRESS",
            )
        )
    if busy := [str(index) for index, gpu in enumerate(found) if gpu.used > 0.1 * gpu.total]:
        findings.append(
            warning(
                "gpus",
                f"GPU {', '.join(busy)}: more than 10 % of the memory is taken by other processes (nvidia-smi lists "
                "them); the run counts on the whole memory",
            )
        )
    if len({gpu.name for gpu in found}) > 1:
        findings.append(warning("gpus", "different GPUs in one machine: every stage waits for the slowest of them"))
    return findings


def _ray(wanted: Needs, on_cpu: bool) -> Finding:
    """The cluster of RAY_ADDRESS, joined for a moment; without one the run starts its own."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        own = "as many logical GPUs" if on_cpu else "this machine's GPUs"
        if wanted.nodes > 1 and not on_cpu:
            text = f"trainer.nnodes={wanted.nodes} but RAY_ADDRESS is not set: start Ray on the nodes (docs/cluster.md)"
            return warning("ray", text)
        return ok("ray", f"the run starts a local Ray with {own}: {wanted.arithmetic()}")
    try:
        nodes = cluster_nodes(address)
    except Exception as failure:  # whatever Ray raises: the address is the user's
        return error("ray", f"no Ray cluster answers at RAY_ADDRESS={address}: {str(failure).splitlines()[0]}")
    if problem := cluster_problem(wanted, nodes):
        return error("ray", problem)
    return ok("ray", f"{address}: {len(nodes)} nodes; the run needs {wanted.arithmetic()}, {wanted.cpus} CPUs")


def cluster_nodes(address: str) -> list[dict[str, float]]:
    """Resources of the living nodes of a running cluster."""
    import ray

    joined = ray.is_initialized()
    if not joined:
        use_token_if_there()
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    try:
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]
    finally:
        if not joined:
            ray.shutdown()


def _disk(config: DictConfig, shape: ModelShape | None) -> Finding:
    """Checkpoints hold weights and Adam in float32; one more than is kept exists while a new one is written."""
    folder = Path(str(config.run_dir)).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if shape is None:
        return unchecked("disk", f"{free / GIB:.0f} GiB free at {folder}; the size of a checkpoint is unknown")
    keep = 0 if int(config.trainer.save_freq) <= 0 else int(config.trainer.max_actor_ckpt_to_keep or 1) + 1
    one = shape.parameters * 4 * 3
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n * config.trainer.total_training_steps
    records = rows * config.data.max_response_length * 8 // 2
    need = keep * one + records
    text = (
        f"{free / GIB:.0f} GiB free at {folder}; {keep} checkpoints × {one / GIB:.1f} GiB + {records / GIB:.1f} GiB of "
        f"records = {need / GIB:.1f} GiB"
    )
    if free < need and config.trainer.device != "cpu" and not gpus():
        return warning("disk", f"{text}; this machine has no GPU, so the run's disk is probably another")
    if free < need:
        return error(
            "disk", f"{text}: choose a run_dir on a larger disk, or lower trainer.max_actor_ckpt_to_keep or save_freq"
        )
    return ok("disk", text)


def _shared_memory() -> Finding:
    """Ray's object store lies in /dev/shm; where that is small (containers: 64 MB) it falls back to slow files."""
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return unchecked("shared memory", "no /dev/shm")
    if size < 2 * GIB:
        return warning(
            "shared memory",
            f"/dev/shm has {size / GIB:.2f} GiB: Ray's object store becomes slow; docker run --shm-size=16g",
        )
    return ok("shared memory", f"/dev/shm {size / GIB:.0f} GiB")


def _network(nodes: int = 1) -> Finding:
    """Workers listen on free ports of the address that this machine's name stands for."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return warning(
            "network", f"the name of this machine, {name}, has no address: add it to /etc/hosts, or workers cannot meet"
        )
    if nodes > 1 and address.startswith("127.") and "RAY_ADDRESS" not in os.environ:
        return warning(
            "network",
            f"the name of this machine, {name}, stands for {address}, where other nodes cannot reach it: give it its "
            "network address in /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
        )
    try:
        with socket.socket() as listener:
            listener.bind((address, 0))
            listener.listen()
    except OSError as failure:
        return error("network", f"{name} ({address}) refuses to listen on a free port: {failure}")
    return ok("network", f"{name} listens at {address}")
