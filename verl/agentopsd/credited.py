"""An update's episodes with their credit: base advantage, teacher's log-probs, belief and weight of every turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from verl.agentopsd.credit import Credit, CreditConfig, agentopsd_credit
from verl.agentopsd.episodes import Episode, padded
from verl.agentopsd.evaluation.records import EpisodeRecord, episode_record, turn_credits


@dataclass(frozen=True)
class CreditedEpisode:
    """One episode after the advantage stage.

    Attributes:
        advantage: A, the same for the whole trajectory.
        token_advantages: (T,) Ã on action tokens, 0 elsewhere.
        success_rate: S/G of the group, over valid episodes.
        teacher_log_probs: (T,) float32 for a scored episode, None for one whose A is 0 (I8).
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
    rule: CreditConfig,
) -> tuple[list[CreditedEpisode], Credit | None]:
    """Applies the credit rule to the episodes that the teacher scored; the others keep their base advantage.

    Args:
        advantages: A per episode.
        success_rates: S/G per episode.
        teacher_log_probs: (T,) by episode key.
    """
    scored = [index for index, episode in enumerate(episodes) if episode.key in teacher_log_probs]
    credit = None
    if scored:
        rows = [episodes[index] for index in scored]
        gaps = [(teacher_log_probs[e.key] - e.old_log_probs) * e.action_mask for e in rows]
        credit = agentopsd_credit(
            advantages=torch.tensor([advantages[index] for index in scored], dtype=torch.float32),
            gaps=padded(gaps, 0.0),
            turn_ids=padded([episode.turn_ids() for episode in rows], -1),
            success_rate=torch.tensor([success_rates[index] for index in scored], dtype=torch.float64),
            config=rule,
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


def row_credit(credit: Credit, row: int) -> dict[str, Any]:
    """One row of a batch's credit, without the padding turns."""
    turns = credit.turn_mask[row]
    fields = {name: getattr(credit, name)[row][turns] for name in ("evidence", "belief", "delta", "weights")}
    return {**fields, "prior": float(credit.prior[row])}
