"""Record files: nothing written is lost, nothing wrong is written, a half-written file is continued."""

import json
import logging
import math
import os
from dataclasses import replace

import pytest
import torch

from verl.agentopsd.credit import CreditConfig, agentopsd_credit
from verl.agentopsd.evaluation.records import (
    EpisodeRecord,
    RecordError,
    RecordWriter,
    Summary,
    Turn,
    episode_record,
    read_records,
    turn_credits,
)


def record(game: str = "valid_seen/heat-1/trial", **changes) -> EpisodeRecord:
    turn = Turn("<action>look</action>", "look", True, True, "You see a “mug”.\n", 5, -1.5, gaps=[0.1, -0.2])
    base = EpisodeRecord(
        run="run",
        step=4,
        phase="evaluation",
        split="valid_seen",
        game_id=game,
        task_type="heat",
        seed=7,
        won=True,
        num_turns=1,
        invalid=0,
        truncated=False,
        messages=[{"role": "user", "content": "Your task is to: heat a mug\n"}],
        turns=[turn, replace(turn, e=0.25, B=0.5, dB=0.1, w=1.2, advantage=-0.3, gaps=None)],
        weights_version=4,
    )
    return replace(base, **changes)


def summary(**changes) -> Summary:
    base = Summary(
        "run", "model", 4, "valid_seen", "0123", 2, 1, False, {"temperature": 0.0}, {"success": {"rate": 0.5}}
    )
    return replace(base, **changes)


def test_a_record_survives_the_way_through_json() -> None:
    assert EpisodeRecord.from_json(record().to_json()) == record()
    assert "\n" not in record().to_json()
    assert json.loads(record().to_json())["kind"] == "episode" and json.loads(record().to_json())["schema"] == 1


