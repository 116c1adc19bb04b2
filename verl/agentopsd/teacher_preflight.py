"""What can be found out about the teacher before Ray starts: its texts, its vocabulary, the length of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from verl.agentopsd.config import ConfigError, has_teacher, teacher_config
from verl.agentopsd.envs.base import Message, Task
from verl.agentopsd.privilege import FromFile
from verl.agentopsd.rollout.chat import ChatFormat
from verl.agentopsd.skills.bank import SkillBank
from verl.agentopsd.skills.insert import with_skill
from verl.agentopsd.teacher_model import require_same_vocabulary, teacher_tokenizer


def check_teacher(config: DictConfig, training: Sequence[Task], chat: ChatFormat | None) -> None:
    """Refuses a file of texts that misses a training game, and a teacher of another vocabulary.

    Args:
        training: the games that may be trained on.
        chat: the student's chat format, None when its tokenizer is not here.

    Raises:
        ConfigError: with what is missing or differs.
    """
    if not has_teacher(config):
        return
    settings = teacher_config(config)
    if settings.file is not None:
        FromFile.load(settings.file).require(training)
    if settings.path is not None and "/" in settings.path and settings.path.startswith((".", "/", "~")):
        if not Path(settings.path).expanduser().is_dir():
            raise ConfigError(f"agentopsd.teacher.path={settings.path} is not a folder")
    if settings.path is not None and chat is not None and Path(settings.path).is_dir():
        require_same_vocabulary(chat.tokenizer, teacher_tokenizer(settings), settings.path)


def longest_teacher_prompt(
    config: DictConfig, chat: ChatFormat, bank: SkillBank, task: Task, messages: list[Message]
) -> int:
    """Tokens of the prompt that the teacher reads for ``task``; hindsight, which is not known yet, is left out."""
    settings = teacher_config(config)
    text = None
    if settings.privilege == "skill":
        text = bank.text(task.task_type)
    elif settings.privilege == "file" and settings.file is not None:
        text = FromFile.load(settings.file).text(task.game_id, task.task_type)
    return len(chat.initial_ids(messages if text is None else with_skill(messages, text, settings.skill_position)))
