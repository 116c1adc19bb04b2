"""An update's episodes with their credit: base advantage, teacher's log-probs, belief and weight of every turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch

from verl.agentopsd.credit import Credit, CreditConfig, token_ids
from verl.agentopsd.episodes import Episode, padded
from verl.agentopsd.evaluation.records import EpisodeRecord, episode_record, turn_credits
from verl.agentopsd.methods.base import Method


@dataclass(frozen=True)
class CreditedEpisode:
    """One episode after the advantage stage.

    Attributes:
        advantage: A, the same for the whole trajectory.
        token_advantages: (T,) Ã on action tokens, 0 elsewhere.
        success_rate: S/G of the group, over valid episodes.
        teacher_log_probs: (T,) float32 for an episode that the teacher reread, else None (I8).
        credit: ``evidence, belief, delta, weights`` of this row, each (K,), and ``prior``; None as above.
    """

    episode: Episode
    advantage: float
    token_advantages: torch.Tensor
    success_rate: float
    teacher_log_probs: torch.Tensor | None = None
    credit: dict[str, Any] | None = None

    def record(self, run: str, step: int) -> EpisodeRecord:
        """The JSON line of this episode."""
        credits = None
        if self.credit is not None:
            credits = turn_credits(
                self.episode.turn_ids(),
                self.episode.old_log_probs,
                self.teacher_log_probs,
                self.token_advantages,
                self.credit,
            )
        return episode_record(
            self.episode.facts,
            run=run,
            step=step,
            phase="train",
            sample=self.episode.sample,
            group=self.episode.group,
            reward=self.episode.reward,
            advantage=self.advantage,
            success_rate=self.success_rate,
            prior=None if self.credit is None else self.credit["prior"],
            credits=credits,
        )


def evenly(episode: Episode, advantage: float) -> torch.Tensor:
    """(T,) the base advantage on every action token: what a run without the method trains on."""
    return episode.action_mask * advantage


def credit_episodes(
    episodes: list[Episode],
    advantages: list[float],
    success_rates: list[float],
    teacher_log_probs: dict[str, torch.Tensor],
    method: Method,
    rule: CreditConfig,
    shuffle_seed: Sequence[int] | None = None,
) -> tuple[list[CreditedEpisode], Credit | None]:
    """Applies the method's credit rule to the episodes that the teacher reread; the others keep their base advantage.

    Args:
        advantages: A per episode.
        success_rates: S/G per episode.
        teacher_log_probs: (T,) by episode key.
        shuffle_seed: gives every episode its turns' evidence in an order drawn from this seed and its key.
    """
    scored = [index for index, episode in enumerate(episodes) if episode.key in teacher_log_probs]
    credit = None
    if scored and method.credit is not None:
        rows = [episodes[index] for index in scored]
        gaps = [(teacher_log_probs[e.key] - e.old_log_probs) * e.action_mask for e in rows]
        turn_ids = padded([episode.turn_ids() for episode in rows], -1)
        dealt = token_ids(turn_ids) if rule.granularity == "token" else turn_ids
        credit = method.credit(
            torch.tensor([advantages[index] for index in scored], dtype=torch.float32),
            padded(gaps, 0.0),
            turn_ids,
            torch.tensor([success_rates[index] for index in scored], dtype=torch.float64),
            rule,
            **({} if shuffle_seed is None else {"order": shuffled(rows, dealt, shuffle_seed)}),
        )
    row_of = {index: row for row, index in enumerate(scored)}
    credited = []
    for index, episode in enumerate(episodes):
        if credit is None or index not in row_of:
            tokens = evenly(episode, advantages[index])
            credited.append(CreditedEpisode(episode, advantages[index], tokens, success_rates[index]))
            continue
        row = row_of[index]
        credited.append(
            CreditedEpisode(
                episode,
                advantages[index],
                credit.advantages[row, : len(episode.response_ids)],
                success_rates[index],
                teacher_log_probs[episode.key],
                row_credit(credit, row),
            )
        )
    return credited, credit


def shuffled(episodes: Sequence[Episode], turn_ids: torch.Tensor, seed: Sequence[int]) -> torch.Tensor:
    """(N,K) int64: a random order of each row's turns that depends on ``seed`` and the episode's key alone (I10)."""
    turns = max(int(turn_ids.max()) + 1, 1)
    order = torch.arange(turns).repeat(len(episodes), 1)
    for row, episode in enumerate(episodes):
        own = int(turn_ids[row].max()) + 1
        generator = np.random.default_rng([*seed, crc32(episode.key.encode())])
        order[row, :own] = torch.from_numpy(generator.permutation(own))
    return order


def row_credit(credit: Credit, row: int) -> dict[str, Any]:
    """One row of a batch's credit, without the padding turns."""
    turns = credit.turn_mask[row]
    fields = {name: getattr(credit, name)[row][turns] for name in ("evidence", "belief", "delta", "weights")}
    return {**fields, "prior": float(credit.prior[row])}
