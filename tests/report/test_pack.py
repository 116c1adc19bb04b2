"""Chunks and columns: what the browser gets is what the records say."""

from __future__ import annotations

import base64
import gzip
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.agentopsd.evaluation.records import EpisodeRecord, Turn
from verl.agentopsd.evaluation.run_metrics import RunMetrics
from verl.agentopsd.report import pack as packing
from verl.agentopsd.report.pack import Pack, block, metrics_data, number
from verl.agentopsd.report.tokens import TokenTexts


def opened(packed: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def made(place: int, **values: Any) -> EpisodeRecord:
    turns = [
        Turn("open box 1", "open box 1", True, True, "It is open.", 3, e=0.5, B=0.62, dB=0.12, w=1.1, gaps=[0.5, 0, 0]),
        Turn("<a>fly</a>", "fly", False, False, "Nothing happens.", 2, e=-3.0, B=0.1, dB=-0.52, w=0.8, gaps=[-3.0, 0]),
    ]
    record = EpisodeRecord(
        run="r", step=place // 10, phase="train", split="train", game_id=f"train/g{place}", task_type="t", seed=2**61,
        won=place % 2 == 0, num_turns=2, invalid=1, truncated=False, turns=turns, prior=0.5, advantage=-1.5,
    )  # fmt: skip
    return replace(record, **values)


def test_every_episode_is_in_exactly_one_chunk_in_the_order_of_the_table() -> None:
    pack, notes = Pack(), []
    pack.add_all((made(place) for place in range(150)), notes)
    assert not notes
    assert pack.sizes == [64, 64, 22] and len(pack.details) == len(pack.gaps) == 3
    table = pack.table()
    assert table["n"] == len(pack) == 150
    games = [table["texts"]["game_id"][code] for code in table["columns"]["game_id"]]
    assert games == [f"train/g{place}" for place in range(150)]
    assert [len(opened(chunk)) for chunk in pack.details] == [64, 64, 22]
    assert all(len(column) == 150 for column in table["columns"].values())
    assert sum(table["columns"]["won"]) == 75


def test_large_episodes_make_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "BYTES_PER_CHUNK", 1000)
    pack = Pack()
    pack.add_all([made(0), made(1), made(2), made(3)], [])
    size = len(json.dumps(opened(pack.details[0])[0], separators=(",", ":")))
    assert pack.sizes == [math.ceil(1000 / size)] * (4 // math.ceil(1000 / size))


def test_columns_hold_the_extremes_of_the_turns() -> None:
    pack = Pack()
    pack.add_all([made(0), made(1, turns=[], advantage=None)], [])
    columns = pack.table()["columns"]
    assert columns["dB"] == [-0.52, None]  # the largest movement, with its sign
    assert (columns["w_min"], columns["w_max"]) == ([0.8, None], [1.1, None])
    assert columns["advantage"] == [-1.5, None]


def test_a_turn_keeps_its_numbers_and_its_answer_where_it_differs_from_the_command() -> None:
    pack = Pack()
    pack.add_all([made(0)], [])
    first, second = opened(pack.details[0])[0]["turns"]
    assert (first["e"], first["B"], first["dB"], first["w"], first["tokens"]) == (0.5, 0.62, 0.12, 1.1, 3)
    assert "text" not in first and second["text"] == "<a>fly</a>" and second["command"] == "fly"
    assert (first["valid"], second["valid"], second["well_formed"]) == (1, 0, 0)
    assert opened(pack.details[0])[0]["seed"] == str(2**61)  # more than a JavaScript number holds
    assert opened(pack.gaps[0])[0] == [{"gaps": [0.5, 0, 0]}, {"gaps": [-3.0, 0]}]


def test_gaps_can_be_left_out() -> None:
    pack = Pack(token_gaps=False)
    pack.add_all([made(0)], [])
    assert pack.gaps == [""]
    assert [turn["gaps"] for turn in opened(pack.details[0])[0]["turns"]] == [0, 0], "no button for what is not there"


def test_numbers_that_are_not_finite_are_empty() -> None:
    bad = Turn("a", "a", True, True, "", 1, e=math.nan, B=math.inf, dB=-math.inf, w=1.0, gaps=[math.nan, 1.0])
    pack, notes = Pack(), []
    pack.add_all([made(0, turns=[bad], reward=math.nan)], notes)
    detail = opened(pack.details[0])[0]
    assert not notes and detail["reward"] is None and detail["turns"][0]["w"] == 1
    assert not {"e", "B", "dB"} & detail["turns"][0].keys()
    assert opened(pack.gaps[0])[0][0]["gaps"] == [None, 1.0]


def test_an_episode_of_the_wrong_kind_is_left_out_whole_and_named() -> None:
    pack, notes = Pack(), []
    pack.add_all([made(0), made(1, messages=["not a message"]), made(2, step="x"), made(3)], notes)
    assert len(pack) == 2 and {len(column) for column in pack.columns.values()} == {2}
    assert len(notes) == 1 and notes[0].startswith("2 episodes were left out") and "train/g1" in notes[0]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_keeps_six_digits(value: float) -> None:
    kept = number(value)
    assert kept is not None and math.isclose(kept, value, rel_tol=1e-5, abs_tol=1e-320)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1", True, [1]])
def test_what_is_not_a_finite_number_is_none(value: Any) -> None:
    assert number(value) is None


def test_a_block_has_no_character_that_html_reads_and_is_the_same_each_time() -> None:
    data = {"text": "</script><!-- {{ x }} \ud800 \x00 é"}
    packed = block(data)
    assert set(packed) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/=")
    assert opened(packed) == data and block(data) == packed


def test_metrics_become_columns_with_holes(tmp_path: Any) -> None:
    metrics = RunMetrics(tmp_path, {1: {"a": 0.5}, 3: {"a": 1.0, "b": 2.0}})
    assert metrics_data(metrics) == {"steps": [1, 3], "series": {"a": [0.5, 1], "b": [None, 2]}}
    assert metrics_data(None) == {"steps": [], "series": {}}


class WordTokenizer:
    """A token is a word with the space before it."""

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        at, offsets = 0, []
        for word in text.split(" "):
            offsets.append((max(at - 1, 0), at + len(word)))
            at += len(word) + 1
        return type("Encoding", (), {"offsets": offsets})


def test_tokens_have_texts_only_where_their_number_agrees() -> None:
    tokens = TokenTexts(WordTokenizer())
    assert tokens.split("open box 1", 3) == ["open", " box", " 1"]
    assert tokens.split("open box 1", 4) == ["open", " box", " 1", TokenTexts.END]  # the sampled end of turn
    assert tokens.split("open box 1", 2) is None and tokens.split("open box 1", 5) is None
    pack = Pack(tokens=tokens)
    pack.add_all([made(0)], [])
    assert opened(pack.gaps[0])[0][0] == {"gaps": [0.5, 0, 0], "texts": ["open", " box", " 1"]}
    assert opened(pack.gaps[0])[0][1]["texts"] == ["<a>fly</a>", TokenTexts.END]
