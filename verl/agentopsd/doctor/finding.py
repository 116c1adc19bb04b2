"""One thing the doctor found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is. ``unchecked`` is not ``ok``: this machine could not tell."""

    OK = "ok"
    UNCHECKED = "unchecked"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """``text`` holds the arithmetic and, for a warning or an error, what to do."""

    level: Level
    subject: str
    text: str


def ok(subject: str, text: str) -> Finding:
    return Finding(Level.OK, subject, text)


def unchecked(subject: str, text: str) -> Finding:
    return Finding(Level.UNCHECKED, subject, text)


def warning(subject: str, text: str) -> Finding:
    return Finding(Level.WARNING, subject, text)


def error(subject: str, text: str) -> Finding:
    return Finding(Level.ERROR, subject, text)


def guarded(subject: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """``check()``, with an exception of this package turned into its error; others are ours to see and pass through."""
    try:
        return check()
    except Exception as failure:
        if not type(failure).__module__.startswith("verl.agentopsd"):
            raise
        return [error(subject, line) for line in str(failure).splitlines()]
