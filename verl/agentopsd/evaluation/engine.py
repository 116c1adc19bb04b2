"""Plays games with verl's rollout engine and agent loops and hands over each episode as soon as it has ended.

The evaluation command starts an engine of its own, without any training worker (:func:`rollout_engine`); validation
during training plays through the engine that is already there. Both use :func:`play` and :func:`episode_of`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from verl.agentopsd.dataset import EpisodeDataset
from verl.agentopsd.envs.base import Task
from verl.agentopsd.evaluation.records import EpisodeRecord, episode_record, messages_shown
from verl.agentopsd.platform.forked import preload
from verl.agentopsd.replay import RolloutFailed, RolloutStalled
from verl.agentopsd.rollout.chat import ChatFormat
from verl.agentopsd.rollout.failures import worker_errors
from verl.agentopsd.skills.bank import SkillBank, SkillLeak, assert_skill_free
from verl.agentopsd.watchdog import stage, write_stacks

PARTITION = "val"
"""verl's agent loops put what they play with validation sampling into this partition of the transfer queue."""


class EngineError(RuntimeError):
    """The rollout engine did not start."""


@dataclass(frozen=True)
class Played:
    """One episode.

    Attributes:
        game: position of the game in the list that was played.
        sample: which of the game's episodes this is.
        facts: the agent loop's ``extra_fields``.
        prompt_ids: the prompt's tokens as the engine got them.
    """

    game: int
    sample: int
    facts: dict[str, Any]
    prompt_ids: list[int]


class TaskDataset(EpisodeDataset):
    """Rows as training has them, of given games instead of a split; ``skills`` gives each game's skill text."""

    def __init__(self, tasks: Sequence[Task], env_name: str, seed: int, skills: Sequence[str] | None = None):
        self.tasks, self.env_name, self.seed = list(tasks), env_name, seed
        self.skills = list(skills) if skills is not None else None

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        if self.skills is not None:
            row["extra_info"]["skill"] = self.skills[index]
        return row


@contextlib.contextmanager
def rollout_engine(config: DictConfig, environment: dict[str, str], work_dir: Path) -> Iterator[Any]:
    """verl's agent-loop manager on vLLM servers that load the weights themselves; nothing is left when it ends.

    Args:
        config: resolved; ``actor_rollout_ref.rollout.nnodes`` and ``n_gpus_per_node`` say how many servers there are.
        environment: variables that every worker process must have.
        work_dir: where stacks go if the start stalls.

    Raises:
        EngineError: with what the servers said.
        ResourceError: there are fewer devices than asked for.
    """
    import transfer_queue as tq
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ
    from verl.workers.rollout.llm_server import LLMServerManager

    from verl.agentopsd.task_runner import ResourceError, quiet_libraries, start_ray, stop_ray

    try:
        with stage("start", float(config.limits.start), work_dir):
            try:
                start_ray(config, environment)
                quiet_libraries()
                preload.wait(0.9 * float(config.limits.start))
                tq.init(config.transfer_queue)
                servers = LLMServerManager.create(config=config)
                loops = AgentLoopManagerTQ.create(
                    config=config, llm_client=servers.get_client(), teacher_client=None, reward_loop_worker_handles=[]
                )
            except (ResourceError, preload.PreloadError):
                raise
            except Exception as error:
                raise EngineError(
                    f"the rollout engine did not start: {_reason(error)}; ray_kwargs.ray_init.log_to_driver=true shows "
                    "what its processes print"
                ) from error
        yield loops
    finally:
        with contextlib.suppress(Exception):
            tq.close()
        stop_ray()


