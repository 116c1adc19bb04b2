"""What can be found out before Ray starts: games, skills, chat template and lengths. Errors here cost seconds."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl.agentopsd.config import ConfigError, dynamic_row_limit, env_section, method_of, teacher_config
from verl.agentopsd.envs.base import EnvFamily, Message, Task, make_family
from verl.agentopsd.evaluation.panel import spread
from verl.agentopsd.rollout.chat import ChatFormat
from verl.agentopsd.skills.bank import SkillBank
from verl.agentopsd.skills.insert import with_skill

GAMES_PER_SPLIT = 60
"""So many games of each split have their prompt rendered; the rollout checks every prompt again."""


def check(config: DictConfig) -> list[str]:
    """Looks at everything that needs no worker.

    Returns:
        Notes for the plan: what was found, and what could not be checked here.

    Raises:
        ConfigError: prompts or teacher rows that do not fit, with the arithmetic.
        Exception: the environment's or the skill bank's own error when games or skills are missing.
    """
    if config.env.get("backend") == "textworld" and find_spec("textworld") is None:
        raise ConfigError(
            "env.backend=textworld needs the real ALFWorld engine, which is not installed: run "
            "'bash scripts/install.sh --textworld', or use env.backend=exact"
        )
    family = make_family(env_section(config))
    try:
        tasks = {split: family.tasks(split) for split in splits(config)}
    except ValueError as error:
        raise ConfigError(
            f"data.train_files={config.data.train_files}, data.val_files={config.data.val_files}: {error}"
        ) from error
    notes = [f"games    {', '.join(f'{split} {len(games)}' for split, games in tasks.items())}"]
    settings = teacher_config(config)
    bank = SkillBank.load(settings.skills, family.task_types, on_missing=settings.on_missing_skill)
    path = str(config.actor_rollout_ref.model.path)
    if not Path(path).is_dir():
        return [*notes, f"lengths  not checked here: {path} is not a local folder, its tokenizer comes with the run"]
    return [*notes, _check_lengths(config, family, tasks, bank, chat_format(config, path))]


def splits(config: DictConfig) -> list[str]:
    """The splits that the run reads, each once."""
    names: list[str] = []
    for files in (config.data.train_files, config.data.val_files):
        names += [files] if isinstance(files, str) else list(files)
    return list(dict.fromkeys(names))


def chat_format(config: DictConfig, path: str) -> ChatFormat:
    """The model's chat format, from its tokenizer alone."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"actor_rollout_ref.model.path={path} has no tokenizer that loads: {error}") from error
    settings = config.data.get("apply_chat_template_kwargs") or {}
    return ChatFormat(tokenizer, {str(name): value for name, value in settings.items()})


def openings(family: EnvFamily, tasks: dict[str, list[Task]]) -> Iterator[tuple[Task, list[Message]]]:
    """The opening chats of some games of every split."""
    for games in tasks.values():
        for task in spread(games, GAMES_PER_SPLIT):
            env = family.make(task)
            try:
                yield task, family.opening(task, env.reset())
            finally:
                env.close()


def check_prompt(config: DictConfig, prompt: int, game: str) -> int | None:
    """Refuses a longest prompt of ``prompt`` tokens that does not fit, and a rollout longer than the model's positions.

    Returns:
        The tokens that one row of the training engine may have; None when unknown.
    """
    data, rollout = config.data, config.actor_rollout_ref.rollout
    if prompt > data.max_prompt_length:
        raise ConfigError(
            f"the prompt of {game} has {prompt} tokens, but data.max_prompt_length={data.max_prompt_length}; prompts "
            f"are never cut: raise it to {prompt}, or set env.show_admissible=false or env.prompt_style=compact"
        )
    limit = row_limit(config)
    if limit is not None and rollout.max_model_len > limit:
        raise ConfigError(
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} (prompt {data.max_prompt_length} + "
            f"response {data.max_response_length}), but the model has {limit} positions: lower "
            f"data.max_response_length to {limit - data.max_prompt_length}"
        )
    return limit


def _check_lengths(
    config: DictConfig, family: EnvFamily, tasks: dict[str, list[Task]], bank: SkillBank, chat: ChatFormat
) -> str:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    exact = make_family({**env_section(config), "backend": "exact"})  # same texts, without starting an engine
    position = teacher_config(config).skill_position
    longest, longest_skilled = (0, ""), (0, "")
    for task, messages in openings(exact, tasks):
        longest = max(longest, (len(chat.initial_ids(messages)), task.game_id))
        if method_of(config) == "agentopsd":
            skilled = chat.initial_ids(with_skill(messages, bank.text(task.task_type), position))
            longest_skilled = max(longest_skilled, (len(skilled), task.game_id))
    bank.fallbacks.clear()
    prompt, game = longest
    limit = check_prompt(config, prompt, game)
    teacher, game = longest_skilled
    row = teacher + data.max_response_length
    if limit is not None and row > limit:
        raise ConfigError(
            f"the teacher's row of {game} can have {teacher} prompt and skill + {data.max_response_length} response = "
            f"{row} tokens, but a row may have {limit}; skills are never cut: lower data.max_response_length to "
            f"{limit - teacher}, shorten the skill, or raise the limit"
        )
    return (
        f"tokens   longest prompt {prompt} of {data.max_prompt_length}, with skill {teacher}; "
        f"row {row} of {limit or 'no limit'}; rollout {rollout.max_model_len}"
    )


def row_limit(config: DictConfig) -> int | None:
    """Tokens that one row of the training engine may have: the model's positions, and a dynamic micro-batch."""
    from transformers import AutoConfig

    limits: list[Any] = []
    if Path(str(config.actor_rollout_ref.model.path)).is_dir():
        model = AutoConfig.from_pretrained(config.actor_rollout_ref.model.path)
        limits.append(getattr(model.get_text_config(), "max_position_embeddings", None))
    limits.append(dynamic_row_limit(config))
    known = [int(limit) for limit in limits if limit]
    return min(known) if known else None
