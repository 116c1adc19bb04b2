"""The teacher: the policy that reads an episode again with privileged text in its prompt.

For each episode the response ids stay exactly what the student sampled; only the prompt changes. The gap between the
two log-probabilities of an action token is the evidence that the credit rule uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from verl.agentopsd.config import ConfigError, TeacherConfig
from verl.agentopsd.episodes import Episode
from verl.agentopsd.rollout.chat import ChatFormat
from verl.agentopsd.skills.bank import SkillBank
from verl.agentopsd.skills.insert import with_skill

LogProbFn = Callable[[TensorDict], TensorDict]
"""The training engine's forward: jagged ``input_ids``, ``position_ids``, ``loss_mask`` -> jagged ``log_probs``."""


@dataclass
class TeacherPolicy:
    """Scores response tokens with a skill in the prompt: the engine and weights of ``old_log_probs``.

    Args:
        config: where the text comes from and where it goes.
        chat: renders prompts exactly as the rollout does.
        bank: skills by task type.
        compute_log_prob: the actor's forward pass, no gradient.
        temperature: the sampling temperature, which also scales the logits of ``old_log_probs``.
        max_length: tokens that fit in one row; a longer row is refused, a skill is never cut.
        row_multiple: the number of rows per call must be a multiple of this (data-parallel size × micro-batch).
    """

    config: TeacherConfig
    chat: ChatFormat
    bank: SkillBank
    compute_log_prob: LogProbFn
    temperature: float
    max_length: int
    row_multiple: int = 1
    skill_fallbacks: int = 0
    tokens: int = 0
    _prompts: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def prompt_ids(self, episode: Episode) -> torch.Tensor:
        """(P',) int64: the episode's opening messages with the skill for its task type."""
        facts = episode.facts
        key = (facts["game_id"], facts["task_type"])
        if key not in self._prompts:
            messages = with_skill(facts["messages"], self.bank.text(facts["task_type"]), self.config.skill_position)
            self._prompts[key] = self.chat.initial_ids(messages)
        return torch.tensor(self._prompts[key], dtype=torch.int64)

    def log_probs(self, episodes: Sequence[Episode]) -> list[torch.Tensor]:
        """(T,) float32 per episode: teacher log-probability of every response token, in the order given."""
        if not episodes:
            return []
        self._prompts.clear()
        self.tokens = 0
        rows = [self._row(episode) for episode in episodes]
        # neighbours of similar length share a micro-batch, so that little of it is padding
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        padded_order = order + [order[0]] * (-len(order) % self.row_multiple)
        scored = self._score([rows[i] for i in padded_order], [episodes[i].response_ids for i in padded_order])
        result: list[torch.Tensor] = [torch.empty(0)] * len(rows)
        for position, index in enumerate(order):
            result[index] = scored[position]
        return result

    def _row(self, episode: Episode) -> torch.Tensor:
        row = torch.cat([self.prompt_ids(episode), episode.response_ids])
        if len(row) > self.max_length:
            prompt = len(row) - len(episode.response_ids)
            raise ConfigError(
                f"{episode.facts['game_id']}: teacher prompt {prompt} + response "
                f"{len(episode.response_ids)} = {len(row)} tokens, but a row may have {self.max_length}. "
                "Skills are never cut: raise actor_rollout_ref.rollout.max_model_len (and the micro-batch token "
                "limits) or shorten the skill."
            )
        self.tokens += len(row)
        return row

    def _score(self, rows: list[torch.Tensor], responses: list[torch.Tensor]) -> list[torch.Tensor]:
        output = self.compute_log_prob(scoring_batch(rows, responses, self.temperature))
        response_shape = torch.nested.as_nested_tensor(responses, layout=torch.jagged)
        return [row.float() for row in response_from_nested(output["log_probs"], response_shape).unbind()]


def scoring_batch(rows: list[torch.Tensor], responses: list[torch.Tensor], temperature: float) -> TensorDict:
    """A fresh batch for the engine's forward pass: nothing of an earlier call can linger in it.

    Args:
        rows: (L,) int64 token ids per row, prompt then response.
        responses: (T,) int64 per row, the last T tokens of the row.
    """
    for row, response in zip(rows, responses, strict=True):
        assert torch.equal(row[len(row) - len(response) :], response), (
            "a teacher row must end in the student's response"
        )
    loss_masks = [
        torch.cat([torch.zeros(len(row) - len(response)), torch.ones(len(response))]).long()
        for row, response in zip(rows, responses, strict=True)
    ]
    columns: dict[str, Any] = {
        "input_ids": rows,
        "position_ids": [torch.arange(len(row)) for row in rows],
        "loss_mask": loss_masks,
    }
    tensors: dict[str, Any] = {
        name: torch.nested.as_nested_tensor(column, layout=torch.jagged) for name, column in columns.items()
    }
    settings = {"temperature": temperature, "calculate_entropy": False, "compute_loss": False}
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=settings)
