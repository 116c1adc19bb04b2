import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.agentopsd.rollout.ledger import RowError, TokenLedger, check_row

ids = st.lists(st.integers(0, 200_000), min_size=1, max_size=6)
segments = st.lists(st.one_of(st.tuples(st.just("context"), ids), st.tuples(st.just("action"), ids)), max_size=20)


@given(ids, segments)
def test_the_three_rules_hold_for_any_order_of_segments(prompt, parts):
    ledger = TokenLedger(prompt)
    spans = []
    for number, (kind, part) in enumerate(parts):
        if kind == "action":
            spans.append(ledger.append_action(part, [-0.5 - number] * len(part)))
        else:
            ledger.append_context(part)
    row = ledger.freeze()

    assert list(row.prompt_ids) == prompt
    assert list(row.response_ids) == [token for _, part in parts for token in part]
    assert [row.response_ids[start:end] for start, end in row.spans] == [
        tuple(part) for kind, part in parts if kind == "action"
    ]
    assert list(row.spans) == spans
    assert list(row.action_mask) == [int(kind == "action") for kind, part in parts for _ in part]
    expected = [-0.5 - n if kind == "action" else 0.0 for n, (kind, part) in enumerate(parts) for _ in part]
    assert list(row.logprobs) == expected
    assert ledger.all_ids == prompt + list(row.response_ids)
    if parts:
        check_row(row.prompt_ids, row.response_ids, row.action_mask, row.spans, row.logprobs, game_id="g")


def test_without_logprobs():
    ledger = TokenLedger([1])
    ledger.append_action([2], None)
    assert ledger.freeze().logprobs is None
    with pytest.raises(ValueError, match="all turns"):
        ledger.append_action([2], [-1.0])


def test_bad_actions_are_refused():
    ledger = TokenLedger([1])
    with pytest.raises(ValueError, match="at least one token"):
        ledger.append_action([], [])
    with pytest.raises(ValueError, match="2 sampled tokens came with 1"):
        ledger.append_action([2, 3], [-1.0])
    with pytest.raises(ValueError, match="not finite"):
        ledger.append_action([2], [float("nan")])
    assert ledger.response_ids == ()
    with pytest.raises(ValueError, match="prompt"):
        TokenLedger([])


def test_what_was_handed_out_cannot_change():
    prompt = [1]
    ledger = TokenLedger(prompt)
    ledger.append_action([2], [-1.0])
    row = ledger.freeze()
    prompt.append(9)
    ledger.all_ids.append(9)
    ledger.append_context([3])
    assert row.response_ids == (2,) and ledger.all_ids == [1, 2, 3]
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.spans = ()


GOOD = {
    "prompt_ids": [1, 2],
    "response_ids": [3, 4, 5, 6],
    "action_mask": [1, 1, 0, 1],
    "spans": [(0, 2), (3, 4)],
    "logprobs": [-1.0, -2.0, 0.0, -3.0],
}


def test_a_good_row_passes():
    check_row(**GOOD, game_id="g")
    check_row(**(GOOD | {"logprobs": None}), game_id="g")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": []}, "prompt_ids: empty"),
        ({"response_ids": [], "action_mask": [], "spans": [], "logprobs": []}, "response_ids: empty"),
        ({"action_mask": [1, 1, 0]}, "action_mask: 3 entries for 4"),
        ({"action_mask": [1, 1, 2, 1]}, "neither 0 nor 1"),
        ({"action_mask": [1, 1, 1, 1]}, "spans: spans and action_mask disagree at response token 2"),
        ({"spans": [(0, 2)]}, "disagree at response token 3"),
        ({"spans": [(0, 2), (1, 2), (3, 4)]}, "turn 1 starts at 1, before 2"),
        ({"spans": [(3, 4), (0, 2)]}, "turn 1 starts at 0"),
        ({"spans": [(0, 2), (2, 2), (3, 4)]}, "turn 1 has the empty span"),
        ({"spans": [(0, 2), (3, 5)]}, "turn 1 ends at 5, the response has 4"),
        ({"spans": [(-2, 2), (3, 4)]}, "turn 0 starts at -2"),
        ({"logprobs": [-1.0]}, "logprobs: 1 entries"),
        ({"logprobs": [-1.0, float("nan"), 0.0, -3.0]}, "not finite"),
        ({"logprobs": [-1.0, -2.0, -0.1, -3.0]}, "context token 2"),
    ],
)
def test_a_bad_row_is_refused_with_game_and_field(change, message):
    with pytest.raises(RowError, match="game valid_unseen/g: .*" + message.replace("(", r"\(")):
        check_row(**(GOOD | change), game_id="valid_unseen/g")
