"""ALFWorld as an environment family: where its games come from, which engine plays them, how a model is spoken to."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.agentopsd.envs.alfworld import prompts
from verl.agentopsd.envs.alfworld.engine import ExactEnv
from verl.agentopsd.envs.alfworld.games import GET_DATA, TASK_TYPES, discover, load_game
from verl.agentopsd.envs.base import Message, Observation, ParsedAction, Task, TextEnv, register_env

BACKENDS = ("exact", "textworld")
DATA_VARIABLE = "ALFWORLD_DATA"
_GENERATED_DEFAULTS = {"train": 400, "valid_seen": 60, "valid_unseen": 60, "seed": 0}

logger = logging.getLogger(__name__)


class AlfworldFamily:
    """The six ALFWorld task types, on the exact engine or on TextWorld.

    Config keys (the ``env`` section): ``data_dir``, ``backend``, ``show_admissible``, ``prompt_style``,
    ``action_format``, ``check_counts`` (default true), ``generated.{dir,train,valid_seen,valid_unseen,seed}``, and for
    ``backend=textworld`` ``workers``, ``reset_timeout``, ``step_timeout``, ``episodes_per_worker``,
    ``worker_memory_mb``.

    Games are looked for in ``data_dir``, else in ``$ALFWORLD_DATA``; if neither is set, a generated set is made once in
    a cache folder and a warning says so. A path that is set but holds no games is an error, never a silent fall-back.
    """

    name: str = "alfworld"
    task_types: tuple[str, ...] = TASK_TYPES

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)
        self._backend = _one_of("backend", config.get("backend", "exact"), BACKENDS)
        self._style = _one_of("prompt_style", config.get("prompt_style", "full"), prompts.STYLES)
        self._action_format = _one_of("action_format", config.get("action_format", "tagged"), prompts.ACTION_FORMATS)
        self._show_admissible = bool(config.get("show_admissible", False))
        self._check_counts = bool(config.get("check_counts", True))
        self._data_dir: Path | None = None

    @property
    def instant(self) -> bool:
        """Whether an environment answers within microseconds."""
        return self._backend == "exact"

    @property
    def data_dir(self) -> Path:
        """The folder that holds the games; settled on first use, which may generate them."""
        if self._data_dir is None:
            self._data_dir = resolve_data_dir(self._config)
        return self._data_dir

    def tasks(self, split: str) -> list[Task]:
        return discover(self.data_dir, split, check_counts=self._check_counts)

    def make(self, task: Task) -> TextEnv:
        if self._backend == "exact":
            return ExactEnv(load_game(task.path))
        from verl.agentopsd.envs.alfworld.textworld_env import TextWorldEnv, shared_pool

        return TextWorldEnv(task.path, shared_pool(self._config))

    def opening(self, task: Task, first: Observation) -> list[Message]:
        return prompts.opening(
            first.text,
            style=self._style,
            action_format=self._action_format,
            show_admissible=self._show_admissible,
            admissible=first.admissible,
        )

    def reply(self, observation: Observation) -> str:
        return prompts.reply(observation, style=self._style, show_admissible=self._show_admissible)

    def parse_action(self, text: str) -> ParsedAction:
        return prompts.parse_action(text, action_format=self._action_format)


@register_env("alfworld")
def make_alfworld(config: Mapping[str, Any]) -> AlfworldFamily:
    """The factory behind ``env.name=alfworld``."""
    return AlfworldFamily(config)


def resolve_data_dir(config: Mapping[str, Any]) -> Path:
    """``data_dir``, else ``$ALFWORLD_DATA``, else a generated set, which is made if it is not there.

    Raises:
        GenerationError: the generated set could not be made.
    """
    named = config.get("data_dir") or os.environ.get(DATA_VARIABLE)
    if named:
        return Path(named).expanduser()

    from verl.agentopsd.envs.alfworld.generate import ensure_generated

    settings = {**_GENERATED_DEFAULTS, **{k: v for k, v in (config.get("generated") or {}).items() if v is not None}}
    counts = {split: int(settings[split]) for split in ("train", "valid_seen", "valid_unseen")}
    seed = int(settings["seed"])
    out = Path(settings.get("dir") or _cache_dir(counts, seed)).expanduser()
    logger.warning(
        "No ALFWorld data (env.data_dir and $%s are unset): playing %d generated games in %s. "
        "Results on them are not comparable with published ones; get the real games with `%s`.",
        DATA_VARIABLE,
        sum(counts.values()),
        out,
        GET_DATA,
    )
    ensure_generated(out, counts, seed=seed)
    return out


def _cache_dir(counts: Mapping[str, int], seed: int) -> Path:
    """One folder per generated set, so that different settings do not collide."""
    from verl.agentopsd.envs.alfworld.generate import manifest

    digest = hashlib.sha256(json.dumps(manifest(counts, seed), sort_keys=True).encode()).hexdigest()[:12]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "verl-agentopsd" / f"alfworld-generated-{digest}"


def _one_of(key: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"env.{key}={value!r} is unknown; use one of {', '.join(known)}")
    return value
