"""What the rollout needs to know about a text environment, and the registry that finds one by name.

Three small things meet here:

- a :class:`Task` names one game and where it comes from,
- a :class:`TextEnv` plays one episode of it, text in and text out,
- a :class:`EnvFamily` is a benchmark: its tasks per split, its environments, how a model is spoken to and how its
  answer is read.

A new benchmark is one package that implements :class:`EnvFamily` and calls :func:`register_env`; nothing in
``rollout/``, ``credit.py`` or the trainer knows ALFWorld.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

Message = dict[str, str]
"""One chat message: ``{"role": "system" | "user" | "assistant", "content": text}``."""


@dataclass(frozen=True)
class Task:
    """One game. ``game_id`` is unique over all splits and is what records and panels are keyed by."""

    game_id: str
    split: str
    task_type: str
    path: str


@dataclass(frozen=True)
class Observation:
    """What the environment shows after ``reset`` or ``step``.

    Attributes:
        text: the game's own words.
        admissible: every command the game would understand now, sorted.
        won: the goal holds.
        done: no further step will be accepted (won, or the environment's own end).
        valid: the command just given was one the game understood (True after ``reset``).
    """

    text: str
    admissible: tuple[str, ...] = ()
    won: bool = False
    done: bool = False
    valid: bool = True


@dataclass(frozen=True)
class ParsedAction:
    """A model's answer read as a command; ``well_formed`` is False when the expected form was missing."""

    command: str
    well_formed: bool


class EnvironmentFault(RuntimeError):
    """The environment itself failed (crash, time limit, corrupt file): the episode counts as an error, not a loss."""


@runtime_checkable
class TextEnv(Protocol):
    """One episode. Not thread-safe; ``reset`` may be called again for another episode of the same task."""

    def reset(self) -> Observation: ...

    def step(self, command: str) -> Observation: ...

    def close(self) -> None: ...


class EnvFamily(Protocol):
    """A benchmark of text games.

    Its environments are called in threads, one per running episode, where a time limit can leave them behind. A family
    whose environments answer within microseconds may have an attribute ``instant`` that is true: they are called in the
    event loop of the agent-loop worker.
    """

    name: str
    task_types: tuple[str, ...]

    def tasks(self, split: str) -> list[Task]:
        """All games of a split in a fixed order. Raises with the remedy when the data is missing or incomplete."""
        ...

    def make(self, task: Task) -> TextEnv:
        """An environment for ``task``, not yet reset."""
        ...

    def opening(self, task: Task, first: Observation) -> list[Message]:
        """The chat before the model's first answer: a system message (optional) and one user message."""
        ...

    def reply(self, observation: Observation) -> str:
        """The content of the user message that carries ``observation`` back to the model."""
        ...

    def parse_action(self, text: str) -> ParsedAction:
        """Reads a command out of the model's answer. Never raises."""
        ...


_FACTORIES: dict[str, Callable[[Mapping[str, Any]], EnvFamily]] = {}
_BUILT_IN = {"alfworld": "verl.agentopsd.envs.alfworld"}


def register_env(name: str) -> Callable[[Callable[[Mapping[str, Any]], EnvFamily]], Callable[..., EnvFamily]]:
    """Registers a factory ``config -> EnvFamily`` under ``env.name``."""

    def decorate(factory: Callable[[Mapping[str, Any]], EnvFamily]) -> Callable[..., EnvFamily]:
        known = _FACTORIES.get(name)
        if known is not None and known is not factory:
            raise ValueError(f"environment {name!r} is already registered to {known!r}")
        _FACTORIES[name] = factory
        return factory

    return decorate


def make_family(config: Mapping[str, Any]) -> EnvFamily:
    """Builds the family that ``config['name']`` asks for; ``config`` is the resolved ``env`` section.

    Raises:
        ValueError: no such environment; the message lists the known ones.
    """
    name = config["name"]
    if name not in _FACTORIES and name in _BUILT_IN:
        import_module(_BUILT_IN[name])
    if name not in _FACTORIES:
        known: Sequence[str] = sorted({*_FACTORIES, *_BUILT_IN})
        raise ValueError(f"env.name={name!r} is not a known environment; known: {', '.join(known)}")
    return _FACTORIES[name](config)