def test_a_file_survives_the_way_through_disk(tmp_path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    with RecordWriter(path) as writer:
        writer.write(record("a"))
        writer.write(record("b", won=False))
        writer.write_summary(summary())
    file = read_records(path)
    assert file.episodes == [record("a"), record("b", won=False)] == list(file)
    assert file.summary == summary() and len(file) == 2


def test_every_line_is_in_the_file_as_soon_as_it_is_written(tmp_path) -> None:
    writer = RecordWriter(tmp_path / "r.jsonl")
    writer.write(record("a"))
    assert [r.game_id for r in read_records(tmp_path / "r.jsonl")] == ["a"]
    writer.close()


def test_a_closed_file_and_its_name_are_on_disk(tmp_path, monkeypatch) -> None:
    path, synced = tmp_path / "a.jsonl", []
    monkeypatch.setattr(
        os, "fsync", lambda number: synced.append((os.readlink(f"/proc/self/fd/{number}"), path.stat()))
    )
    with RecordWriter(path) as writer:
        writer.write(record())
    assert [name for name, _ in synced] == [str(path), str(tmp_path)]
    assert synced[0][1].st_size == path.stat().st_size > 0
    writer.close()
    assert len(synced) == 2


def test_an_existing_file_is_not_touched_without_a_flag(tmp_path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("precious")
    with pytest.raises(RecordError, match="exists.*--resume.*--overwrite"):
        RecordWriter(path)
    with pytest.raises(RecordError, match="exclude each other"):
        RecordWriter(path, overwrite=True, resume=True)
    assert path.read_text() == "precious"
    with RecordWriter(path, overwrite=True) as writer:
        writer.write(record("a"))
    assert len(read_records(path)) == 1


def test_resume_continues_after_a_torn_line_and_keeps_it_aside(tmp_path, caplog) -> None:
    path = tmp_path / "r.jsonl"
    torn = record("c").to_json()[:200]
    path.write_text(record("a").to_json() + "\n" + record("b", sample=1).to_json() + "\n" + torn, encoding="utf-8")
    with caplog.at_level(logging.WARNING), RecordWriter(path, resume=True) as writer:
        assert writer.done == {(4, "a", 0), (4, "b", 1)}
        writer.write(record("c"))
    assert "moved to" in caplog.text
    assert [r.game_id for r in read_records(path)] == ["a", "b", "c"]
    assert (tmp_path / "r.jsonl.torn").read_text(encoding="utf-8") == torn + "\n"


@pytest.mark.parametrize("size", [65535, 65536, 65537, 200_000])
def test_a_torn_line_longer_than_a_block_is_found_whole(tmp_path, size: int) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(record("a").to_json() + "\n" + "x" * size)
    with RecordWriter(path, resume=True) as writer:
        writer.write(record("b"))
    assert [r.game_id for r in read_records(path)] == ["a", "b"]
    assert (tmp_path / "r.jsonl.torn").read_text() == "x" * size + "\n"


def test_resume_of_a_file_that_is_one_torn_line_or_missing(tmp_path) -> None:
    (tmp_path / "torn.jsonl").write_text('{"kind":')
    for name in ("torn.jsonl", "missing.jsonl"):
        with RecordWriter(tmp_path / name, resume=True) as writer:
            assert writer.done == set()
            writer.write(record("a"))
        assert len(read_records(tmp_path / name)) == 1


def test_a_last_line_that_lacks_only_its_line_break_counts(tmp_path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(record("a").to_json(), encoding="utf-8")
    assert len(read_records(path)) == 1
    with RecordWriter(path, resume=True) as writer:
        writer.write(record("b"))
    assert [r.game_id for r in read_records(path)] == ["a", "b"]


def test_a_torn_tail_is_read_with_a_warning(tmp_path, caplog) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(record("a").to_json() + "\n" + record("b").to_json()[:-3], encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        assert [r.game_id for r in read_records(path)] == ["a"]
    assert "r.jsonl:2" in caplog.text and "torn" in caplog.text


def test_a_finished_file_takes_no_more_lines(tmp_path) -> None:
    path = tmp_path / "r.jsonl"
    with RecordWriter(path) as writer:
        writer.write(record("a"))
        writer.write_summary(summary())
    with RecordWriter(path, resume=True) as writer:
        assert writer.summary == summary()
        with pytest.raises(RecordError, match="is finished"):
            writer.write(record("b"))


def test_two_writers_cannot_share_a_file(tmp_path) -> None:
    path = tmp_path / "r.jsonl"
    with RecordWriter(path) as writer:
        writer.write(record("a"))
        with pytest.raises(RecordError, match="another process"):
            RecordWriter(path, overwrite=True)
    assert len(read_records(path)) == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{broken}", None], ":1: not JSON"),
        (["[1]", None], ":1: not a JSON object"),
        ([None, '{"kind":"episode","schema":2}'], ":2: schema 2"),
        ([None, '{"kind":"sonnet","schema":1}'], ":2: kind 'sonnet'"),
        ([None, '{"kind":"episode","schema":1,"run":"r"}'], ":2: field .*game_id.* is missing"),
        ([None, json.dumps({**json.loads(record().to_json()), "extra": 1})], ":2: unknown field extra"),
        ([summary().to_json(), summary().to_json()], ":2: a second summary"),
        ([summary().to_json(), None], ":2: an episode after the summary"),
    ],
)
def test_a_wrong_line_is_named_with_its_file_and_number(tmp_path, lines, message) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("".join((line or record().to_json()) + "\n" for line in lines), encoding="utf-8")
    with pytest.raises(RecordError, match=r"r\.jsonl" + message):
        read_records(path)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(RecordError, match="nowhere.jsonl: no such record file"):
        read_records(tmp_path / "nowhere.jsonl")


def test_a_number_that_is_not_finite_is_refused_before_it_is_written(tmp_path) -> None:
    with RecordWriter(tmp_path / "r.jsonl") as writer:
        writer.write(record("a"))
        with pytest.raises(RecordError, match="'b' holds a number that is not finite"):
            writer.write(record("b", reward=math.nan))
    assert len(read_records(tmp_path / "r.jsonl")) == 1


def facts(turns: int = 2, tokens: int = 3) -> dict:
    return {
        "game_id": "valid_seen/heat-1/trial",
        "split": "valid_seen",
        "task_type": "heat",
        "seed": 7,
        "messages": [{"role": "user", "content": "hi"}],
        "turns": [
            {
                "text": f"t{k}",
                "command": f"c{k}",
                "well_formed": True,
                "valid": k > 0,
                "observation": "o",
                "span": [k * 10, k * 10 + tokens],
                "logprob_sum": -1.0 * k,
            }
            for k in range(turns)
        ],
        "won": True,
        "num_turns": turns,
        "invalid": 1,
        "truncated": False,
        "truncated_by": "",
        "env_error": "",
        "seconds": 1.0,
        "env_seconds": 0.25,
        "gen_seconds": 0.5,
        "prompt_tokens": 11,
        "action_tokens": turns * tokens,
        "response_tokens": 40,
        "min_global_steps": 3,
        "max_global_steps": 3,
        "reward_extra_info": {"won": 1.0},
    }


def test_an_episode_that_was_not_scored_has_no_credit() -> None:
    built = episode_record(facts(), run="r", step=4, reward=10, advantage=0.0, success_rate=1.0, sample=5, group="g")
    assert [turn.tokens for turn in built.turns] == [3, 3]
    assert [turn.rollout_logprob_sum for turn in built.turns] == [0.0, -1.0]
    assert all(turn.e is turn.w is turn.advantage is turn.gaps is turn.logprob_sum is None for turn in built.turns)
    assert (built.advantage, built.success_rate, built.prior, built.weights_version) == (0.0, 1.0, None, 3)
    assert built.key == (4, "valid_seen/heat-1/trial", 5)
    assert EpisodeRecord.from_json(built.to_json()) == built


@pytest.mark.parametrize("granularity", ["turn", "token"])
def test_a_scored_episode_carries_its_credit_per_turn(granularity: str) -> None:
    ids = torch.tensor([-1, 0, 0, -1, 1, 1, 1, -1])
    student = torch.tensor([9.0, -1.0, -2.0, 9.0, -0.5, -0.5, -1.0, 9.0])
    teacher = torch.tensor([9.0, -0.5, -1.0, 9.0, -1.0, -0.5, -1.0, 9.0])
    credit = agentopsd_credit(
        torch.tensor([1.5]),
        (teacher - student)[None],
        ids[None],
        torch.tensor([0.5]),
        CreditConfig(granularity=granularity),
    )
    row = {name: getattr(credit, name)[0] for name in ("evidence", "belief", "delta", "weights")}
    first, second = turn_credits(ids, student, teacher, credit.advantages[0], row)
    assert (first.logprob_sum, first.teacher_logprob_sum, first.e) == (-3.0, -1.5, 1.5)
    assert (second.logprob_sum, second.teacher_logprob_sum, second.e) == (-2.0, -2.5, -0.5)
    assert first.gaps == [0.5, 1.0] and second.gaps == [-0.5, 0.0, 0.0]
    at = (0, 1) if granularity == "turn" else (1, 4)
    assert [first.B, second.B] == credit.belief[0, list(at)].tolist()
    assert first.dB + second.dB == pytest.approx(second.B - 0.5)
    assert first.w > 1 > second.w
    assert first.advantage == pytest.approx(1.5 * (0.5 + 0.5 * first.w), rel=1e-6)
    built = episode_record(facts(), run="r", step=4, credits=[first, second])
    assert EpisodeRecord.from_json(built.to_json()) == built
    assert built.turns[1].w == second.w and built.turns[0].gaps == [0.5, 1.0]


def test_gaps_are_left_out_on_request() -> None:
    ids, zeros = torch.tensor([0, 0]), torch.zeros(2)
    row = {name: torch.ones(1) for name in ("evidence", "belief", "delta", "weights")}
    assert turn_credits(ids, zeros, zeros, zeros, row, keep_gaps=False)[0].gaps is None


def test_facts_and_credits_that_do_not_fit_are_refused() -> None:
    incomplete = facts()
    del incomplete["won"]
    with pytest.raises(RecordError, match="lack 'won'"):
        episode_record(incomplete, run="r", step=1)
    with pytest.raises(RecordError, match="0 credits for 2 turns"):
        episode_record(facts(), run="r", step=1, credits=[])
    row = {name: torch.ones(3) for name in ("evidence", "belief", "delta", "weights")}
    with pytest.raises(RecordError, match="has 3 entries"):
        turn_credits(torch.tensor([0, 0, 1, 1]), torch.zeros(4), torch.zeros(4), torch.zeros(4), row)
