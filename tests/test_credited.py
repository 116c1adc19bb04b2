"""From episodes and teacher scores to rows: who gets which advantage, and what the record says."""

from __future__ import annotations

import pytest
import torch

from verl.agentopsd.credit import CreditConfig, agentopsd_credit
from verl.agentopsd.credited import credit_episodes, evenly
from verl.agentopsd.episodes import Episode
from verl.agentopsd.methods import METHODS


def episode(key: str, spans: list[tuple[int, int]], length: int, **facts) -> Episode:
    mask = torch.zeros(length, dtype=torch.bool)
    for start, end in spans:
        mask[start:end] = True
    turns = [
        {
            "text": f"t{index}",
            "command": f"c{index}",
            "well_formed": True,
            "valid": True,
            "observation": "o",
            "span": list(span),
            "logprob_sum": -1.0,
        }
        for index, span in enumerate(spans)
    ]
    recorded = {
        "game_id": "train/g",
        "split": "train",
        "task_type": "find",
        "seed": 1,
        "messages": [],
        "turns": turns,
        "won": True,
        "num_turns": len(turns),
        "invalid": 0,
        "truncated": False,
        "truncated_by": "",
        "env_error": "",
        "seconds": 1.0,
        "env_seconds": 0.1,
        "gen_seconds": 0.9,
        "prompt_tokens": 2,
        "action_tokens": int(mask.sum()),
        "response_tokens": length,
        "request_tokens": 4 * length,
        "cached_tokens": length,
        "max_global_steps": 0,
        **facts,
    }
    student = torch.linspace(-1, -0.1, length)
    return Episode(key, torch.tensor([1, 2]), torch.arange(length), mask, student, student, 1.0, recorded)


ROWS = [
    episode("000001-0000_0_0", [(0, 2), (4, 5), (7, 9)], 9),
    episode("000001-0000_1_0", [(0, 1), (3, 4)], 5),
    episode("000001-0000_2_0", [(1, 3)], 3),
]


def test_only_scored_episodes_are_re_weighted():
    scores = {ROWS[0].key: ROWS[0].old_log_probs + torch.tensor([0.5, 0.1, 9, 9, -0.7, 9, 9, 0.2, 0.2])}
    credited, credit = credit_episodes(ROWS, [1.2, -0.7, 0.0], [0.5] * 3, scores, METHODS["agentopsd"], CreditConfig())
    assert credit is not None and credit.weights.shape == (1, 3)
    by_hand = agentopsd_credit(
        torch.tensor([1.2]),
        torch.tensor([[0.6, -0.7, 0.4]]),
        torch.arange(3)[None],
        torch.tensor([0.5]),
        CreditConfig(),
    ).advantages[0]
    expected = torch.zeros(9)
    for (start, end), value in zip([(0, 2), (4, 5), (7, 9)], by_hand, strict=True):
        expected[start:end] = value
    assert torch.allclose(credited[0].token_advantages, expected, atol=1e-6)
    # a gap off the action mask (the 9s above) is no evidence, and unscored rows keep their base advantage
    assert torch.equal(credited[1].token_advantages, torch.tensor([-0.7, 0, 0, -0.7, 0]))
    assert torch.equal(credited[2].token_advantages, torch.zeros(3))
    assert credited[1].credit is None and credited[2].teacher_log_probs is None


def test_a_run_without_the_method_spreads_the_base_advantage():
    credited, credit = credit_episodes(ROWS, [1.0, -1.0, 0.0], [0.5] * 3, {}, METHODS["agentopsd"], CreditConfig())
    assert credit is None
    assert torch.equal(credited[0].token_advantages, evenly(ROWS[0], 1.0))
    assert credited[0].token_advantages.unique().tolist() == [0.0, 1.0]


def test_the_record_carries_the_credit_of_its_turns():
    scores = {ROWS[0].key: ROWS[0].old_log_probs + 0.25, ROWS[1].key: ROWS[1].old_log_probs - 0.5}
    credited, credit = credit_episodes(
        ROWS, [1.2, -0.7, 0.0], [0.5, 0.5, 0.5], scores, METHODS["agentopsd"], CreditConfig()
    )
    assert credit is not None
    record = credited[1].record(run="r", step=3)
    assert (record.run, record.step, record.sample, record.group) == ("r", 3, 1, "000001-0000")
    assert [turn.e for turn in record.turns] == pytest.approx([-0.5, -0.5])
    assert [turn.w for turn in record.turns] == pytest.approx(credit.weights[1, :2].tolist())
    assert record.prior == 0.5 and record.advantage == pytest.approx(-0.7)
    assert [len(turn.gaps or []) for turn in record.turns] == [1, 1]
    plain = credited[2].record(run="r", step=3)
    assert plain.turns[0].e is None and plain.prior is None


def test_turns_that_do_not_cover_the_mask_are_an_error():
    broken = episode("000001-0000_0_0", [(0, 2)], 4)
    broken.action_mask[3] = True
    with pytest.raises(ValueError, match="train/g: the turns of episode 000001-0000_0_0 do not cover its action mask"):
        broken.turn_ids()


@pytest.mark.parametrize("granularity", ["turn", "token"])
@pytest.mark.parametrize("evidence", ["raw", "clip", "centered", "zscore", "token_mean"])
def test_the_control_deals_an_episode_its_own_evidence(granularity: str, evidence: str):
    """Shuffled or not, an episode has the same transformed evidence, in another order."""
    teacher = {row.key: row.old_log_probs + torch.linspace(0.1, 2, len(row.response_ids)) for row in ROWS}
    rule = CreditConfig(granularity=granularity, evidence=evidence)
    given = (ROWS, [1.0, -1.0, 0.5], [0.5] * 3, teacher, METHODS["agentopsd"], rule)
    _, straight = credit_episodes(*given)
    found = [credit_episodes(*given, shuffle_seed=[seed, 1])[1] for seed in range(4)]
    for dealt in found:
        assert torch.equal(dealt.evidence.sort(-1).values, straight.evidence.sort(-1).values)
        assert torch.equal(dealt.turn_mask, straight.turn_mask)
    assert any(not torch.equal(dealt.evidence, straight.evidence) for dealt in found)
