"""What can be found out before Ray starts: games, skills, chat template and lengths. Errors here cost seconds."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl.agentopsd.config import ConfigError, dynamic_row_limit, env_section, has_teacher, teacher_config
from verl.agentopsd.doctor.shapes import KNOWN
from verl.agentopsd.envs.base import EnvFamily, Message, Task, make_family
from verl.agentopsd.evaluation.panel import spread
from verl.agentopsd.rollout.chat import ChatFormat
from verl.agentopsd.skills.bank import SkillBank
from verl.agentopsd.skills.insert import with_skill
from verl.agentopsd.teacher_preflight import check_teacher, teacher_prompt_length, teacher_row_limit

GAMES_PER_SPLIT = 60
"""So many games of each split have their prompt rendered; the rollout checks every prompt again."""


def require_engine(config: DictConfig) -> None:
    """Raises ConfigError when ``env.backend`` names an engine that is not installed."""
    if config.env.get("backend") == "textworld" and find_spec("textworld") is None:
        raise ConfigError(
            "env.backend=textworld needs the real ALFWorld engine, which is not installed: run "
            "'bash scripts/install.sh --textworld', or use env.backend=exact"
        )


def games(config: DictConfig) -> tuple[EnvFamily, dict[str, list[Task]]]:
    """The environment and the games of every split that the run reads.

    Raises:
        ConfigError: an engine that is not installed, an unknown split, or fewer games than an update plays.
        Exception: the environment's own error when games are missing.
    """
    require_engine(config)
    family = make_family(env_section(config))
    try:
        tasks = {split: family.tasks(split) for split in splits(config)}
    except ValueError as error:
        raise ConfigError(
            f"data.train_files={config.data.train_files}, data.val_files={config.data.val_files}: {error}"
        ) from error
    check_number_of_games(config, tasks)
    return family, tasks


def check_number_of_games(config: DictConfig, tasks: dict[str, list[Task]]) -> None:
    """The games of one update are different games.

    Raises:
        ConfigError: there are fewer.
    """
    files, limit = config.data.train_files, int(config.data.get("train_max_samples", -1))
    names = [files] if isinstance(files, str) else list(files)
    found = sum(len(tasks[name]) if limit < 0 else min(len(tasks[name]), limit) for name in names)
    if found < config.data.train_batch_size:
        raise ConfigError(
            f"an update plays data.train_batch_size={config.data.train_batch_size} different games, but "
            f"data.train_files={files} has {found}: lower it (and the actor's ppo_mini_batch_size), or add games"
        )


def skills(config: DictConfig, family: EnvFamily) -> SkillBank:
    """The teacher's texts; a missing one raises the bank's own error."""
    settings = teacher_config(config)
    return SkillBank.load(settings.skills, family.task_types, on_missing=settings.on_missing_skill)


def splits(config: DictConfig) -> list[str]:
    """The splits that the run reads, each once."""
    files = config.data.val_files
    return list(dict.fromkeys([*training_splits(config), *([files] if isinstance(files, str) else files)]))


def training_games(config: DictConfig, tasks: dict[str, list[Task]]) -> list[Task]:
    """The games that may be trained on."""
    return [task for name in training_splits(config) for task in tasks[name]]


def training_splits(config: DictConfig) -> list[str]:
    """The splits whose games are trained on."""
    files = config.data.train_files
    return [files] if isinstance(files, str) else list(files)


def chat_format(config: DictConfig, path: str) -> ChatFormat:
    """The model's chat format, from its tokenizer and the template that replaces the tokenizer's, if one is set."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"actor_rollout_ref.model.path={path} has no tokenizer that loads: {error}") from error
    if template := config.actor_rollout_ref.model.get("custom_chat_template"):
        tokenizer.chat_template = template
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
        whose, raising = f"the model has {limit} positions", ""
        if limit == dynamic_row_limit(config):
            whose = f"a dynamic micro-batch holds {limit} tokens"
            raising = ", or raise actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"
        raise ConfigError(
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} (prompt {data.max_prompt_length} + "
            f"response {data.max_response_length}), but {whose}: lower data.max_response_length to "
            f"{limit - data.max_prompt_length}{raising}"
        )
    return limit


def check_lengths(
    config: DictConfig, family: EnvFamily, tasks: dict[str, list[Task]], bank: SkillBank, chat: ChatFormat
) -> str:
    """Prompts and teacher rows of some games of every split, tokenized: one line of arithmetic, or a ConfigError."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    exact = make_family({**env_section(config), "backend": "exact"})  # same texts, without starting an engine
    position = teacher_config(config).skill_position
    training = training_games(config, tasks)
    texts = check_teacher(config, training, chat)
    longest, longest_read = (0, ""), (0, "")
    if texts is not None:  # every game may have a text of its own: those with the longest are read too
        by_length = sorted(training, key=lambda task: -len(texts.text(task.game_id, task.task_type) or ""))
        tasks = {**tasks, "longest texts": by_length[:GAMES_PER_SPLIT]}
    for task, messages in openings(exact, tasks):
        shown = messages
        if config.agentopsd.student_skill:
            shown = with_skill(messages, bank.text(task.task_type), position)
        longest = max(longest, (len(chat.initial_ids(shown)), task.game_id))
        if has_teacher(config):
            read = teacher_prompt_length(config, chat, bank, texts, task, shown)
            longest_read = max(longest_read, (read, task.game_id))
    bank.fallbacks.clear()
    prompt, game = longest
    limit = check_prompt(config, prompt, game)
    teacher, game = longest_read
    row = teacher + data.max_response_length
    limit = min((each for each in (limit, teacher_row_limit(config)) if each), default=None)
    if limit is not None and row > limit:
        raise ConfigError(
            f"the teacher's row of {game} can have {teacher} prompt and privileged text + {data.max_response_length} "
            f"response = {row} tokens, but a row may have {limit}; privileged text is never cut: lower "
            f"data.max_response_length to {limit - teacher}, shorten the text, or raise the limit"
        )
    return (
        f"longest prompt {prompt} of {data.max_prompt_length}, the teacher's {teacher}; "
        f"row {row} of {limit or 'no limit'}; rollout {rollout.max_model_len}"
    )


def row_limit(config: DictConfig) -> int | None:
    """Tokens that one row of the training engine may have: the model's positions, and a dynamic micro-batch."""
    from transformers import AutoConfig

    limits: list[Any] = []
    if known_shape := KNOWN.get(str(config.actor_rollout_ref.model.path)):
        limits.append(known_shape.positions)
    elif Path(str(config.actor_rollout_ref.model.path)).is_dir():
        model = AutoConfig.from_pretrained(config.actor_rollout_ref.model.path)
        limits.append(getattr(model.get_text_config(), "max_position_embeddings", None))
    limits.append(dynamic_row_limit(config))
    known = [int(limit) for limit in limits if limit]
    return min(known) if known else None
