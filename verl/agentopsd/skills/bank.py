"""The skill texts, one set per directory: ``general.md`` and ``<task_type>.md`` for every task type.

A skill is what the teacher reads and the student never does. Which skill belongs to a game follows from the game's
task type alone, so the choice is the same in every process and on every run.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from verl.agentopsd.envs.base import Message

logger = logging.getLogger(__name__)

GENERAL = "general"
ON_MISSING = ("error", "general")
BUILT_IN_DIR = Path(__file__).parent
_SHORTEST_TELLING_LINE = 20


class MissingSkill(LookupError):
    """There is no skill for a task type, or its file cannot be used."""


class SkillLeak(AssertionError):
    """A prompt that must not contain a skill contains one."""


class SkillBank:
    """The texts of one skill set.

    Attributes:
        name: the name or directory that was asked for.
        hash: 16 hex digits over the names and texts; equal if and only if all texts are equal.
        fallbacks: how often ``text`` answered with the general skill alone, per task type.
    """

    def __init__(self, name: str, general: str, specific: Mapping[str, str], *, on_missing: str = "error") -> None:
        if on_missing not in ON_MISSING:
            raise ValueError(f"on_missing={on_missing!r} is unknown; use one of {', '.join(ON_MISSING)}")
        self.name = name
        self.on_missing = on_missing
        self.fallbacks: Counter[str] = Counter()
        self._general = general
        self._specific = dict(specific)
        digest = hashlib.sha256()
        for key, text in [(GENERAL, general), *sorted(self._specific.items())]:
            digest.update(f"{key}\0{text}\0".encode())
        self.hash = digest.hexdigest()[:16]

    @classmethod
    def load(cls, name_or_dir: str | Path, task_types: Iterable[str], *, on_missing: str = "error") -> SkillBank:
        """Reads a set and checks that it is complete.

        Args:
            name_or_dir: a built-in set (``alfworld``, ``alfworld_tiny``) or a directory of Markdown files.
            task_types: every task type that the games can have.
            on_missing: ``error``, or ``general`` to let task types without a file use the general skill alone.

        Raises:
            MissingSkill: no such set, or a file is missing, empty or not UTF-8; names the file and the remedy.
        """
        directory = _find(name_or_dir)
        general = _read(directory / f"{GENERAL}.md")
        specific = {}
        for task_type in sorted(task_types):
            path = directory / f"{task_type}.md"
            if path.is_file() or on_missing != "general":
                specific[task_type] = _read(path)
            else:
                logger.warning("no skill file %s: games of type %s get the general skill alone", path, task_type)
        return cls(str(name_or_dir), general, specific, on_missing=on_missing)

    def text(self, task_type: str) -> str:
        """The skill for a game of this type: the general text, a line break, the specific text.

        Raises:
            MissingSkill: the set has nothing for this type and a fall-back was not asked for.
        """
        specific = self._specific.get(task_type)
        if specific is not None:
            return f"{self._general}\n{specific}"
        if self.on_missing != "general":
            known = ", ".join(sorted(self._specific))
            raise MissingSkill(
                f"skill set {self.name!r} has no skill for task type {task_type!r} (it has: {known}); add "
                f"{task_type}.md to it, or set agentopsd.teacher.on_missing_skill=general"
            )
        self.fallbacks[task_type] += 1
        return self._general

    @property
    def covered(self) -> tuple[str, ...]:
        """Task types with a text of their own, sorted."""
        return tuple(sorted(self._specific))

    def telling_lines(self) -> frozenset[str]:
        """Lines long enough that a text which contains one of them must have it from this set."""
        texts = [self._general, *self._specific.values()]
        lines = (line.strip() for text in texts for line in text.splitlines())
        return frozenset(line for line in lines if len(line) >= _SHORTEST_TELLING_LINE)


def assert_skill_free(messages: Sequence[Message], bank: SkillBank) -> None:
    """Checks that no message contains a line of any skill of ``bank``.

    Raises:
        SkillLeak: with the message's position and the line.
    """
    lines = bank.telling_lines()
    for position, message in enumerate(messages):
        for line in lines:
            if line in message["content"]:
                raise SkillLeak(
                    f"message {position} ({message['role']}) of a prompt that must be free of skills contains a line "
                    f"of skill set {bank.name!r}: {line!r}"
                )


def _find(name_or_dir: str | Path) -> Path:
    built_in = BUILT_IN_DIR / name_or_dir
    for candidate in (built_in, Path(name_or_dir)):
        if (candidate / f"{GENERAL}.md").is_file():
            return candidate
    known = ", ".join(sorted(path.parent.name for path in BUILT_IN_DIR.glob(f"*/{GENERAL}.md")))
    raise MissingSkill(
        f"no skill set {str(name_or_dir)!r}: give a built-in name ({known}) or a directory that contains {GENERAL}.md"
    )


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise MissingSkill(f"skill file {path} is missing: write it, or choose another skill set") from None
    except UnicodeDecodeError as error:
        raise MissingSkill(f"skill file {path} is not UTF-8 ({error.reason}): save it as UTF-8") from None
    except OSError as error:
        raise MissingSkill(f"skill file {path} cannot be read ({error.strerror}): check the path and rights") from None
    if not text:
        raise MissingSkill(f"skill file {path} is empty: write the skill into it, or choose another skill set")
    return text
