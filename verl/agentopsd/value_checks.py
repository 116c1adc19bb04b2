"""Ranges and types of the numbers and flags that the other checks compute with; checked before any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf


@dataclass(frozen=True)
class Check:
    """What a value must be, in words, and the test of it."""

    must_be: str
    holds: Callable[[Any], bool]


def _whole(low: int) -> Check:
    return Check(f"a whole number, at least {low}", lambda v: type(v) is int and v >= low)


def _number(holds: Callable[[float], bool], bounds: str) -> Check:
    return Check(f"a number, {bounds}", lambda v: type(v) in (int, float) and holds(v) and abs(v) != float("inf"))


def _or_none(check: Check) -> Check:
    return Check(f"null, or {check.must_be}", lambda v: v is None or check.holds(v))


FLAG = Check("true or false", lambda v: isinstance(v, bool))
TEXT = Check("a text", lambda v: isinstance(v, str) and bool(v))
POSITIVE = _number(lambda v: v > 0, "greater than 0")
FREQUENCY = Check("a whole number of updates, or -1 for never", lambda v: type(v) is int and (v == -1 or v >= 1))
SPLITS = Check(
    "the name of a split, or a list of them",
    lambda v: isinstance(v, str) or isinstance(v, list | ListConfig) and len(v) > 0 and all(type(s) is str for s in v),
)

CHECKS: Mapping[str, Check] = {
    "run_dir": TEXT,
    "trust_checkpoint": FLAG,
    "agentopsd.base_estimator": TEXT,
    "agentopsd.max_logprob_gap": POSITIVE,
    "agentopsd.teacher.skills": TEXT,
    "env.name": TEXT,
    "env.data_dir": _or_none(TEXT),
    "env.check_counts": FLAG,
    "env.show_admissible": FLAG,
    "env.reset_timeout": POSITIVE,
    "env.step_timeout": POSITIVE,
    "env.workers": _whole(1),
    "env.episodes_per_worker": _whole(1),
    "env.worker_memory_mb": _whole(64),
    "env.generated.dir": _or_none(TEXT),
    "env.generated.train": _whole(1),
    "env.generated.valid_seen": _whole(1),
    "env.generated.valid_unseen": _whole(1),
    "env.generated.seed": _whole(0),
    **{
        f"limits.{stage}": POSITIVE
        for stage in ("start", "rollout", "validation", "log_prob", "teacher", "update", "weight_sync", "save")
    },
    "data.train_files": SPLITS,
    "data.val_files": SPLITS,
    "data.train_batch_size": _whole(1),
    "data.train_max_samples": _whole(-1),
    "data.val_max_samples": _whole(-1),
    "data.max_prompt_length": _whole(1),
    "data.max_response_length": _whole(1),
    "data.shuffle": FLAG,
    "data.trust_remote_code": FLAG,
    "actor_rollout_ref.model.path": TEXT,
    "actor_rollout_ref.model.trust_remote_code": FLAG,
    "actor_rollout_ref.actor.ppo_mini_batch_size": _whole(1),
    "actor_rollout_ref.actor.ppo_epochs": _whole(1),
    "actor_rollout_ref.actor.optim.lr": _number(lambda v: v >= 0, "at least 0"),
    "actor_rollout_ref.rollout.n": _whole(1),
    "actor_rollout_ref.rollout.temperature": POSITIVE,
    "actor_rollout_ref.rollout.agent.num_workers": _whole(1),
    "trainer.total_training_steps": _whole(1),
    "trainer.total_epochs": _whole(1),
    "trainer.save_freq": FREQUENCY,
    "trainer.test_freq": FREQUENCY,
    "trainer.val_before_train": FLAG,
    "trainer.max_actor_ckpt_to_keep": _or_none(_whole(1)),
    "trainer.n_gpus_per_node": _whole(1),
    "trainer.nnodes": _whole(1),
}


def problems(config: DictConfig) -> list[str]:
    """One line per value that cannot be; keys that the configuration lacks are left to their readers."""
    found = []
    for key, check in CHECKS.items():
        value = OmegaConf.select(config, key, default=_ABSENT)
        if value is not _ABSENT and not check.holds(value):
            found.append(f"{key}={value}: must be {check.must_be}")
    if OmegaConf.select(config, "trainer.resume_mode") not in ("auto", "disable", "resume_path"):
        found.append(f"trainer.resume_mode={config.trainer.resume_mode}: must be one of auto, disable, resume_path")
    if OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"):
        found.append(
            "algorithm.rollout_correction.bypass_mode=true: the actor's log-probs would be the sampler's, and the gap "
            "would compare two engines; set it to false"
        )
    return found


_ABSENT = object()
