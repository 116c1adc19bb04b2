"""The invalid-action penalty: a term of its own per turn, beside the outcome advantage and never inside it (I9).

Put into the reward, a penalty passes through the group's statistics: in a group where every episode fails with
reward 0 the standard deviation is that of the penalties alone, and a difference of one invalid action becomes an
advantage of the size of a success. Here the token advantage that is trained on is

    Ã_t − p [turn(t) is invalid]

with p = ``env.invalid_action_penalty``: every sampled token of a turn whose command the environment did not accept gets
−p, whatever the group did, whether the episode won, and whatever its other turns are. Episodes lost to the environment
get none. An episode with A = 0 and an invalid turn is trained on by this term alone; the teacher does not rescore it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from verl.agentopsd.episodes import Episode
    from verl.agentopsd.evaluation.records import EpisodeRecord


def invalid_turn_penalty(turns: Sequence[Mapping[str, Any]], turn_ids: torch.Tensor, p: float) -> torch.Tensor:
    """The term to add to one episode's token advantages.

    Args:
        turns: (K) the agent loop's facts of each turn; ``valid`` is read.
        turn_ids: (T,) int64, the turn that sampled each token, -1 elsewhere.
        p: the penalty, at least 0.

    Returns:
        (T,) float32: −p on the action tokens of invalid turns, 0 elsewhere.
    """
    invalid = torch.tensor([not turn["valid"] for turn in turns] + [False])  # the last entry answers for -1
    return torch.where(invalid[turn_ids], -float(p), 0.0).to(torch.float32)


def penalised(episode: Episode, token_advantages: torch.Tensor, p: float) -> torch.Tensor:
    """(T,) the advantages that are trained on; without a penalty, the very tensor that was given."""
    if not p or not episode.valid:
        return token_advantages
    return token_advantages + invalid_turn_penalty(episode.facts["turns"], episode.turn_ids(), p)


def with_penalties(record: EpisodeRecord, p: float) -> EpisodeRecord:
    """The record with ``penalty`` in every turn: what each of its tokens got beside ``advantage``."""
    if not p or record.env_error:
        return record
    turns = [dataclasses.replace(turn, penalty=0.0 if turn.valid else -float(p)) for turn in record.turns]
    return dataclasses.replace(record, turns=turns)


def penalty_metrics(episodes: Sequence[Episode], advantages: Sequence[float], p: float) -> dict[str, float]:
    """``env/penalty_mean``: what the penalty adds to an episode's mean token advantage, mean over valid episodes;
    ``env/penalty_rows_without_advantage``: episodes with A = 0 that are trained on for their invalid turns alone."""
    if not p:
        return {}
    shares, alone = [], 0
    for episode, advantage in zip(episodes, advantages, strict=True):
        if episode.valid:
            term = invalid_turn_penalty(episode.facts["turns"], episode.turn_ids(), p)
            shares.append(float(term.sum()) / max(int(episode.action_mask.sum()), 1))
            alone += advantage == 0 and bool(term.any())
    mean = sum(shares) / len(shares) if shares else 0.0
    return {"env/penalty_mean": mean, "env/penalty_rows_without_advantage": float(alone)}
