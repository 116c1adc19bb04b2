"""Log-probs of a recorded episode by plain transformers: no verl, no engine, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl.agentopsd.evaluation.records import EpisodeRecord
from verl.agentopsd.rollout.chat import ChatFormat


def turn_log_probs(model: Any, chat: ChatFormat, record: EpisodeRecord, messages: Sequence[Any]) -> list[float] | None:
    """The sum of each turn's action-token log-probs behind ``messages``.

    None when the model spelled a word in other pieces than its tokenizer does, which the text does not tell.
    """
    answers = [
        chat.tokenizer.encode(turn.text, add_special_tokens=False) + [chat.end_of_turn_id] for turn in record.turns
    ]
    if [len(answer) for answer in answers] != [turn.tokens for turn in record.turns]:
        return None
    ids, spans = chat.initial_ids(list(messages)), []
    for turn, answer in zip(record.turns, answers, strict=True):
        spans.append((len(ids), len(ids) + len(answer)))
        ids = [*ids, *answer, *chat.turn_ids(turn.observation)]
    with torch.no_grad():
        log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [sum(log_probs[t - 1, ids[t]].item() for t in range(*span)) for span in spans]
