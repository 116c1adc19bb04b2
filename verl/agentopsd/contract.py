"""What must hold for every batch before it is trained on, checked on every batch; a violation stops the run.

Most of these rules hold by construction. They are checked again where the rows arrive, because between the agent loop
and the trainer lie a queue, other processes and another library's code, and a broken row would train silently.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.agentopsd.episodes import Episode
from verl.agentopsd.redact import redact_config
from verl.agentopsd.rollout.ledger import RowError, check_row


class ContractViolation(RuntimeError):
    """A row that must not be trained on; the message names game, row and field, the dump holds the row."""


def check_batch(
    episodes: Sequence[Episode],
    *,
    step: int,
    games: int,
    group_size: int,
    max_logprob_gap: float,
    run_dir: Path,
) -> None:
    """Checks every row of an update, after the actor has scored it and before anything is computed from it.

    - ids, mask, both log-probs and spans agree in length; the mask is 1 exactly on the turns' tokens (I2, I3)
    - log-probs and reward are finite, the sampler's are 0 on context
    - every answer was sampled with the weights of the last update, ``step`` − 1 (I5)
    - ``old_log_probs`` were computed by the actor and are not a copy of the sampler's: the evidence subtracts them
      from the teacher's, and both must come from one engine (I5)
    - sampler and actor agree about the sampled tokens: they have the same weights
    - ``games`` groups of ``group_size`` rows, one game each, every sample once (I9)

    Args:
        step: the update that these rows are for.
        max_logprob_gap: nats per action token by which sampler and actor may differ, in the mean over the batch.

    Raises:
        ContractViolation: the first violation; the row is in ``run_dir/contract-violation.json``.
    """
    for episode in episodes:
        if problem := _row_problem(episode, step):
            _refuse(episode, *problem, step, run_dir)
    sampled = [episode for episode in episodes if episode.facts["turns"]]
    pairs = [(one.old_log_probs[one.action_mask], one.rollout_log_probs[one.action_mask]) for one in sampled]
    if any(old.any() for old, _ in pairs) and all(torch.equal(old, sampler) for old, sampler in pairs):
        copied = (
            "every value equals the sampler's: the actor did not compute them, so teacher and student would come from "
            "different engines; set algorithm.rollout_correction.bypass_mode=false"
        )
        _refuse(sampled[0], "old_log_probs", copied, step, run_dir)
    _check_gap(sampled, max_logprob_gap, step, run_dir)
    _check_groups(episodes, step, games, group_size, run_dir)


def _check_gap(episodes: Sequence[Episode], most: float, step: int, run_dir: Path) -> None:
    gaps = [(one.old_log_probs - one.rollout_log_probs)[one.action_mask].abs() for one in episodes]
    tokens = sum(len(gap) for gap in gaps)
    mean = sum(float(gap.double().sum()) for gap in gaps) / max(tokens, 1)
    if mean > most:
        worst = max(range(len(episodes)), key=lambda row: float(gaps[row].max()) if len(gaps[row]) else 0.0)
        problem = (
            f"the rollout engine's differ from the actor's by {mean:.2g} nats a token in the mean of the update, more "
            f"than agentopsd.max_logprob_gap={most:g}: the engine does not play with the actor's weights, or at "
            "another temperature"
        )
        _refuse(episodes[worst], "rollout_log_probs", problem, step, run_dir)


def check_teacher(
    episodes: Mapping[str, Episode], log_probs: Mapping[str, torch.Tensor], step: int, run_dir: Path
) -> None:
    """Checks the teacher's log-probs, by episode key: one finite value per response token of a known row.

    Raises:
        ContractViolation: as :func:`check_batch`.
    """
    for key, values in log_probs.items():
        episode = episodes[key]
        if values.shape != episode.response_ids.shape:
            problem = f"{len(values)} entries for {len(episode.response_ids)} response tokens"
            _refuse(episode, "teacher_log_probs", problem, step, run_dir, values)
        if (wrong := _first_not_finite(values[episode.action_mask])) is not None:
            _refuse(episode, "teacher_log_probs", f"action token {wrong} is not finite", step, run_dir, values)


def _row_problem(episode: Episode, step: int) -> tuple[str, str] | None:
    """The field and what is wrong with it."""
    facts, length = episode.facts, len(episode.response_ids)
    try:
        spans = [turn["span"] for turn in facts["turns"]]
        check_row(
            episode.prompt_ids,
            episode.response_ids,
            episode.action_mask,
            spans,
            episode.rollout_log_probs,
            game_id=facts["game_id"],
        )
    except RowError as error:
        return error.field, str(error).split(": ", 2)[-1]
    if len(episode.old_log_probs) != length:
        return "old_log_probs", f"{len(episode.old_log_probs)} entries for {length} response tokens"
    if (wrong := _first_not_finite(episode.old_log_probs[episode.action_mask])) is not None:
        return "old_log_probs", f"action token {wrong} is not finite"
    if not np.isfinite(episode.reward):
        return "reward", f"{episode.reward} is not finite"
    versions = (facts["min_global_steps"], facts["max_global_steps"])
    if spans and versions != (step - 1, step - 1):
        return "weights_version", (
            f"sampled with the weights of update {versions[0]} to {versions[1]} instead of {step - 1}: the weight sync "
            "did not reach every server"
        )
    return None


def _first_not_finite(values: torch.Tensor) -> int | None:
    if torch.isfinite(values).all():
        return None
    return int((~torch.isfinite(values)).nonzero()[0])


def _check_groups(episodes: Sequence[Episode], step: int, games: int, group_size: int, run_dir: Path) -> None:
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode)
    for members in groups.values():
        if sorted(member.sample for member in members) != list(range(group_size)):
            samples = sorted(member.sample for member in members)
            _refuse(members[0], "group", f"has the samples {samples} instead of 0 to {group_size - 1}", step, run_dir)
        if len(played := Counter(member.facts["game_id"] for member in members)) > 1:
            _refuse(members[0], "group", f"holds several games: {', '.join(sorted(played))}", step, run_dir)
    if len(groups) != games:
        _refuse(episodes[0], "group", f"one of {len(groups)} groups, the update has {games} games", step, run_dir)


def _refuse(
    episode: Episode, field: str, problem: str, step: int, run_dir: Path, teacher: torch.Tensor | None = None
) -> None:
    dump, row = run_dir / "contract-violation.json", _dumped(episode, field, problem, step)
    if teacher is not None:
        row["teacher_log_probs"] = teacher.tolist()
    plain = json.loads(json.dumps(row, default=str))
    dump.write_text(json.dumps(redact_config(plain), indent=1), encoding="utf-8")
    raise ContractViolation(
        f"update {step}: game {episode.facts['game_id']}, row {episode.key}, {field}: {problem}. Nothing was trained "
        f"on this batch; the row is in {dump}"
    )


def _dumped(episode: Episode, field: str, problem: str, step: int) -> dict[str, Any]:
    tensors = ("prompt_ids", "response_ids", "action_mask", "old_log_probs", "rollout_log_probs")
    return {
        "step": step,
        "field": field,
        "problem": problem,
        "row": episode.key,
        "reward": episode.reward,
        **{name: getattr(episode, name).tolist() for name in tensors},
        "facts": episode.facts,
    }
