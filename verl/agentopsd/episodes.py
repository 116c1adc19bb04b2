"""One update's episodes as the driver sees them: tokens, masks, log-probs and what the agent loop recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transfer_queue as tq
from transfer_queue import KVBatchMeta


@dataclass(frozen=True)
class Episode:
    """One trajectory row, unpadded.

    Attributes:
        key: ``{game uid}_{episode}_{0}`` in the transfer queue.
        prompt_ids: (P,) int64, the skill-free prompt.
        response_ids: (T,) int64, sampled tokens and observations.
        action_mask: (T,) bool, True exactly on sampled tokens (I2).
        old_log_probs: (T,) float32, from the actor before the update.
        rollout_log_probs: (T,) float32, from the rollout engine.
        reward: what the environment paid for the trajectory.
        facts: the agent loop's ``extra_fields``.
    """

    key: str
    prompt_ids: torch.Tensor
    response_ids: torch.Tensor
    action_mask: torch.Tensor
    old_log_probs: torch.Tensor
    rollout_log_probs: torch.Tensor
    reward: float
    facts: dict[str, Any]

    @property
    def group(self) -> str:
        """The game this episode was sampled for, unique within the update."""
        return self.key.rsplit("_", 2)[0]

    @property
    def sample(self) -> int:
        """Which of the group's episodes this is."""
        return int(self.key.rsplit("_", 2)[1])

    @property
    def won(self) -> bool:
        return bool(self.facts["won"])

    @property
    def valid(self) -> bool:
        """False when the environment failed: such an episode is no evidence about the policy (I9)."""
        return not self.facts["env_error"]

    def turn_ids(self) -> torch.Tensor:
        """(T,) int64: the turn that sampled each token, -1 elsewhere. Checks that turns cover the mask (I3)."""
        ids = torch.full_like(self.response_ids, -1)
        for index, turn in enumerate(self.facts["turns"]):
            start, end = turn["span"]
            ids[start:end] = index
        if not torch.equal(ids >= 0, self.action_mask):
            raise ValueError(f"{self.facts['game_id']}: the turns of episode {self.key} do not cover its action mask")
        return ids


FIELDS = ["prompts", "responses", "response_mask", "old_log_probs", "rollout_log_probs", "rm_scores", "extra_fields"]


def read_episodes(batch: KVBatchMeta) -> list[Episode]:
    """Fetches the rows of ``batch`` from the transfer queue, in its order."""
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=FIELDS)
    columns = [data[name].unbind() for name in FIELDS[:-1]]
    facts = data.get("extra_fields").tolist()
    return [
        Episode(key, prompt, response, mask.bool(), old, rollout, float(rewards.sum()), extra)
        for key, prompt, response, mask, old, rollout, rewards, extra in zip(batch.keys, *columns, facts, strict=True)
    ]


def padded(rows: list[torch.Tensor], value: float) -> torch.Tensor:
    """(N, T) from rows of different lengths, filled at the right."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
