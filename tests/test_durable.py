"""What the trainer saves, when it counts as saved, and what a resume restores; upstream's part is a stand-in."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl.agentopsd.checkpoints import Checkpoints, latest_step, random_state, run_state
from verl.agentopsd.durable import DurableTrainer
from verl.agentopsd.termination import Stopped, Termination


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DurableTrainer:
    """A trainer in the middle of update 4 whose data loader has handed out four batches."""

    def save(self: DurableTrainer) -> None:
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}" / "actor"
        folder.mkdir(parents=True)
        (folder / "weights").write_text(str(self.global_steps))
        assert self.config.trainer.max_actor_ckpt_to_keep is None, "which ones are kept is decided here"

    monkeypatch.setattr(PPOTrainerSync, "_save_checkpoint", save)
    monkeypatch.setattr(PPOTrainerSync, "_load_checkpoint", lambda self: None)
    made = object.__new__(DurableTrainer)
    made.run_dir = tmp_path
    settings = {
        "default_local_dir": str(tmp_path / "checkpoints"),
        "max_actor_ckpt_to_keep": 2,
        "val_before_train": True,
        "resume_mode": "auto",
        "resume_from_path": None,
        "nnodes": 1,
        "n_gpus_per_node": 1,
    }
    made.config = OmegaConf.create({"run_dir": str(tmp_path), "trainer": settings, "limits": {"save": 60}})
    made.checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    made.termination = Termination()
    made.train_dataloader = SimpleNamespace(state_dict=lambda: {"batches": 3})
    made._before_update = made._run_state()
    made.train_dataloader = SimpleNamespace(state_dict=lambda: {"batches": 4})
    made.global_steps, made._completed = 4, 3
    made.actor_rollout_wg = SimpleNamespace(workers=[])
    return made


def saved(trainer: DurableTrainer, step: int) -> tuple[int, int]:
    """Update of the weights, batches handed out."""
    folder = trainer.run_dir / "checkpoints" / f"global_step_{step}"
    state = run_state(folder)
    data = torch.load(folder / "data.pt", weights_only=True)
    assert state is not None and state["data"] == data
    return int((folder / "actor" / "weights").read_text()), data["batches"]


def test_a_checkpoint_counts_once_the_update_is_logged(trainer: DurableTrainer):
    trainer._save_checkpoint()
    assert latest_step(trainer.checkpoints.folder) is None
    trainer._on_logged(4)
    assert latest_step(trainer.checkpoints.folder) == 4 and trainer._completed == 4
    assert saved(trainer, 4) == (4, 4)
    assert trainer.config.trainer.default_local_dir == str(trainer.run_dir / "checkpoints")
    assert trainer.config.trainer.max_actor_ckpt_to_keep == 2


def test_a_stop_in_the_middle_of_an_update_saves_the_one_before(trainer: DurableTrainer):
    """The batch of update 4 is handed out again after the resume."""
    message = trainer._save_before_stop()
    assert saved(trainer, 3) == (3, 3) and latest_step(trainer.checkpoints.folder) == 3
    assert message.startswith("stopped by SIGTERM after update 3, which is saved in")


def test_a_stop_after_an_update_saves_it(trainer: DurableTrainer):
    trainer._on_logged(4)
    trainer._save_before_stop()
    assert saved(trainer, 4) == (4, 4)


def test_what_is_saved_is_not_saved_again_and_nothing_is_nothing(trainer: DurableTrainer, monkeypatch):
    trainer._save_checkpoint()
    trainer._on_logged(4)
    monkeypatch.setattr(trainer, "_save", lambda state: pytest.fail("saved again"))
    trainer._save_before_stop()
    trainer._completed, trainer.global_steps = 0, 1
    assert "there is nothing to save" in trainer._save_before_stop()


def test_sigterm_waits_for_the_update_in_progress(trainer: DurableTrainer):
    trainer.termination.hold()
    trainer.termination._on_signal(15, None)
    with pytest.raises(KeyboardInterrupt):
        trainer._on_logged(4)
    assert trainer._completed == 4


@pytest.mark.parametrize("requested", [True, False])
def test_only_sigterm_saves_on_an_interrupt(trainer: DurableTrainer, monkeypatch: pytest.MonkeyPatch, requested: bool):
    def fit(self: DurableTrainer, manager: Any) -> None:
        self._on_logged(4)
        self.termination.requested = requested
        raise KeyboardInterrupt

    monkeypatch.setattr(PPOTrainerSync, "fit", fit)
    trainer.llm_server_manager = SimpleNamespace(server_handles=[])
    trainer.replay_buffer = SimpleNamespace()
    with pytest.raises(Stopped if requested else KeyboardInterrupt):
        trainer.fit(SimpleNamespace(agent_loop_workers=[]))
    assert latest_step(trainer.checkpoints.folder) == (4 if requested else None)


def test_a_resume_restores_generators_and_drops_what_comes_again(trainer: DurableTrainer):
    random.seed(5)
    trainer._save(trainer._run_state())
    trainer.checkpoints.commit(4)
    expected = random.random()
    (trainer.run_dir / "rollouts").mkdir()
    for step in (4, 5):
        (trainer.run_dir / "rollouts" / f"{step:06d}.jsonl").touch()
    trainer._load_checkpoint()
    assert random.random() == expected
    assert [file.name for file in (trainer.run_dir / "rollouts").iterdir()] == ["000004.jsonl"]
    assert trainer.config.trainer.val_before_train is False


def test_the_state_is_plain_data(trainer: DurableTrainer, tmp_path: Path):
    torch.save({"random": random_state(), **trainer._run_state()}, tmp_path / "state.pt")
    torch.load(tmp_path / "state.pt", weights_only=True)
