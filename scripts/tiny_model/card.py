"""Evaluation on held-out games, export and the model card."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from verl.agentopsd.envs.base import EnvFamily, Task
from verl.agentopsd.models.play import ChatTokens, PlayConfig, play
from verl.agentopsd.models.tiny import TinyLM
from verl.agentopsd.skills.bank import SkillBank

GAMES_AT_ONCE = 67


@dataclass(frozen=True)
class Result:
    """Games won and played, per task type, with the mean number of turns and the share of invalid commands."""

    won: Mapping[str, int]
    played: Mapping[str, int]
    turns: float
    invalid: float

    @property
    def rate(self) -> float:
        return sum(self.won.values()) / sum(self.played.values())


def evaluate(
    model: TinyLM,
    tokens: ChatTokens,
    family: EnvFamily,
    tasks: Sequence[Task],
    bank: SkillBank | None,
    temperature: float,
    seed: int,
) -> Result:
    """Plays every task once; ``bank`` puts its skill texts into the prompts."""
    generator = torch.Generator().manual_seed(seed)
    config = PlayConfig(temperature=temperature)
    won: dict[str, int] = defaultdict(int)
    played: dict[str, int] = defaultdict(int)
    turns = invalid = 0
    for start in range(0, len(tasks), GAMES_AT_ONCE):
        part = tasks[start : start + GAMES_AT_ONCE]
        skills = [bank.text(task.task_type) for task in part] if bank else None
        for episode in play(model, tokens, family, part, skills, config, generator):
            won[episode.task.task_type] += episode.won
            played[episode.task.task_type] += 1
            turns += len(episode.spans)
            invalid += episode.invalid
    return Result(dict(won), dict(played), turns / len(tasks), invalid / turns)


def write_checkpoint(*_):
    pass