def _reason(error: Exception) -> str:
    """The last line of a remote error, which is the error itself behind its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def play(
    loops: Any,
    rows: Sequence[dict[str, Any]],
    *,
    samples: int,
    step: int,
    limit_seconds: float,
    run_dir: Path,
    poll_seconds: float = 0.05,
    check_workers: Callable[[], None] = lambda: None,
) -> Iterator[Played]:
    """Plays every game ``samples`` times with validation sampling; episodes come in the order in which they end.

    Args:
        loops: verl's agent-loop manager.
        rows: of :class:`~verl.agentopsd.dataset.EpisodeDataset`, one per game.
        samples: ``actor_rollout_ref.rollout.val_kwargs.n``, which the loops read.
        step: part of the sampling seeds; an evaluation uses 0, so that all models draw with the same seeds.
        limit_seconds: time without any episode ending after which it is an error.
        run_dir: where the agent loops leave their errors.
        check_workers: called while waiting; raises when a worker has died.

    Raises:
        RolloutFailed: a worker or the engine failed.
        RolloutStalled: no episode ended for too long.
    """
    import transfer_queue as tq

    uids = [f"{step:06d}-v{game:06d}" for game in range(len(rows))]
    waiting = {f"{uid}_{sample}_0": (game, sample) for game, uid in enumerate(uids) for sample in range(samples)}
    tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in uids]
    tq.kv_batch_put(keys=uids, partition_id=PARTITION, tags=tags)
    loops.generate_sequences(_batch(rows, uids, step))
    last_end = time.monotonic()
    while waiting:
        status = {key: tag.get("status") for key, tag in tq.kv_list(PARTITION).get(PARTITION, {}).items()}
        if failed := [uid for uid in uids if status.get(uid) == "failure"]:
            raise RolloutFailed(f"{len(failed)} games could not be played; {worker_errors(run_dir)}")
        ended = [key for key in waiting if status.get(key) == "success"]
        if ended:
            data = tq.kv_batch_get(keys=ended, partition_id=PARTITION, select_fields=["prompts", "extra_fields"])
            tq.kv_clear(keys=ended, partition_id=PARTITION)
            prompts, facts = data["prompts"].unbind(), data.get("extra_fields").tolist()
            for key, prompt, extra in zip(ended, prompts, facts, strict=True):
                yield Played(*waiting.pop(key), extra, prompt.tolist())
            last_end = time.monotonic()
        elif time.monotonic() - last_end > limit_seconds:
            stacks = run_dir / "stalled-validation.txt"
            write_stacks(stacks)
            raise RolloutStalled(
                f"no episode ended for {limit_seconds:.0f} s, {len(waiting)} are missing. The stacks of all processes "
                f"are in {stacks}. Raise limits.validation if episodes take that long; {worker_errors(run_dir)}"
            )
        else:
            check_workers()
            time.sleep(poll_seconds)
    tq.kv_clear(keys=uids, partition_id=PARTITION)


def _batch(rows: Sequence[dict[str, Any]], uids: list[str], step: int) -> Any:
    """The rows as verl's trainer would send them."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.rl_dataset import collate_fn

    batch = collate_fn(list(rows))
    batch["uid"] = np.array(uids, dtype=object)
    games = tu.get_tensordict(batch)
    tu.assign_non_tensor_data(games, "global_steps", step)
    tu.assign_non_tensor_data(games, "validate", True)
    return games


def episode_of(
    played: Played,
    *,
    run: str,
    step: int,
    phase: str,
    chat: ChatFormat,
    bank: SkillBank,
    skill_position: str,
    weights_version: int | None = None,
) -> EpisodeRecord:
    """The record of an episode, after its prompt was found to be what it should be.

    The prompt's tokens must be exactly those of the recorded messages, and these must not contain a line of any skill
    (I11), unless the episode was asked to have one; then it must be that skill and the record says so.

    Raises:
        SkillLeak: the prompt is another one.
    """
    facts = {**played.facts, "skill_position": skill_position}
    assert_skill_free(facts["messages"], bank)
    messages = messages_shown(facts)
    if messages and played.prompt_ids != chat.initial_ids(messages):
        raise SkillLeak(f"the prompt of {facts['game_id']} is not the one that its record would show")
    return episode_record(
        facts,
        run=run,
        step=step,
        phase=phase,
        sample=played.sample,
        weights_version=weights_version,
    )


def sampling_of(config: DictConfig) -> dict[str, Any]:
    """How a validation or an evaluation samples and when it stops, for the summary."""
    settings = config.actor_rollout_ref.rollout.val_kwargs
    return {
        **{name: settings[name] for name in ("temperature", "top_p", "top_k", "n")},
        "max_turns": config.env.max_turns,
        "max_action_tokens": config.env.max_action_tokens,
    }
