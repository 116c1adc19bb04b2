"""Behaviour cloning: the schedule, the loss and a loop that can be resumed at any round."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.agentopsd.envs.base import Task
from verl.agentopsd.models.play import ChatTokens, pad
from verl.agentopsd.models.tiny import TinyConfig, TinyLM

from .demonstrations import SKILL_LEVELS, Row, Teacher, batches, to_row
from .optimizer import MuonAdamW


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, together with the games, the seed and the expert.

    Training starts almost only with skilled episodes, because copying a name from the text is learnt from them first,
    and moves to ``mixture`` over the first ``ramp`` of the token budget. ``skilled_weight`` makes up for their being
    three times shorter. The game's answers are predicted too, at first, for the same reason: ``answer_weight`` falls to
    0 at ``answer_until``.
    """

    tokens: int = 12_000_000
    tokens_per_batch: int = 2400
    episodes_per_round: int = 240
    learning_rate: float = 3e-3
    hold: float = 0.4
    final_learning_rate: float = 0.03
    warmup_steps: int = 50
    start_mixture: tuple[float, ...] = (0.1, 0.7, 0.1, 0.1)
    mixture: tuple[float, ...] = (0.35, 0.45, 0.1, 0.1)
    ramp: float = 0.3
    skilled_weight: float = 1.5
    answer_weight: float = 0.2
    answer_until: float = 0.5
    max_grad_norm: float = 1.0

    def learning_rate_at(self, progress: float, step: int) -> float:
        decay = 1.0 if progress < self.hold else max(self.final_learning_rate, (1 - progress) / (1 - self.hold))
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * decay

    def mixture_at(self, progress: float) -> list[float]:
        share = min(1.0, progress / self.ramp)
        return [(1 - share) * a + share * b for a, b in zip(self.start_mixture, self.mixture, strict=True)]

    def answer_weight_at(self, progress: float) -> float:
        return self.answer_weight * max(0.0, 1 - progress / self.answer_until)


@dataclass
class Progress:
    tokens: int = 0
    steps: int = 0
    rounds: int = 0
    seconds: float = 0.0


def clone(
    teacher: Teacher,
    tasks: Sequence[Task],
    tokens: ChatTokens,
    recipe: Recipe,
    seed: int,
    state_file: Path,
    minutes: float,
    after_round: Callable[[TinyLM, Progress, float], None],
) -> tuple[TinyLM, Progress]:
    """Trains for ``recipe.tokens`` tokens. An existing ``state_file`` is continued; the result is the same.

    Raises:
        TimeoutError: ``minutes`` passed before the end; the state is saved and a second call continues.
    """
    model = TinyLM.initialized(TinyConfig(vocab_size=tokens.tokenizer.get_vocab_size()), seed)
    optimizer, progress = MuonAdamW(model), Progress()
    if state_file.exists():
        state = torch.load(state_file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        progress = Progress(**state["progress"])
    begun = time.monotonic()
    while progress.tokens < recipe.tokens:
        started = time.monotonic()
        rng = random.Random(f"{seed}/{progress.rounds}")
        levels = rng.choices(
            SKILL_LEVELS, recipe.mixture_at(progress.tokens / recipe.tokens), k=recipe.episodes_per_round
        )
        demonstrations = [teacher.play(rng.choice(tasks), *level, rng) for level in levels]
        rows = [to_row(demonstration, tokens, recipe.skilled_weight) for demonstration in demonstrations]
        losses = []
        for batch in batches(rows, recipe.tokens_per_batch, rng):
            losses.append(_step(model, optimizer, batch, tokens.pad, recipe, progress))
        progress.rounds += 1
        progress.seconds += time.monotonic() - started
        _save(state_file, model, optimizer, progress)
        after_round(model, progress, sum(losses) / len(losses))
        if time.monotonic() - begun > minutes * 60 and progress.tokens < recipe.tokens:
            raise TimeoutError(
                f"{minutes:g} minutes passed at {progress.tokens:,} of {recipe.tokens:,} tokens; "
                "run the same command with --resume to go on"
            )
    return model, progress


def _step(
    model: TinyLM, optimizer: MuonAdamW, batch: Sequence[Row], padding: int, recipe: Recipe, progress: Progress
) -> float:
    share = progress.tokens / recipe.tokens
    ids = pad([row.ids for row in batch], padding)
    weights = command_weights(batch, ids.shape[1])[:, 1:]
    hidden, targets = model.hidden(ids)[:, :-1], ids[:, 1:]
    on_command = weights > 0
    loss = _weighted_loss(model, hidden[on_command], targets[on_command], weights[on_command])
    total = loss
    answer_weight = recipe.answer_weight_at(share)
    if answer_weight > 0:
        elsewhere = ~on_command & (targets != padding)
        elsewhere[:, progress.steps % 2 :: 2] = False  # every other token is enough, and cheaper
        total = loss + answer_weight * F.cross_entropy(model.logits(hidden[elsewhere]), targets[elsewhere])
    optimizer.zero_grad()
    total.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
    optimizer.step(recipe.learning_rate_at(share, progress.steps))
    progress.steps += 1
    progress.tokens += sum(len(row.ids) for row in batch)
    return loss.item()


def command_weights(batch: Sequence[Row], width: int) -> Tensor:
    """``(N, T)``: the row's weight on the tokens of its commands, 0 elsewhere."""
    weights = torch.zeros(len(batch), width)
    for index, row in enumerate(batch):
        for start, end in row.spans:
            weights[index, start:end] = row.weight
    return weights


def _weighted_loss(model: TinyLM, hidden: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(model.logits(hidden), targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def _save(file: Path, model: TinyLM, optimizer: MuonAdamW, progress: Progress) -> None:
    """Writes beside the old state first, so that an interruption leaves one of the two whole."""
    temporary = file.with_suffix(".tmp")
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": vars(progress)}, temporary
    )
    temporary.replace(file)
