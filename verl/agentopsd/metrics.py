"""Step metrics of one update, from what the agent loop recorded and what the credit rule computed.

Every mean is a mean over trajectories: a quantity of turns or tokens is first averaged within its trajectory, so that a
lost episode of fifty turns weighs as much as a won one of five. Episodes lost to the environment (``env_error``) are
counted and otherwise left out. Functions return plain floats by their logged name and leave out what has no value.

``facts`` are the agent loop's ``extra_fields``, one mapping per episode; of these ``task_type, won, num_turns, invalid,
truncated, env_error, seconds, env_seconds, action_tokens`` are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl.agentopsd.credit import Credit, CreditConfig
from verl.agentopsd.evaluation.records import EpisodeRecord
from verl.agentopsd.evaluation.statistics import wilson

Facts = Mapping[str, Any]
SATURATED = 0.01
"""A belief this close to 0 or 1 is saturated: more evidence of the same sign moves it no further."""


def credit_metrics(credit: Credit, rule: CreditConfig, believes: bool = True) -> dict[str, float]:
    """``credit/``: size of the evidence, way of the belief, spread of the weights.

    Args:
        credit: of the rows that were scored; rows without turns are left out.
        rule: the constants it was computed with.
        believes: the rule has a belief; without one its metrics would be those of the prior.
    """
    turns = _array(credit.turn_mask).astype(bool)
    rows = turns.any(axis=1)
    if not rows.any():
        return {}
    turns = turns[rows]
    e, B, dB, w = (_array(x)[rows] for x in (credit.evidence, credit.belief, credit.delta, credit.weights))
    last = turns.sum(axis=1) - 1
    at_bound = (w <= 1 - rule.bound) | (w >= 1 + rule.bound)
    found = {
        "credit/evidence_mean": _mean_of_rows(e, turns),
        "credit/evidence_abs_mean": _mean_of_rows(np.abs(e), turns),
        "credit/delta_b_abs_mean": _mean_of_rows(np.abs(dB), turns),
        "credit/weight_mean": _mean_of_rows(w, turns),
        "credit/weight_min": float(w[turns].min()),
        "credit/weight_max": float(w[turns].max()),
        "credit/weight_clip_frac": _mean_of_rows(at_bound, turns),
        "credit/belief_first_mean": float(B[:, 0].mean()),
        "credit/belief_last_mean": float(B[np.arange(len(B)), last].mean()),
        "credit/saturated_frac": _mean_of_rows((B < SATURATED) | (B > 1 - SATURATED), turns),
        "credit/lambda": float(rule.lam),
    }
    of_belief = ("credit/delta_b", "credit/belief", "credit/saturated")
    return {name: value for name, value in found.items() if believes or not name.startswith(of_belief)}


def group_metrics(
    facts: Sequence[Facts],
    groups: Sequence[Any],
    advantages: Sequence[float],
    rewards: Sequence[float] | None = None,
) -> dict[str, float]:
    """``group/``: success (also per task type), groups without a learning signal, reward.

    Args:
        groups: the group of each episode.
        advantages: A of each episode. A group whose valid episodes all have 0 is a zero-advantage group; it is
            ``all_success`` when all of them won, ``all_fail`` when none did. Shares are of groups with a valid one.
        rewards: trajectory reward of each episode.
    """
    _same_length(facts=facts, groups=groups, advantages=advantages, rewards=rewards)
    valid = [i for i, fact in enumerate(facts) if not fact["env_error"]]
    if not valid:
        return {}
    won = {i: float(bool(facts[i]["won"])) for i in valid}
    metrics = {"group/success_rate": float(np.mean(list(won.values())))}
    by_type: dict[str, list[float]] = defaultdict(list)
    members: dict[Any, list[int]] = defaultdict(list)
    for i in valid:
        by_type[facts[i]["task_type"]].append(won[i])
        members[groups[i]].append(i)
    for task_type in sorted(by_type):
        metrics[f"group/success_rate/{task_type}"] = float(np.mean(by_type[task_type]))
    zero = [group for group, own in members.items() if all(advantages[i] == 0 for i in own)]
    metrics["group/zero_adv_frac"] = len(zero) / len(members)
    metrics["group/zero_adv_frac_all_success"] = sum(all(won[i] for i in members[g]) for g in zero) / len(members)
    metrics["group/zero_adv_frac_all_fail"] = sum(not any(won[i] for i in members[g]) for g in zero) / len(members)
    if rewards is not None:
        metrics["group/reward_mean"] = float(np.mean([rewards[i] for i in valid]))
        metrics["group/reward_std"] = float(np.std([rewards[i] for i in valid]))
    return metrics


def teacher_metrics(
    gaps: Sequence[ArrayLike],
    *,
    rows_skipped: int,
    tokens: int,
    skill_fallbacks: int,
    seconds: float,
    without_text: int | None = None,
) -> dict[str, float]:
    """``teacher/``: how much the teacher changes the log-probs of the sampled tokens, and what scoring cost.

    Args:
        gaps: per scored row its action tokens' gaps in nats.
        rows_skipped: rows that were not scored: A is 0 and the method needs no more, or the environment lost them.
        tokens: tokens of the scored rows, prompt included.
        skill_fallbacks: rows of this update that were scored with the general skill for want of their own.
        seconds: wall time of the scoring.
        without_text: rows without a won sibling, or whose commands do not fit (``privilege=hindsight`` only).
    """
    rows = [row for row in map(_array, gaps) if row.size]
    metrics = {
        "teacher/rows_scored": float(len(gaps)),
        "teacher/rows_skipped": float(rows_skipped),
        "teacher/tokens": float(tokens),
        "teacher/skill_fallbacks": float(skill_fallbacks),
        "teacher/seconds": float(seconds),
    }
    if without_text is not None:
        metrics["teacher/without_hindsight"] = float(without_text)
    if rows:
        metrics["teacher/gap_mean"] = float(np.mean([row.mean() for row in rows]))
        metrics["teacher/gap_abs_mean"] = float(np.mean([np.abs(row).mean() for row in rows]))
    return metrics


def env_metrics(facts: Sequence[Facts]) -> dict[str, float]:
    """``env/``: turns, share of invalid actions, episodes cut by a limit, environment failures, seconds in the game."""
    valid = [fact for fact in facts if not fact["env_error"]]
    metrics = {"env/errors": float(len(facts) - len(valid))}
    if valid:
        metrics["env/turns_mean"] = float(np.mean([fact["num_turns"] for fact in valid]))
        metrics["env/invalid_frac"] = float(np.mean([fact["invalid"] / max(fact["num_turns"], 1) for fact in valid]))
        metrics["env/truncated_frac"] = float(np.mean([bool(fact["truncated"]) for fact in valid]))
        metrics["env/seconds"] = float(np.mean([fact["env_seconds"] for fact in valid]))
    return metrics


def rollout_metrics(
    facts: Sequence[Facts],
    rollout_logprobs: Sequence[ArrayLike],
    actor_logprobs: Sequence[ArrayLike],
    seconds: float | None = None,
) -> dict[str, float]:
    """``rollout/``: distance between sampler and actor on action tokens, speed, how long the slowest episode took, and
    the share of the requests' tokens that the server had in its prefix cache (0 where it does not say).

    Args:
        rollout_logprobs, actor_logprobs: per episode its action tokens' log-probs in nats, same tokens in both.
        seconds: wall time of the whole rollout; the slowest episode's if ``None``, as all start together.
    """
    _same_length(facts=facts, rollout_logprobs=rollout_logprobs, actor_logprobs=actor_logprobs)
    metrics: dict[str, float] = {}
    pairs = [(_array(a), _array(b)) for a, b in zip(rollout_logprobs, actor_logprobs, strict=True)]
    distances = [np.abs(a - b) for a, b in pairs if a.size]
    if distances:
        metrics["rollout/logprob_gap_abs_mean"] = float(np.mean([row.mean() for row in distances]))
        metrics["rollout/logprob_gap_abs_max"] = float(max(row.max() for row in distances))
    took = [fact["seconds"] for fact in facts]
    if took and max(took) > 0:
        metrics["rollout/tokens_per_second"] = sum(fact["action_tokens"] for fact in facts) / (seconds or max(took))
        metrics["rollout/straggler_ratio"] = float(max(took) / np.mean(took))
    if requested := sum(fact["request_tokens"] for fact in facts):
        metrics["rollout/prefix_cache_hit_frac"] = sum(fact["cached_tokens"] for fact in facts) / requested
    return metrics


def engine_metrics(old_log_probs: Sequence[ArrayLike], action_masks: Sequence[ArrayLike]) -> dict[str, float]:
    """``actor/unread_log_prob_frac``: the share of the tokens that nobody sampled (observations) for which the engine
    computed log-probs all the same; 0 with ``agentopsd.action_logits``, 1 without.

    Args:
        old_log_probs, action_masks: (T,) per episode.
    """
    _same_length(old_log_probs=old_log_probs, action_masks=action_masks)
    others = [_array(row)[_array(mask) == 0] for row, mask in zip(old_log_probs, action_masks, strict=True)]
    tokens = sum(map(len, others))
    return {"actor/unread_log_prob_frac": sum(int(np.count_nonzero(row)) for row in others) / tokens} if tokens else {}


def validation_metrics(records: Iterable[EpisodeRecord]) -> dict[str, float]:
    """``val/``: success over episodes with Wilson's 95 % interval, also per task type, and behaviour."""
    records = list(records)
    valid = [record for record in records if not record.env_error]
    metrics = {"val/episodes": float(len(valid)), "val/errors": float(len(records) - len(valid))}
    if not valid:
        return metrics
    estimate = wilson(sum(record.won for record in valid), len(valid))
    metrics["val/success_rate"] = estimate.value
    metrics["val/success_low"] = estimate.low
    metrics["val/success_high"] = estimate.high
    by_type: dict[str, list[bool]] = defaultdict(list)
    for record in valid:
        by_type[record.task_type].append(record.won)
    for task_type in sorted(by_type):
        metrics[f"val/success_rate/{task_type}"] = float(np.mean(by_type[task_type]))
    metrics["val/turns_mean"] = float(np.mean([record.num_turns for record in valid]))
    metrics["val/invalid_frac"] = float(np.mean([record.invalid / max(record.num_turns, 1) for record in valid]))
    metrics["val/truncated_frac"] = float(np.mean([record.truncated for record in valid]))
    return metrics


def _array(values: Any) -> NDArray[Any]:
    """NumPy view of an array, a list or a tensor on any device; floats become float64."""
    values = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    return values.astype(np.float64) if values.dtype.kind == "f" else values


def _mean_of_rows(values: NDArray[Any], turns: NDArray[np.bool_]) -> float:
    """Mean over rows of each row's mean over its turns; every row has one."""
    return float(((values * turns).sum(axis=1) / turns.sum(axis=1)).mean())


def _same_length(**columns: Sequence[Any] | None) -> None:
    lengths = {name: len(column) for name, column in columns.items() if column is not None}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"one entry per episode is needed, got {lengths}")
