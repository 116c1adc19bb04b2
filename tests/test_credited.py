"""From episodes and teacher scores to rows: who gets which advantage, and what the record says."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from verl.agentopsd.credit import CreditConfig, agentopsd_credit
from verl.agentopsd.credited import credit_episodes, evenly, shuffled
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


def dealt(rows: list[Episode], *seed: int) -> torch.Tensor:
    ids = torch.full((len(rows), max(len(row.response_ids) for row in rows)), -1)
    for one, row in zip(ids, rows, strict=True):
        one[: len(row.response_ids)] = row.turn_ids()
    return shuffled(rows, ids, seed)


LONG = [(start, start + 1) for start in range(0, 24, 2)]


def long_episode(key: str) -> Episode:
    return episode(key, LONG, 24)


def test_the_order_of_the_control_stays_within_the_turns_of_an_episode():
    """Three, two and one turn: what is behind an episode's last turn stays where it is."""
    for seed in range(20):
        order = dealt(ROWS, seed, 1).tolist()
        assert [sorted(order[0]), sorted(order[1][:2]), order[2][:1]] == [[0, 1, 2], [0, 1], [0]]
        assert [order[1][2:], order[2][1:]] == [[2], [1, 2]]


def test_every_order_of_the_control_is_equally_likely():
    """Three turns have six orders; 100 of 600 draws each, standard deviation 9."""
    seen = Counter(tuple(dealt(ROWS[:1], seed, 1)[0].tolist()) for seed in range(600))
    assert len(seen) == 6 and all(60 <= count <= 140 for count in seen.values())


def test_the_order_of_the_control_depends_on_seed_update_and_episode():
    one = long_episode("000001-0000_0_0")
    first = dealt([one], 0, 1)
    assert torch.equal(first, dealt([one], 0, 1))
    others = [
        dealt([one], 1, 1),  # another seed
        dealt([one], 0, 2),  # another update
        dealt([long_episode("000001-0000_1_0")], 0, 1),  # another sample of the game
        dealt([long_episode("000001-0001_0_0")], 0, 1),  # another game
    ]
    # of 12! orders: two that are equal by chance are not seen in a lifetime
    assert len({tuple(order[0].tolist()) for order in (first, *others)}) == 5


def test_the_order_of_the_control_is_the_same_in_every_process():
    """Python's own hash of a text differs from process to process."""

    class Text(str):
        __hash__ = None  # type: ignore[assignment]

    assert torch.equal(dealt([long_episode(Text("k"))], 0, 1), dealt([long_episode("k")], 0, 1))


def test_the_control_does_not_depend_on_the_other_rows_or_their_order():
    rows = [*ROWS, *(long_episode(f"000001-0001_{sample}_0") for sample in range(3))]
    together = {row.key: order for row, order in zip(rows, dealt(rows, 0, 1), strict=True)}
    for row, order in zip(rows[::-1], dealt(rows[::-1], 0, 1), strict=True):
        assert torch.equal(order, together[row.key])
    for row in rows:
        alone = dealt([row], 0, 1)[0]
        assert torch.equal(alone, together[row.key][: len(alone)])

    def advantages(rows: list[Episode]) -> dict[str, torch.Tensor]:
        teacher = {row.key: row.old_log_probs + torch.linspace(-1, 2, len(row.response_ids)) ** 2 for row in rows}
        each = [1.0] * len(rows)
        given = (rows, each, [0.5] * len(rows), teacher, METHODS["agentopsd"], CreditConfig())
        return {one.episode.key: one.token_advantages for one in credit_episodes(*given, shuffle_seed=[0, 1])[0]}

    forward, backward = advantages(rows), advantages(rows[::-1])
    assert forward.keys() == backward.keys()
    assert all(torch.equal(forward[key], backward[key]) for key in forward)
