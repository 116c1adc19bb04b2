"""What can be found out about the teacher before Ray starts: its texts, its vocabulary, the length of its rows."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig

from verl.agentopsd.config import ConfigError, has_teacher, sequence_parallel_size, teacher_config
from verl.agentopsd.doctor.shapes import folder_of, shape_of
from verl.agentopsd.envs.base import Message, Task
from verl.agentopsd.privilege import FromFile
from verl.agentopsd.rollout.chat import ChatFormat
from verl.agentopsd.skills.bank import SkillBank
from verl.agentopsd.skills.insert import with_skill
from verl.agentopsd.teacher_model import require_same_vocabulary, teacher_tokenizer


def check_teacher(config: DictConfig, training: Sequence[Task], chat: ChatFormat | None) -> FromFile | None:
    """Refuses a file of texts that misses a training game, and a teacher of another vocabulary.

    Args:
        training: the games that may be trained on.
        chat: the student's chat format, None when its tokenizer is not here.

    Returns:
        The file of texts, if the teacher reads one.

    Raises:
        ConfigError: with what is missing or differs.
    """
    if not has_teacher(config):
        return None
    settings, texts = teacher_config(config), None
    if settings.file is not None:
        texts = FromFile.load(settings.file)
        texts.require(training)
    if settings.path is not None:
        folder = folder_of(settings.path)
        if folder is None and settings.path.startswith((".", "/", "~")):
            raise ConfigError(f"agentopsd.teacher.path={settings.path} is not a folder")
        if folder is not None and chat is not None:
            require_same_vocabulary(chat.tokenizer, teacher_tokenizer(settings, folder), settings.path)
    return texts


def teacher_prompt_length(
    config: DictConfig,
    chat: ChatFormat,
    bank: SkillBank,
    texts: FromFile | None,
    task: Task,
    messages: list[Message],
) -> int:
    """Tokens of the prompt that the teacher reads for ``task``; hindsight, which is not known yet, is left out.

    Args:
        messages: the opening as the student sees it.
    """
    settings = teacher_config(config)
    text = None
    if settings.privilege == "skill":
        text = bank.text(task.task_type)
    elif texts is not None:
        text = texts.text(task.game_id, task.task_type)
    return len(chat.initial_ids(messages if text is None else with_skill(messages, text, settings.skill_position)))


def teacher_row_limit(config: DictConfig) -> int | None:
    """Tokens that a row of a teacher with an engine of its own may have: its model's positions, and its dynamic
    micro-batch. None without such a teacher, or without a limit."""
    settings = teacher_config(config)
    if not has_teacher(config) or settings.source == "self":
        return None
    limits = []
    if settings.path is not None:
        folder = folder_of(settings.path)
        shape = shape_of(settings.path if folder is None else str(folder))
        limits.append(shape.positions if shape is not None else None)
    section = config.actor_rollout_ref.ref
    if section.log_prob_use_dynamic_bsz:
        limits.append(int(section.log_prob_max_token_len_per_gpu) * sequence_parallel_size(config))
    return min((int(limit) for limit in limits if limit), default=None)
