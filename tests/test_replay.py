"""The replay buffer's order, its limit, and how a failed game ends the wait."""

import pytest

from verl.agentopsd.replay import EpisodeBuffer, RolloutFailed, RolloutStalled, episode_order
from verl.agentopsd.rollout.failures import report


def buffer(tmp_path, monkeypatch, games, limit=0.0):
    """A buffer whose transfer queue holds ``games``: status by key, and their episodes."""
    import verl.trainer.ppo.v1.replay_buffer as upstream

    class Queue:
        cleared: list = []

        def kv_list(self):
            return {"train": games}

        def kv_clear(self, keys, partition_id):
            self.cleared += keys

    monkeypatch.setattr(upstream, "tq", Queue())
    return EpisodeBuffer(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs={"poll_seconds": 0.001, "limit_seconds": limit, "run_dir": str(tmp_path)},
        refill_fn=None,
    )


def prompt(status):
    return {"is_prompt": True, "status": status, "global_steps": 1}


def test_order_does_not_depend_on_arrival(tmp_path, monkeypatch):
    late_first = {
        "000001-0001": prompt("finished"),
        "000001-0001_1_0": {"seq_len": 4},
        "000001-0000": prompt("finished"),
        "000001-0001_0_0": {"seq_len": 3},
        "000001-0000_10_0": {"seq_len": 2},
        "000001-0000_9_0": {"seq_len": 1},
    }
    batch, _ = buffer(tmp_path, monkeypatch, late_first).sample(global_steps=1, partition_id="train", batch_size=2)
    assert batch.keys == ["000001-0000_9_0", "000001-0000_10_0", "000001-0001_0_0", "000001-0001_1_0"]
    assert [tag["seq_len"] for tag in batch.tags] == [1, 2, 3, 4]


def test_episodes_are_ordered_by_number_not_by_text():
    assert episode_order("000001-0000_9_0") < episode_order("000001-0000_10_0") < episode_order("000001-0001_0_0")


def test_no_progress_is_an_error_that_says_what_it_waited_for(tmp_path, monkeypatch):
    waiting = buffer(tmp_path, monkeypatch, {"000001-0000": prompt("running"), "000001-0001": prompt("pending")})
    with pytest.raises(RolloutStalled, match=r"1 games run, 1 wait.*Raise limits.rollout"):
        waiting.sample(global_steps=1, partition_id="train", batch_size=2)


def test_a_failed_game_ends_the_wait_and_quotes_the_worker(tmp_path, monkeypatch):
    report(tmp_path, "train/some-game", ValueError("the engine died"))
    failed = buffer(tmp_path, monkeypatch, {"000001-0000": prompt("failure")}, limit=60)
    with pytest.raises(
        RolloutFailed, match="1 games could not be played.*train/some-game: ValueError: the engine died"
    ):
        failed.sample(global_steps=1, partition_id="train", batch_size=1)
