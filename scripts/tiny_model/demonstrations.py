"""Expert episodes as token rows: what the tiny model is cloned from."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from verl.agentopsd.envs.alfworld.expert import Clumsiness, Prior, SearchExpert
from verl.agentopsd.envs.base import EnvFamily, Message, Task
from verl.agentopsd.models.play import ChatTokens
from verl.agentopsd.skills.bank import SkillBank
from verl.agentopsd.skills.insert import with_skill

SKILL_LEVELS = ((False, False), (True, True), (True, False), (False, True))
"""(general, specific): the skill texts in the prompt and, in the same way, the skill of the expert that follows."""


@dataclass(frozen=True)
class Turn:
    command: str
    answer: str


@dataclass(frozen=True)
class Demonstration:
    """A prompt and what the expert then did; the last turn's ``answer`` ends the episode and is not shown."""

    messages: list[Message]
    turns: list[Turn]
    skilled: bool
    won: bool


@dataclass(frozen=True)
class Row:
    """``ids`` of a whole episode, the ``spans`` of its commands, and the weight of its command tokens."""

    ids: list[int]
    spans: list[tuple[int, int]]
    weight: float


@dataclass(frozen=True)
class Teacher:
    """Plays demonstrations: everything that is fixed while cloning.

    The first line of a skill text is taken as its general part, the rest as the part of the task type.
    """

    family: EnvFamily
    skills: SkillBank
    prior: Prior
    max_turns: int = 30

    def play(
        self, task: Task, general: bool, specific: bool, clumsiness: Clumsiness, rng: random.Random
    ) -> Demonstration:
        env = self.family.make(task)
        first = env.reset()
        opening, sentence = first.text.split("\n\n")[-2:]
        expert = SearchExpert(
            opening,
            sentence,
            general=general,
            specific=specific,
            clumsiness=clumsiness,
            prior=self.prior,
            rng=rng,
        )
        turns: list[Turn] = []
        won = False
        while len(turns) < self.max_turns and not won:
            command = expert.act()
            observation = env.step(command)
            expert.observe(command, observation.text)
            turns.append(Turn(command, self.family.reply(observation)))
            won = observation.won
        env.close()
        messages = self.family.opening(task, first)
        lines = self.skills.text(task.task_type).partition("\n")
        text = "\n".join([lines[0]] * general + [lines[2]] * specific)
        if text:
            messages = with_skill(messages, text, "user")
        return Demonstration(list(messages), turns, general and specific, won)


def to_row(demonstration: Demonstration, tokens: ChatTokens, skilled_weight: float) -> Row:
    """Tokens of a demonstration exactly as a played episode would have them."""
    ids = tokens.prompt(demonstration.messages)
    spans = []
    for index, turn in enumerate(demonstration.turns):
        answer = tokens.answer(turn.command)
        spans.append((len(ids), len(ids) + len(answer)))
        ids += answer
        if index + 1 < len(demonstration.turns):
            ids += tokens.next_turn(turn.answer)
    return Row(ids, spans, skilled_weight if demonstration.skilled else 1.0)


def texts(demonstrations: Sequence[Demonstration]) -> Iterator[str]:
    """Every string that the tokenizer should know, as often as it occurs."""
    for demonstration in demonstrations:
        yield from (message["content"] for message in demonstration.messages)
        for turn in demonstration.turns:
            yield from (turn.command, turn.answer)


def batches(rows: Sequence[Row], max_tokens: int, rng: random.Random) -> list[list[Row]]:
    """Rows of similar length together, at most ``max_tokens`` with padding; batches in random order."""
    packed: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if packed and (len(packed[-1]) + 1) * len(row.ids) <= max_tokens:
            packed[-1].append(row)
        else:
            packed.append([row])
    rng.shuffle(packed)
    return packed
