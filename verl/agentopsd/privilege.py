"""Privileged text: what the teacher reads and the student does not (``agentopsd.teacher.privilege``).

``skill``      the general skill and that of the game's task type
``none``       nothing: the teacher has other weights instead (``source=ref`` or ``model``)
``hindsight``  the commands of a won episode of the same game in the same update
``file``       your own text per game id or task type, from a YAML or JSON mapping
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import yaml  # type: ignore[import-untyped]

from verl.agentopsd.config import ConfigError, TeacherConfig
from verl.agentopsd.envs.base import Task
from verl.agentopsd.episodes import Episode
from verl.agentopsd.skills.bank import SkillBank

HINDSIGHT_HEADER = "These commands have solved this very task:"


class Privilege(Protocol):
    """Finds the text for each episode."""

    def texts(self, episodes: Sequence[Episode], among: Sequence[Episode]) -> list[str | None]:
        """One text per episode, None for an episode without one.

        Args:
            episodes: those that the teacher will read.
            among: all episodes of the update.
        """
        ...


@dataclass(frozen=True)
class Skill:
    """The skill of the game's task type."""

    bank: SkillBank

    def texts(self, episodes: Sequence[Episode], among: Sequence[Episode]) -> list[str | None]:
        return [self.bank.text(episode.facts["task_type"]) for episode in episodes]


@dataclass(frozen=True)
class Nothing:
    """No text: the teacher sees what the student saw."""

    def texts(self, episodes: Sequence[Episode], among: Sequence[Episode]) -> list[str | None]:
        return [None] * len(episodes)


@dataclass(frozen=True)
class Hindsight:
    """The commands of another episode of the group that won: the shortest, of equals the one sampled first."""

    def texts(self, episodes: Sequence[Episode], among: Sequence[Episode]) -> list[str | None]:
        won: dict[str, list[Episode]] = {}
        for episode in among:
            if episode.valid and episode.won:
                won.setdefault(episode.group, []).append(episode)
        for siblings in won.values():
            siblings.sort(key=lambda one: (len(one.facts["turns"]), one.sample))
        found = []
        for episode in episodes:
            others = [one for one in won.get(episode.group, []) if one.key != episode.key]
            found.append(hindsight_text(commands(others[0])) if others else None)
        return found


def commands(episode: Episode) -> list[str]:
    """The commands that reached the environment, in order."""
    return [str(turn["command"]) for turn in episode.facts["turns"] if turn["valid"]]


def hindsight_text(actions: Sequence[str]) -> str:
    """The privileged text that tells ``actions``, one numbered line each."""
    return "\n".join([HINDSIGHT_HEADER, *(f"{number}. {action}" for number, action in enumerate(actions, 1))])


@dataclass(frozen=True)
class FromFile:
    """Text by game id, else by task type."""

    path: str
    entries: Mapping[str, str] = field(repr=False)

    @classmethod
    def load(cls, path: str) -> FromFile:
        """Reads a YAML or JSON mapping from game id or task type to text.

        Raises:
            ConfigError: the file is missing, not UTF-8, not such a mapping, or has an empty text.
        """
        key = f"agentopsd.teacher.file={path}"
        try:
            content: Any = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{key} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{key} is not UTF-8: {error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{key} is neither YAML nor JSON: {str(error).splitlines()[0]}") from error
        if not isinstance(content, dict) or not content:
            raise ConfigError(f"{key} must map game ids or task types to texts")
        if wrong := [str(name) for name, text in content.items() if not isinstance(text, str) or not text.strip()]:
            raise ConfigError(f"{key}: {len(wrong)} entries have no text, the first is {wrong[0]!r}")
        return cls(path, {str(name): text.strip() for name, text in content.items()})

    def text(self, game_id: str, task_type: str) -> str | None:
        return self.entries.get(game_id, self.entries.get(task_type))

    def texts(self, episodes: Sequence[Episode], among: Sequence[Episode]) -> list[str | None]:
        return [self._required(episode.facts["game_id"], episode.facts["task_type"]) for episode in episodes]

    def _required(self, game_id: str, task_type: str) -> str:
        text = self.text(game_id, task_type)
        if text is None:
            raise ConfigError(
                f"agentopsd.teacher.file={self.path} has a text neither for {game_id} nor for its task type "
                f"{task_type}: add one of them"
            )
        return text

    def require(self, tasks: Iterable[Task]) -> None:
        """Refuses a file that lacks a text for one of ``tasks``.

        Raises:
            ConfigError: with the count and the first game.
        """
        games = list(tasks)
        missing = [task for task in games if self.text(task.game_id, task.task_type) is None]
        if missing:
            types = ", ".join(sorted({task.task_type for task in missing}))
            raise ConfigError(
                f"agentopsd.teacher.file={self.path} has no text for {len(missing)} of {len(games)} training games "
                f"(the first: {missing[0].game_id}) nor for their task types ({types}): add a text for each game or "
                "type"
            )


def privilege_of(settings: TeacherConfig, bank: SkillBank) -> Privilege:
    """The source of text that ``agentopsd.teacher`` names."""
    if settings.privilege == "skill":
        return Skill(bank)
    if settings.privilege == "file":
        assert settings.file is not None
        return FromFile.load(settings.file)
    return Hindsight() if settings.privilege == "hindsight" else Nothing()
