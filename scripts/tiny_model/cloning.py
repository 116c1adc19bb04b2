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

from verl.agentopsd.envs.alfworld.expert import Clumsiness
from verl.agentopsd.envs.base import Task
from verl.agentopsd.models.play import ChatTokens, pad
from verl.agentopsd.models.tiny import TinyLM

from .demonstrations import SKILL_LEVELS, Row, Teacher, batches, to_row
from .optimizer import MuonAdamW


@dataclass(frozen=True)
class Stage:
    """Everything that decides the result of one stage, together with the games and the seed.

    The mixture of :data:`SKILL_LEVELS` moves from ``start_mixture`` to ``mixture`` over the first ``ramp`` of the token
    budget. ``skilled_weight`` makes up for skilled episodes being three times shorter. The game's answers are predicted
    too: their weight falls from ``answer_weight`` to 0 at ``answer_until``. Times are shares of the budget.
    """

    tokens: int
    clumsiness: Clumsiness
    learning_rate: float
    hold: float
    final_learning_rate: float
    start_mixture: tuple[float, ...]
    mixture: tuple[float, ...]
    ramp: float = 0.3
    answer_weight: float = 0.0
    answer_until: float = 0.5
    skilled_weight: float = 1.5
    tokens_per_batch: int = 2400
    episodes_per_round: int = 240
    warmup_steps: int = 50
    max_grad_norm: float = 1.0

    def learning_rate_at(self, progress: float, step: int) -> float:
        decay = 1.0 if progress < self.hold else max(self.final_learning_rate, (1 - progress) / (1 - self.hold))
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * decay

    def mixture_at(self, progress: float) -> list[float]:
        share = min(1.0, progress / self.ramp)
        return [(1 - share) * a + share * b for a, b in zip(self.start_mixture, self.mixture, strict=True)]

    def answer_weight_at(self, progress: float) -> float:
        return self.answer_weight * max(0.0, 1 - progress / self.answer_until)


STAGES = (
    # Copying names out of the text is learnt first, from skilled play and from the game's answers; a very clumsy player
    # keeps the two modes apart.
    Stage(
        tokens=13_000_000,
        clumsiness=Clumsiness(),
        learning_rate=3e-3,
        hold=0.4,
        final_learning_rate=0.03,
        start_mixture=(0.1, 0.7, 0.1, 0.1),
        mixture=(0.35, 0.45, 0.1, 0.1),
        answer_weight=0.2,
    ),
    # What the student starts RL with: clumsy, but it finishes a game now and then.
    Stage(
        tokens=2_500_000,
        clumsiness=Clumsiness(aimless=0.3, dawdle=0.15, wrong_object=0.04, forget=0.4, recover=0.12),
        learning_rate=1.5e-3,
        hold=0.0,
        final_learning_rate=0.01,
        start_mixture=(0.4, 0.4, 0.1, 0.1),
        mixture=(0.4, 0.4, 0.1, 0.1),
    ),
)


@dataclass
class Progress:
    tokens: int = 0
    steps: int = 0
    rounds: int = 0
    seconds: float = 0.0


def clone(
    model: TinyLM,
    teacher: Teacher,
    tasks: Sequence[Task],
    tokens: ChatTokens,
    stage: Stage,
    seed: int,
    state_file: Path,
    minutes: float,
    after_round: Callable[[Progress, float], None],
) -> Progress:
    """Trains ``model`` for one stage. An existing ``state_file`` is continued; the result is the same.

    Raises:
        TimeoutError: ``minutes`` passed before the end; the state is saved and a second call continues.
    """
    optimizer, progress = MuonAdamW(model), Progress()
    if state_file.exists():
        state = torch.load(state_file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        progress = Progress(**state["progress"])
    begun = time.monotonic()
    while progress.tokens < stage.tokens:
        started = time.monotonic()
        rng = random.Random(f"{seed}/{progress.rounds}")
        mixture = stage.mixture_at(progress.tokens / stage.tokens)
        levels = rng.choices(SKILL_LEVELS, mixture, k=stage.episodes_per_round)
        demonstrations = [teacher.play(rng.choice(tasks), *level, stage.clumsiness, rng) for level in levels]
        rows = [to_row(demonstration, tokens, stage.skilled_weight) for demonstration in demonstrations]
        losses = [
            _step(model, optimizer, batch, tokens.pad, stage, progress)
            for batch in batches(rows, stage.tokens_per_batch, rng)
        ]
        progress.rounds += 1
        progress.seconds += time.monotonic() - started
        _save(state_file, model, optimizer, progress)
        after_round(progress, sum(losses) / len(losses))
        if time.monotonic() - begun > minutes * 60 and progress.tokens < stage.tokens:
            raise TimeoutError(
                f"{minutes:g} minutes passed at {progress.tokens:,} of {stage.tokens:,} tokens; "
                "run the same command with --resume to go on"
            )
    return progress


def _step(
    model: TinyLM, optimizer: MuonAdamW, batch: Sequence[Row], padding: int, stage: Stage, progress: Progress
) -> float:
    share = progress.tokens / stage.tokens
    ids = pad([row.ids for row in batch], padding)
    weights = command_weights(batch, ids.shape[1])[:, 1:]
    hidden, targets = model.hidden(ids)[:, :-1], ids[:, 1:]
    on_command = weights > 0
    loss = _weighted_loss(model, hidden[on_command], targets[on_command], weights[on_command])
    total = loss
    answer_weight = stage.answer_weight_at(share)
    if answer_weight > 0:
        elsewhere = ~on_command & (targets != padding)
        elsewhere[:, progress.steps % 2 :: 2] = False  # every other token is enough, and cheaper
        total = loss + answer_weight * F.cross_entropy(model.logits(hidden[elsewhere]), targets[elsewhere])
    optimizer.zero_grad()
    total.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), stage.max_grad_norm)
    optimizer.step(stage.learning_rate_at(share, progress.steps))
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
