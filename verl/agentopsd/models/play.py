"""Batched play of text games with :class:`TinyLM`: no server, no Ray, one thread.

The token layout is the one of the shipped chat template: ``<|role|>content<|end|>`` per message and ``<|assistant|>``
before the model's turn. Sampled ids are kept as sampled; the game's answer is appended behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from verl.agentopsd.envs.base import EnvFamily, Message, Task, TextEnv
from verl.agentopsd.models.tiny import Cache, TinyLM
from verl.agentopsd.skills.insert import with_skill

ROLES = ("system", "user", "assistant")
PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = (PAD, *(f"<|{role}|>" for role in ROLES), END)


class ChatTokens:
    """Text to ids and back, with a cache because games repeat themselves."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(file))
        self.pad, self.end = self.tokenizer.token_to_id(PAD), self.tokenizer.token_to_id(END)
        self.role = {role: self.tokenizer.token_to_id(f"<|{role}|>") for role in ROLES}
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        known = self._cache.get(text)
        if known is None:
            known = self._cache[text] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return known

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def message(self, role: str, content: str) -> list[int]:
        return [self.role[role], *self.encode(content), self.end]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a chat up to the point where the model answers."""
        ids = [token for message in messages for token in self.message(message["role"], message["content"])]
        return [*ids, self.role["assistant"]]

    def answer(self, text: str) -> list[int]:
        """Ids of a model's turn: the text and the end-of-turn token."""
        return [*self.encode(text), self.end]

    def next_turn(self, text: str) -> list[int]:
        """Ids between a finished model turn and the next one: a user message with the game's answer."""
        return [*self.message("user", text), self.role["assistant"]]


@dataclass
class Episode:
    """One played game. ``ids`` is prompt and response; ``spans`` are the model's turns in it, ``[start, end)``."""

    task: Task
    messages: list[Message]
    ids: list[int]
    prompt_length: int
    spans: list[tuple[int, int]] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    observations: list[str] = field(default_factory=list)
    invalid: int = 0
    won: bool = False
    truncated: bool = False


@dataclass(frozen=True)
class PlayConfig:
    """``temperature`` 0 is greedy. A turn has at most ``max_action_tokens``, an episode ``max_length`` tokens."""

    temperature: float = 1.0
    max_turns: int = 30
    max_action_tokens: int = 14
    max_length: int = 1920


@torch.no_grad()
def play(
    model: TinyLM,
    tokens: ChatTokens,
    family: EnvFamily,
    tasks: Sequence[Task],
    skills: Sequence[str] | None = None,
    config: PlayConfig = PlayConfig(),  # noqa: B008 (frozen)
    generator: torch.Generator | None = None,
) -> list[Episode]:
    """Plays one episode per task, all at the same time; repeat a task for several episodes of it.

    Args:
        skills: one text per task to put into its prompt; None plays without skills.
    """
    episodes, envs = [], []
    for index, task in enumerate(tasks):
        env = family.make(task)
        messages = list(family.opening(task, env.reset()))
        ids = tokens.prompt(messages if skills is None else with_skill(messages, skills[index], "user"))
        episodes.append(Episode(task, messages, ids, len(ids)))
        envs.append(env)
    cache, hidden = _read_prompts(model, tokens, episodes)
    lengths = torch.tensor([len(episode.ids) for episode in episodes])
    live = list(range(len(episodes)))
    while True:
        answers, log_probs = _answer(model, tokens, hidden, lengths, cache, config, generator)
        feeds, kept = [], []
        for row, index in enumerate(live):
            feed = _take_turn(episodes[index], envs[index], family, tokens, answers[row], log_probs[row], config)
            if feed is not None:
                feeds.append(feed)
                kept.append(row)
        if not kept:
            break
        if len(kept) < len(live):
            cache = cache.select(torch.tensor(kept))
        live = [live[row] for row in kept]
        # The last sampled token is not cached yet: it is fed together with the game's answer.
        known = torch.tensor([len(episodes[i].ids) for i in live]) - torch.tensor([len(feed) for feed in feeds])
        hidden = _read_answers(model, tokens, feeds, known, cache)
        lengths = torch.tensor([len(episodes[i].ids) for i in live])
    for env in envs:
        env.close()
    return episodes


