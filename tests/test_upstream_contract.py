"""What we override in verl, pinned: an upgrade that moves one of these breaks here, in one place, by name."""

import inspect

import pytest
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

TRAINER = {
    "_setup": "(self)",
    "_init_dataloader": "(self)",
    "on_init_end": "(self)",
    "on_step_end": "(self)",
    "_fetch_one_gen_batch": "(self) -> tensordict._td.TensorDict",
    "_balance_batch": "(self, batch: transfer_queue.metadata.KVBatchMeta, metrics, logging_prefix='global_seqlen', "
    "keep_minibatch=False)",
    "_compute_advantage": "(self, batch: transfer_queue.metadata.KVBatchMeta, metrics: dict) -> "
    "transfer_queue.metadata.KVBatchMeta",
    "_update_actor": "(self, batch: transfer_queue.metadata.KVBatchMeta, metrics: dict) -> "
    "transfer_queue.metadata.KVBatchMeta",
    "_save_checkpoint": "(self)",
    "_log_rollout_data": "(self, batch: transfer_queue.metadata.KVBatchMeta, timing_raw: dict, rollout_data_dir: str)",
    "_validate": "(self) -> dict[str, float]",
}


@pytest.mark.parametrize("name", TRAINER)
def test_trainer_methods_we_override(name: str):
    assert str(inspect.signature(getattr(PPOTrainerSync, name))) == TRAINER[name]


def test_the_order_of_one_update():
    source = inspect.getsource(PPOTrainer._step_once)
    stages = [
        "sample",
        "_balance_batch",
        "_compute_old_log_prob",
        "_compute_ref_log_prob",
        "_compute_advantage",
        "_update_actor",
    ]
    positions = [source.index(f"{stage}(") for stage in stages]
    assert positions == sorted(positions)


def test_replay_buffer_hooks():
    source = inspect.getsource(ReplayBuffer.sample)
    assert "self._wait_for_next_poll(partition_id, last_debug_time)" in source
    assert "self._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)" in source
    assert "poll_interval" in inspect.signature(ReplayBuffer.__init__).parameters


def test_a_plain_batch_is_scored_without_the_transfer_queue():
    from verl.workers.engine_workers import ActorRolloutRefWorker

    assert list(inspect.signature(ActorRolloutRefWorker.compute_log_prob).parameters) == ["self", "data"]
