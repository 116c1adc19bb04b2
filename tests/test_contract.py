"""Every rule of the batch contract refuses a row that breaks it and names game, row and field."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from verl.agentopsd.contract import ContractViolation, check_batch, check_teacher
from verl.agentopsd.episodes import Episode

MASK = torch.tensor([True, True, False, False, True, True])


def episode(group: int, sample: int) -> Episode:
    """Two turns of two tokens with two tokens of context between them, sampled with the weights of update 4."""
    old = torch.tensor([-1.0, -2.0, -9.0, -9.0, -0.5, -0.25])
    return Episode(
        key=f"000005-{group:04d}_{sample}_0",
        prompt_ids=torch.tensor([7, 8]),
        response_ids=torch.arange(6),
        action_mask=MASK.clone(),
        old_log_probs=old,
        rollout_log_probs=(old + 1e-5) * MASK,
        reward=1.0,
        facts={
            "game_id": f"train/game-{group}",
            "turns": [{"span": [0, 2]}, {"span": [4, 6]}],
            "min_global_steps": 4,
            "max_global_steps": 4,
        },
    )


def batch() -> list[Episode]:
    return [episode(group, sample) for group in range(2) for sample in range(3)]


def check(episodes: list[Episode], run_dir: Path) -> None:
    check_batch(episodes, step=5, games=2, group_size=3, max_logprob_gap=0.1, run_dir=run_dir)


def with_value(tensor: torch.Tensor, index: int, value: float) -> torch.Tensor:
    changed = tensor.clone()
    changed[index] = value
    return changed


@pytest.mark.parametrize(("gap", "refused"), [(0.09, False), (0.11, True)])
def test_a_sampler_with_other_weights_is_refused(gap: float, refused: bool, tmp_path: Path):
    """Mean over the batch's action tokens; half of the episodes differ by twice as much."""
    episodes = batch()
    for one in episodes[::2]:
        one.rollout_log_probs[one.action_mask] = one.old_log_probs[one.action_mask] - 2 * gap
    for one in episodes[1::2]:
        one.rollout_log_probs[one.action_mask] = one.old_log_probs[one.action_mask]
    if not refused:
        return check(episodes, tmp_path)
    with pytest.raises(ContractViolation, match=r"rollout_log_probs: the rollout engine's .* 0.11 nats .*gap=0.1"):
        check(episodes, tmp_path)


ONE = episode(1, 2)
FACTS = ONE.facts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": torch.tensor([])}, "prompt_ids: empty"),
        ({"response_ids": torch.tensor([])}, "response_ids: empty"),
        ({"action_mask": MASK[:5]}, "action_mask: 5 entries for 6 response tokens"),
        ({"action_mask": with_value(MASK, 2, True)}, "spans: spans and action_mask disagree at response token 2"),
        ({"action_mask": with_value(MASK, 5, False)}, "spans: spans and action_mask disagree at response token 5"),
        ({"old_log_probs": ONE.old_log_probs[:3]}, "old_log_probs: 3 entries for 6 response tokens"),
        ({"old_log_probs": with_value(ONE.old_log_probs, 4, torch.nan)}, "old_log_probs: action token 2 is not finite"),
        ({"rollout_log_probs": ONE.rollout_log_probs[:3]}, "logprobs: 3 entries for 6 response tokens"),
        ({"rollout_log_probs": with_value(ONE.rollout_log_probs, 0, -torch.inf)}, "logprobs: an entry is not finite"),
        (
            {"rollout_log_probs": with_value(ONE.rollout_log_probs, 3, -1.0)},
            "logprobs: context token 3 has a log-probability other than 0.0",
        ),
        ({"reward": float("nan")}, "reward: nan is not finite"),
        ({"reward": float("inf")}, "reward: inf is not finite"),
        (
            {"facts": FACTS | {"min_global_steps": 3}},
            "weights_version: sampled with the weights of update 3 to 4 instead of 4",
        ),
        ({"facts": FACTS | {"max_global_steps": 5}}, "weights_version: sampled with the weights of update 4 to 5"),
        ({"facts": FACTS | {"turns": [{"span": [4, 6]}, {"span": [0, 2]}]}}, "spans: turn 1 starts at 0, before 6"),
        ({"facts": FACTS | {"turns": [{"span": [0, 2]}, {"span": [4, 7]}]}}, "spans: turn 1 ends at 7, the response"),
        ({"facts": FACTS | {"game_id": "train/other"}}, "group: holds several games: train/game-1, train/other"),
        ({"key": "000005-0001_1_0"}, "group: has the samples [0, 1, 1] instead of 0 to 2"),
        ({"key": "000005-0002_2_0"}, "group: has the samples [0, 1] instead of 0 to 2"),
    ],
)
def test_a_broken_row_is_refused_with_game_row_and_field(tmp_path: Path, change: dict, message: str):
    episodes = batch()
    episodes[-1] = dataclasses.replace(ONE, **change)
    with pytest.raises(ContractViolation) as error:
        check(episodes, tmp_path)
    assert message in str(error.value)
    assert "update 5: game train/" in str(error.value) and ", row 000005-000" in str(error.value)
    dump = json.loads((tmp_path / "contract-violation.json").read_text())
    assert dump["row"] in str(error.value) and f", {dump['field']}: {dump['problem']}" in str(error.value)
    assert set(dump) >= {"prompt_ids", "response_ids", "action_mask", "old_log_probs", "facts", "step"}


def test_a_good_batch_passes_in_any_order_and_dumps_nothing(tmp_path: Path):
    check(batch(), tmp_path)
    check(batch()[::-1], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_episode_that_never_started_has_no_version_to_check(tmp_path: Path):
    facts = FACTS | {"turns": [], "min_global_steps": 5, "max_global_steps": 5}
    empty = {"action_mask": torch.zeros(6).bool(), "rollout_log_probs": torch.zeros(6), "facts": facts}
    check([*batch()[:-1], dataclasses.replace(ONE, **empty)], tmp_path)


def test_log_probs_copied_from_the_sampler_are_no_actor_s(tmp_path: Path):
    """I5: one episode may agree by chance, a whole batch does not."""
    copied = [dataclasses.replace(e, old_log_probs=e.rollout_log_probs) for e in batch()]
    check([*copied[:-1], ONE], tmp_path)
    with pytest.raises(ContractViolation, match="old_log_probs: every value equals the sampler's.*bypass_mode=false"):
        check(copied, tmp_path)


def test_a_missing_group_is_refused(tmp_path: Path):
    with pytest.raises(ContractViolation, match="group: one of 1 groups, the update has 2 games"):
        check(batch()[:3], tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(5), "teacher_log_probs: 5 entries for 6 response tokens"),
        (torch.tensor([0, 0, 0, 0, torch.nan, 0]), "teacher_log_probs: action token 2 is not finite"),
    ],
)
def test_the_teacher_s_answer_is_checked_too(tmp_path: Path, values: torch.Tensor, message: str):
    with pytest.raises(ContractViolation, match=message):
        check_teacher({ONE.key: ONE}, {ONE.key: values}, 5, tmp_path)
    dump = json.loads((tmp_path / "contract-violation.json").read_text())
    assert torch.equal(torch.tensor(dump["teacher_log_probs"]).nan_to_num(7), values.nan_to_num(7))
    check_teacher({ONE.key: ONE}, {ONE.key: torch.tensor([0, 0, torch.nan, 0, 0, 0])}, 5, tmp_path)