def pad(rows: Sequence[Sequence[int]], value: int = 0) -> Tensor:
    """Right-padded ``(N, T)`` long tensor."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def _read_prompts(model: TinyLM, tokens: ChatTokens, episodes: Sequence[Episode]) -> tuple[Cache, Tensor]:
    """Runs every distinct prompt once. Returns a cache and the last hidden state per episode."""
    distinct: dict[tuple[int, ...], int] = {}
    source = torch.tensor([distinct.setdefault(tuple(e.ids), len(distinct)) for e in episodes])
    prompts = list(distinct)
    cache = Cache.empty(len(prompts), model.config)
    hidden = model.extend(pad(prompts, tokens.pad), torch.zeros(len(prompts), dtype=torch.long), cache)
    last = hidden[torch.arange(len(prompts)), torch.tensor([len(p) - 1 for p in prompts])]
    return cache.select(source), last[source]


def _answer(
    model: TinyLM,
    tokens: ChatTokens,
    hidden: Tensor,
    lengths: Tensor,
    cache: Cache,
    config: PlayConfig,
    generator: torch.Generator | None,
) -> tuple[list[list[int]], list[list[float]]]:
    """Samples one turn per row: ids up to and with the end-of-turn token, and their log-probs."""
    rows = len(hidden)
    ids: list[list[int]] = [[] for _ in range(rows)]
    log_probs: list[list[float]] = [[] for _ in range(rows)]
    open_rows = torch.ones(rows, dtype=torch.bool)
    for position in range(config.max_action_tokens):
        scores = torch.log_softmax(model.logits(hidden) / (config.temperature or 1.0), -1)
        if config.temperature:
            chosen = torch.multinomial(scores.exp(), 1, generator=generator)[:, 0]
        else:
            chosen = scores.argmax(-1)
        chosen_scores = scores.gather(1, chosen[:, None])[:, 0].tolist()
        for row in open_rows.nonzero()[:, 0].tolist():
            ids[row].append(int(chosen[row]))
            log_probs[row].append(chosen_scores[row])
        open_rows &= chosen != tokens.end
        if not open_rows.any() or position == config.max_action_tokens - 1:
            break
        hidden = model.extend(chosen[:, None], lengths, cache)[:, 0]
        lengths = lengths + open_rows
    return ids, log_probs


def _take_turn(
    episode: Episode,
    env: TextEnv,
    family: EnvFamily,
    tokens: ChatTokens,
    answer: list[int],
    log_probs: list[float],
    config: PlayConfig,
) -> list[int] | None:
    """Gives the answer to the game and appends what follows. Returns the ids to read next, None at the end."""
    start = len(episode.ids)
    episode.ids += answer
    episode.spans.append((start, len(episode.ids)))
    episode.log_probs += log_probs
    finished = answer[-1] == tokens.end
    action = family.parse_action(tokens.decode(answer[:-1] if finished else answer))
    observation = env.step(action.command)
    episode.commands.append(action.command)
    episode.observations.append(observation.text)
    episode.invalid += not observation.valid
    episode.won = observation.won
    if observation.done:
        return None
    context = tokens.next_turn(family.reply(observation))
    context = context if finished else [tokens.end, *context]
    full = len(episode.ids) + len(context) + config.max_action_tokens > config.max_length
    if full or len(episode.spans) == config.max_turns:
        episode.truncated = True
        return None
    episode.ids += context
    return [answer[-1], *context]


def _read_answers(model: TinyLM, tokens: ChatTokens, feeds: Sequence[list[int]], known: Tensor, cache: Cache) -> Tensor:
    """Reads the games' answers in up to three groups of similar length. Returns the last hidden state per row."""
    rows = len(feeds)
    groups = 1 if rows < 8 else 2 if rows < 24 else 3
    by_length = sorted(range(rows), key=lambda row: len(feeds[row]))
    hidden = torch.empty(rows, model.config.hidden_size)
    for g in range(groups):
        picked = by_length[g * rows // groups : (g + 1) * rows // groups]
        index = torch.tensor(picked)
        read = model.extend(pad([feeds[row] for row in picked], tokens.pad), known[index], cache, rows=index)
        hidden[index] = read[torch.arange(len(picked)), torch.tensor([len(feeds[row]) - 1 for row in picked])]
    return hidden
