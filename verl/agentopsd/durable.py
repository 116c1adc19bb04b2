"""The part of the trainer that makes a run survive: limits of stages, checkpoints, resume, SIGTERM, dead workers.

It knows nothing of the method: :class:`~verl.agentopsd.trainer.AgentOPSDTrainer` builds on it. An update counts as
complete when its weights, episode records and metrics are all there; what is saved is always a complete update.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl.agentopsd.checkpoints import (
    Checkpoints,
    latest_step,
    random_state,
    restore_random_state,
    run_state,
    step_folder,
)
from verl.agentopsd.liveness import Liveness
from verl.agentopsd.reshard import resharded
from verl.agentopsd.run_guard import drop_later, resumed_checkpoint
from verl.agentopsd.run_log import RunLog
from verl.agentopsd.termination import Stopped, Termination
from verl.agentopsd.watchdog import stage

logger = logging.getLogger(__name__)


class ValidationCut(Exception):
    """SIGTERM arrived during a validation: the update before it is worth saving, a validation can be repeated."""


class DurableTrainer(PPOTrainerSync):
    """verl's synchronous trainer.

    Attributes:
        termination: what SIGTERM does; installed by the runner.
    """

    _players: Liveness | None = None
    """Who plays and serves, from the moment they do."""

    def __init__(self, config: DictConfig):
        self.run_dir = Path(config.run_dir)
        super().__init__(config)
        self.checkpoints = Checkpoints(
            Path(config.trainer.default_local_dir), keep=config.trainer.get("max_actor_ckpt_to_keep")
        )
        self.termination = Termination()
        self._tracking: RunLog | None = None
        self._completed = 0

    # -- what a run writes ---------------------------------------------------------------------------------------

    @property
    def logger(self) -> Any:
        return self._tracking

    @logger.setter
    def logger(self, tracking: Any) -> None:
        """Upstream assigns its Tracking here once training starts; ours adds metrics.jsonl and the progress."""
        self._tracking = RunLog(
            tracking, self.run_dir, self.total_training_steps, self.global_steps, on_logged=self._on_logged
        )

    def _on_logged(self, step: int) -> None:
        """The update is complete: weights, records and metrics. Its checkpoint, if there is one, becomes the latest."""
        self.checkpoints.commit(step)
        self._completed = step
        self.termination.release()

    # -- stages and their limits ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _limited(self, name: str) -> Iterator[None]:
        with stage(name, float(self.config.limits[name]), self.run_dir):
            # while it plays, the trainer asks by itself; before it plays, there is nobody to ask
            if self._players is None or name in ("rollout", "validation"):
                yield
            else:
                with self._players.watching(str(self.run_dir)):
                    yield

    def _setup(self) -> None:
        with self._limited("start"):
            super()._setup()

    def on_init_end(self) -> None:
        with self._limited("weight_sync"):
            super().on_init_end()

    def on_step_begin(self) -> None:
        self._before_update = self._run_state()
        super().on_step_begin()

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self._limited("log_prob"):
            return super()._compute_old_log_prob(batch, metrics)

    def _compute_ref_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        with self._limited("log_prob"):
            return super()._compute_ref_log_prob(batch, metrics)

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self.termination.hold()  # until the update's line in metrics.jsonl
        with self._limited("update"):
            return super()._update_actor(batch, metrics)

    def on_step_end(self) -> None:
        with self._limited("weight_sync"):
            super().on_step_end()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _run_state(self) -> dict[str, Any]:
        """What the learner's checkpoint lacks: order of and position in the data, this process's generators."""
        return {"data": self.train_dataloader.state_dict(), "random": random_state()}

    def _save_checkpoint(self) -> None:
        self._save(self._run_state())

    def _save(self, state: dict[str, Any]) -> None:
        with self._limited("save"):
            self.checkpoints.save(self.global_steps, functools.partial(self._write_checkpoint, state), state)

    def _write_checkpoint(self, state: dict[str, Any], folder: Path) -> None:
        """Upstream's checkpoint in ``folder``; which ones are kept and which is the latest is decided here."""
        settings = self.config.trainer
        usual = settings.default_local_dir, settings.max_actor_ckpt_to_keep
        settings.default_local_dir, settings.max_actor_ckpt_to_keep = str(folder), None
        try:
            super()._save_checkpoint()
        finally:
            settings.default_local_dir, settings.max_actor_ckpt_to_keep = usual
        torch.save(state["data"], step_folder(folder, self.global_steps) / "data.pt")

    def _load_checkpoint(self) -> None:
        with self._for_these_ranks():
            super()._load_checkpoint()
        drop_later(self.run_dir, self.global_steps)
        if self.global_steps == 0:
            return
        self.config.trainer.val_before_train = False  # these weights were validated, or not, by the run so far
        folder = resumed_checkpoint(self.config)
        state = run_state(folder) if folder is not None else None
        if state is not None:
            restore_random_state(state["random"])

    @contextlib.contextmanager
    def _for_these_ranks(self) -> Iterator[None]:
        """Meanwhile upstream finds a checkpoint of as many ranks as this run has."""
        settings, checkpoint = self.config.trainer, resumed_checkpoint(self.config)
        if checkpoint is None:
            yield
            return
        usual, ranks = (settings.resume_mode, settings.resume_from_path), settings.nnodes * settings.n_gpus_per_node
        with resharded(checkpoint, ranks, self.checkpoints.folder / ".resharded") as folder:
            settings.resume_mode, settings.resume_from_path = "resume_path", str(folder)
            try:
                yield
            finally:
                settings.resume_mode, settings.resume_from_path = usual

    # -- the end, wanted or not ----------------------------------------------------------------------------------

    def fit(self, agent_loop_manager: Any) -> None:
        """Trains.

        Raises:
            Stopped: SIGTERM; the last completed update is saved.
            WorkerLost: a process that plays or serves has died.
        """
        self._completed = self.global_steps
        servers, workers = self.llm_server_manager.server_handles, agent_loop_manager.agent_loop_workers
        served = {f"rollout server {number}": actor for number, actor in enumerate(servers)}
        playing = {f"agent-loop worker {number}": actor for number, actor in enumerate(workers)}
        learning = {f"training worker {number}": actor for number, actor in enumerate(self.actor_rollout_wg.workers)}
        self._liveness = Liveness(playing | learning, served)
        self._players = Liveness(playing, served)
        buffer: Any = self.replay_buffer  # replay.EpisodeBuffer, by the configuration
        buffer.check_workers = self._liveness.check
        try:
            super().fit(agent_loop_manager)
        except KeyboardInterrupt:
            if not self.termination.requested:
                raise
            raise Stopped(self._save_before_stop()) from None

    def _while_validating(self) -> None:
        self._liveness.check()
        if self.termination.requested:
            raise ValidationCut

    def _save_before_stop(self) -> str:
        """Saves the last completed update unless it is saved; returns what to tell the user."""
        interrupted = self.global_steps > self._completed  # in the middle of the next update, before its weights change
        self.global_steps = self._completed
        if self._completed == 0:
            return "stopped by SIGTERM before the first update was complete; there is nothing to save"
        if self._completed > (latest_step(self.checkpoints.folder) or 0):
            self._save(self._before_update if interrupted else self._run_state())
            self.checkpoints.commit(self._completed)
        return (
            f"stopped by SIGTERM after update {self._completed}, which is saved in {self.checkpoints.folder}; the same "
            "command with the same run_dir continues from there"
        )
