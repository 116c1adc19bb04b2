"""The teacher: the policy that reads an episode again, with privileged text in its prompt or with other weights.

For each episode the response ids stay exactly what the student sampled; only the prompt changes. The gap between the
two log-probabilities of an action token is the evidence that a method uses.
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
from verl.agentopsd.evaluation.records import messages_shown
from verl.agentopsd.privilege import Privilege
from verl.agentopsd.rollout.chat import ChatFormat
from verl.agentopsd.skills.insert import with_skill

LogProbFn = Callable[[TensorDict], TensorDict]
"""The training engine's forward: jagged ``input_ids``, ``position_ids``, ``loss_mask`` -> jagged ``log_probs``."""


@dataclass
class TeacherPolicy:
    """Scores response tokens behind another prompt.

    Args:
        config: whose weights, and where the text goes. With ``source=self`` the forward pass is the one that gave
            ``old_log_probs``: same engine, same weights (I5).
        chat: renders prompts exactly as the rollout does.
        privilege: finds each episode's text.
        compute_log_prob: the teacher's forward pass, no gradient.
        temperature: the sampling temperature, which also scales the logits of ``old_log_probs``.
        max_length: tokens that fit in one row; a longer row is refused, a skill is never cut.
        row_multiple: the number of rows per call must be a multiple of this (data-parallel size × micro-batch).
    """

    config: TeacherConfig
    chat: ChatFormat
    privilege: Privilege
    compute_log_prob: LogProbFn
    temperature: float
    max_length: int
    row_multiple: int = 1
    tokens: int = 0
    without_text: list[str] = field(default_factory=list)
    _prompts: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)

    def prompt_ids(self, episode: Episode, text: str | None) -> torch.Tensor:
        """(P',) int64: the opening messages as the student saw them, with ``text``; its own prompt without."""
        if text is None:
            return episode.prompt_ids
        shown = messages_shown(episode.facts)
        key = (text, *((message["role"], message["content"]) for message in shown))
        if key not in self._prompts:
            self._prompts[key] = self.chat.initial_ids(with_skill(shown, text, self.config.skill_position))
        return torch.tensor(self._prompts[key], dtype=torch.int64)

    def log_probs(self, episodes: Sequence[Episode], among: Sequence[Episode] = ()) -> list[torch.Tensor]:
        """(T,) float32 per episode, in the order given: teacher log-probability of every action token; without meaning
        elsewhere.

        Sets ``tokens``, the length of all rows that were forwarded, and ``without_text``, the keys of the episodes for
        which there was no privileged text. The student itself without text is not asked again: its answer is
        ``old_log_probs``.

        Args:
            among: all episodes of the update, where hindsight looks for a sibling.
        """
        self._prompts.clear()
        self.tokens, self.without_text = 0, []
        texts = self.privilege.texts(episodes, among)
        if self.config.privilege == "hindsight":  # its length is known only now; left out whole rather than cut
            texts = [text if self._fits(one, text) else None for one, text in zip(episodes, texts, strict=True)]
        self.without_text = [one.key for one, text in zip(episodes, texts, strict=True) if text is None]
        result = [episode.old_log_probs.clone() for episode in episodes]
        asked = [i for i, text in enumerate(texts) if text is not None or self.config.source != "self"]
        if not asked:
            return result
        rows = {i: self._row(episodes[i], texts[i]) for i in asked}
        self.tokens = sum(map(len, rows.values()))
        # neighbours of similar length share a micro-batch, so that little of it is padding
        order = sorted(asked, key=lambda i: len(rows[i]))
        padded_order = order + [order[0]] * (-len(order) % self.row_multiple)
        scored = self._score([rows[i] for i in padded_order], [episodes[i] for i in padded_order])
        for index, log_probs in zip(order, scored, strict=False):  # the rest is padding
            result[index] = log_probs
        return result

    def _fits(self, episode: Episode, text: str | None) -> bool:
        return len(self.prompt_ids(episode, text)) + len(episode.response_ids) <= self.max_length

    def _row(self, episode: Episode, text: str | None) -> torch.Tensor:
        row = torch.cat([self.prompt_ids(episode, text), episode.response_ids])
        if len(row) > self.max_length:
            prompt = len(row) - len(episode.response_ids)
            raise ConfigError(
                f"{episode.facts['game_id']}: teacher prompt {prompt} + response {len(episode.response_ids)} = "
                f"{len(row)} tokens, but a row may have {self.max_length}. Privileged text is never cut: raise the "
                "micro-batch token limits, shorten the text, or lower data.max_response_length."
            )
        return row

    def _score(self, rows: list[torch.Tensor], episodes: list[Episode]) -> list[torch.Tensor]:
        responses, masks = [one.response_ids for one in episodes], [one.action_mask for one in episodes]
        output = self.compute_log_prob(scoring_batch(rows, responses, masks, self.temperature))
        response_shape = torch.nested.as_nested_tensor(responses, layout=torch.jagged)
        return [row.float() for row in response_from_nested(output["log_probs"], response_shape).unbind()]


def scoring_batch(
    rows: list[torch.Tensor], responses: list[torch.Tensor], masks: list[torch.Tensor], temperature: float
) -> TensorDict:
    """A fresh batch for the engine's forward pass: nothing of an earlier call can linger in it.

    Args:
        rows: (L,) int64 token ids per row, prompt then response.
        responses: (T,) int64 per row, the last T tokens of the row.
        masks: (T,) per row, nonzero on the tokens whose log-prob is wanted.
    """
    for row, response in zip(rows, responses, strict=True):
        assert torch.equal(row[len(row) - len(response) :], response), (
            "a teacher row must end in the student's response"
        )
    loss_masks = [
        torch.cat([torch.zeros(len(row) - len(mask), dtype=torch.int64), mask.long()])
        for row, mask in zip(rows, masks, strict=True)
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
