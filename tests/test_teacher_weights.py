"""Whose forward pass the teacher uses, and how long and how many its rows may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl.agentopsd import teacher_model, teacher_weights
from verl.agentopsd.config import TINY_MODEL
from verl.agentopsd.main import compose_config
from verl.agentopsd.teacher_weights import longest_row, without_adapter

TINY = ["model=tiny", "device=cpu"]


class Group:
    """A worker group that says which of its methods was asked."""

    def __init__(self, name: str, world_size: int = 1) -> None:
        self.name, self.world_size = name, world_size

    def compute_log_prob(self, batch: TensorDict) -> Any:
        return self.name, "actor", tu.get(batch, "no_lora_adapter")

    def compute_ref_log_prob(self, batch: TensorDict) -> Any:
        return self.name, "reference", tu.get(batch, "no_lora_adapter")


def trainer(*overrides: str, ref_in_actor: bool = False) -> Any:
    pools = SimpleNamespace(resource_pool_dict={"global_pool": "the actor's pool"})
    return SimpleNamespace(
        config=compose_config([*TINY, *overrides]),
        ref_in_actor=ref_in_actor,
        actor_rollout_wg=Group("actor"),
        ref_policy_wg=Group("reference"),
        resource_pool_manager=pools,
    )


def asked(weights: teacher_weights.TeacherWeights) -> Any:
    return weights.compute_log_prob(TensorDict({}, batch_size=[]))


def test_the_actor_itself():
    weights = teacher_weights.teacher_weights(trainer("hardware.cpu_micro_batch=4"))
    assert asked(weights) == ("actor", "actor", None)
    assert (weights.row_multiple, weights.max_length) == (4, 2048)


def test_the_reference():
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    assert asked(teacher_weights.teacher_weights(trainer("agentopsd.teacher.source=ref", kl)))[:2] == (
        "reference",
        "reference",
    )


def test_under_lora_the_reference_is_the_actor_without_its_adapter():
    made = trainer("agentopsd.teacher.source=ref", "actor_rollout_ref.model.lora_rank=8", ref_in_actor=True)
    assert asked(teacher_weights.teacher_weights(made)) == ("actor", "actor", True)
    batch = TensorDict({}, batch_size=[])
    assert tu.get(without_adapter(lambda given: given)(batch), "no_lora_adapter") is True


def test_a_checkpoint_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """Two ranks of its own with micro-batches of 4: rows come in eights."""
    pools = []
    monkeypatch.setattr(
        teacher_weights, "start_teacher_group", lambda config, pool: pools.append(pool) or Group("teacher", 2)
    )
    overrides = ["agentopsd.teacher.source=model", f"agentopsd.teacher.path={TINY_MODEL}", "hardware.cpu_micro_batch=4"]
    weights = teacher_weights.teacher_weights(trainer(*overrides))
    assert asked(weights)[:2] == ("teacher", "reference") and pools == ["the actor's pool"]
    assert weights.row_multiple == 8


def test_the_teacher_s_workers_read_its_checkpoint_and_no_adapter():
    overrides = ["agentopsd.teacher.source=model", "agentopsd.teacher.path=/t", "actor_rollout_ref.model.lora_rank=8"]
    config = compose_config([*TINY, *overrides])
    section = teacher_model.worker_config(config)
    assert (section.model.path, section.model.lora_rank, section.model.lora_adapter_path) == ("/t", 0, None)
    assert config.actor_rollout_ref.model.lora_rank == 8, "the actor's own section is left alone"


def test_a_dynamic_micro_batch_limits_a_row():
    config = compose_config([*TINY, "device=cpu"])
    config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz = True
    config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu = 1000
    assert longest_row(config, str(TINY_MODEL), "ref") == 1000
    assert longest_row(config, str(TINY_MODEL), "rollout") == 2048
