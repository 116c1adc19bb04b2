"""Ranges and types of the numbers and flags that the other checks compute with; checked before any of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException


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
NOT_NEGATIVE = _number(lambda v: v >= 0, "at least 0")
SHARE = _number(lambda v: 0 < v <= 1, "greater than 0 and at most 1")
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
    "hardware.gpu": TEXT,
    "hardware.gpus_per_node": _whole(1),
    "hardware.sequence_parallel": _whole(1),
    "hardware.tensor_parallel": _whole(1),
    "hardware.rollout_tensor_parallel": _whole(1),
    "hardware.rollout_memory": SHARE,
    "hardware.optimizer_offload": FLAG,
    "hardware.cpu_micro_batch": _whole(1),
    "hardware.cpu_weight_bucket_megabytes": _whole(1),
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
    "data.dataloader_num_workers": _whole(0),
    "data.shuffle": FLAG,
    "data.trust_remote_code": FLAG,
    "actor_rollout_ref.model.path": TEXT,
    "actor_rollout_ref.model.trust_remote_code": FLAG,
    "actor_rollout_ref.model.lora_rank": _whole(0),
    "algorithm.kl_ctrl.kl_coef": NOT_NEGATIVE,
    "actor_rollout_ref.actor.kl_loss_coef": NOT_NEGATIVE,
    "actor_rollout_ref.actor.clip_ratio": NOT_NEGATIVE,
    # null: clip_ratio
    "actor_rollout_ref.actor.clip_ratio_low": _or_none(NOT_NEGATIVE),
    "actor_rollout_ref.actor.clip_ratio_high": _or_none(NOT_NEGATIVE),
    "actor_rollout_ref.actor.clip_ratio_c": _number(lambda v: v > 1, "greater than 1"),
    "actor_rollout_ref.actor.use_dynamic_bsz": FLAG,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": _whole(1),
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": _whole(1),
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": _whole(1),
    **{
        f"actor_rollout_ref.{name}{per_gpu}": _or_none(_whole(1))
        for name in ("actor.ppo_micro_batch_size", "ref.log_prob_micro_batch_size", "rollout.log_prob_micro_batch_size")
        for per_gpu in ("", "_per_gpu")
    },
    **{
        f"actor_rollout_ref.{name}_parallel_size": _whole(1)
        for name in (
            "actor.ulysses_sequence",
            "ref.ulysses_sequence",
            "actor.megatron.tensor_model",
            "actor.megatron.pipeline_model",
            "actor.megatron.context",
            "rollout.tensor_model",
            "rollout.data",
            "rollout.pipeline_model",
            "rollout.expert",
        )
    },
    "actor_rollout_ref.actor.ppo_mini_batch_size": _whole(1),
    "actor_rollout_ref.actor.ppo_epochs": _whole(1),
    "actor_rollout_ref.actor.optim.lr": NOT_NEGATIVE,
    "actor_rollout_ref.rollout.n": _whole(1),
    "actor_rollout_ref.rollout.nnodes": _whole(0),
    "actor_rollout_ref.rollout.temperature": POSITIVE,
    "actor_rollout_ref.rollout.gpu_memory_utilization": SHARE,
    "actor_rollout_ref.rollout.max_model_len": _or_none(_whole(1)),
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


@dataclass(frozen=True)
class Unreadable:
    """A key whose value refers to what is not there, or is still to be given."""

    key: str
    text: str
    error: str

    @property
    def follows(self) -> bool:
        """Whether it was computed from a value that another check refuses."""
        return " raised while resolving" in self.error

    def __str__(self) -> str:
        if self.text == _MISSING:
            return f"{self.key}={self.text}: has no value yet: give one"
        return f"{self.key}={self.text}: cannot be read ({self.error}): give a value, or ${{KEY}} of a key that exists"


def unreadable(config: DictConfig) -> list[Unreadable]:
    """Every key whose value cannot be read, without those that merely refer to such a key."""
    by_error: dict[str, list[Unreadable]] = {}
    found = []
    for key, text in _texts(OmegaConf.to_container(config, resolve=False)):
        if text == _MISSING and (key in CHECKS or key.startswith(_OWN) or key == "algorithm.adv_estimator"):
            found.append(Unreadable(key, text, "missing"))
        if "${" not in text:
            continue
        try:
            OmegaConf.select(config, key)
        except InterpolationToMissingValueError:
            continue
        except OmegaConfBaseException as error:
            first = str(error).splitlines()[0]
            by_error.setdefault(first, []).append(Unreadable(key, text, first))
    for message, readers in by_error.items():
        named = re.search(r"key '(.+)' not found|interpolation type (\S+)", message)
        culprits = [one for one in readers if named and (named[1] or named[2]) in one.text]
        found += culprits or readers
    return found


def _texts(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, str):
        yield prefix, tree
    elif isinstance(tree, dict):
        for name, value in tree.items():
            yield from _texts(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _texts(value, f"{prefix}[{index}]")


def problems(config: DictConfig, unread: Sequence[Unreadable]) -> list[str]:
    """One line per value that cannot be or be read; keys that the configuration lacks are left to their readers."""
    skipped = {one.key for one in unread}
    found = []
    for key, check in CHECKS.items():
        value = _ABSENT if key in skipped else _select(config, key)
        if value is not _ABSENT and not check.holds(value):
            found.append(f"{key}={value}: must be {check.must_be}")
    found += [str(one) for one in unread if not (one.follows and found)]
    if unread:
        return found
    if OmegaConf.select(config, "trainer.resume_mode") not in ("auto", "disable", "resume_path"):
        found.append(f"trainer.resume_mode={config.trainer.resume_mode}: must be one of auto, disable, resume_path")
    if OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"):
        found.append(
            "algorithm.rollout_correction.bypass_mode=true: the actor's log-probs would be the sampler's, and the gap "
            "would compare two engines; set it to false"
        )
    return found


def _select(config: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(config, key, default=_ABSENT)
    except OmegaConfBaseException:  # reads a key that is listed as unreadable, or goes through a value
        return _ABSENT


_ABSENT = object()
_MISSING = "???"
_OWN = ("agentopsd.", "env.", "hardware.", "limits.", "data.sampling.")
