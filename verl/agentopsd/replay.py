"""verl's replay buffer with three differences: it polls fast, it gives up, and its order does not depend on timing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl.agentopsd.rollout.failures import worker_errors
from verl.agentopsd.watchdog import write_stacks


class RolloutStalled(RuntimeError):
    """No episode finished within the limit."""


class RolloutFailed(RuntimeError):
    """Episodes are missing although their games are over: the engine or a worker failed, not the environment."""


class EpisodeBuffer(ReplayBuffer):
    """Named in ``trainer.v1.sampler.custom_sampler``.

    ``sampler_kwargs.poll_seconds`` replaces upstream's two seconds; ``sampler_kwargs.limit_seconds`` bounds the time
    without any progress. Upstream lists episodes as they arrive; here they are sorted by (game, episode), so that the
    batch is the same whichever episode ended first (I12).
    """

    def __init__(self, **kwargs: Any):
        options = kwargs["sampler_kwargs"] or {}
        self.limit_seconds = float(options.get("limit_seconds", 1800))
        self.run_dir = str(options.get("run_dir", "."))
        self.check_workers: Callable[[], None] = lambda: None  # set once the workers are there
        super().__init__(poll_interval=float(options.get("poll_seconds", 0.05)), **kwargs)
        self._progress: tuple[int, int, int] | None = None
        self._since = time.monotonic()

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        self._progress, self._since = None, time.monotonic()
        return super().sample(*args, **kwargs)

    def _terminal_eviction_reasons(self, global_steps: int, partition_id: str) -> Any:
        if failed := self.failure_keys[partition_id]:
            raise RolloutFailed(f"{len(failed)} games could not be played; {worker_errors(self.run_dir)}")
        return super()._terminal_eviction_reasons(global_steps, partition_id)

    def _wait_for_next_poll(self, partition_id: str, last_debug_time: float) -> float:
        self.check_workers()
        progress = (
            len(self.partitions[partition_id]),
            len(self.finished_keys[partition_id]),
            len(self.failure_keys[partition_id]),
        )
        if progress != self._progress:
            self._progress, self._since = progress, time.monotonic()
        if time.monotonic() - self._since > self.limit_seconds:
            stacks = Path(self.run_dir) / "stalled-rollout.txt"
            write_stacks(stacks)
            raise RolloutStalled(
                f"no episode finished for {self.limit_seconds:.0f} s ({progress[0]} are there, "
                f"{len(self.running_keys[partition_id])} games run, {len(self.pending_keys[partition_id])} wait). "
                f"The stacks of all processes are in {stacks}. Raise limits.rollout if episodes take that long; "
                f"{worker_errors(self.run_dir)}"
            )
        return super()._wait_for_next_poll(partition_id, last_debug_time)

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict]
    ) -> KVBatchMeta:
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)
        batch.reorder(sorted(range(len(batch)), key=lambda i: episode_order(batch.keys[i])))
        return batch


def episode_order(key: str) -> tuple[str, int, int]:
    """Sort key of ``{uid}_{session}_{output}``."""
    uid, session, output = key.rsplit("_", 2)
    return uid, int(session), int(output)
