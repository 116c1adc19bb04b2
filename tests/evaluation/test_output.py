"""An evaluation's file: nothing lost, nothing mixed, in order at the end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from verl.agentopsd.evaluation.output import Output, OutputError, check_free, outcome_hash, with_outcome_hash
from verl.agentopsd.evaluation.records import EpisodeRecord, RecordError, Turn, read_records
from verl.agentopsd.evaluation.summary import finished

PANEL = ["s/1", "s/2", "s/3"]
SETTINGS = {"model": "m", "panel hash": "ab", "temperature": 0}


def episode(game: str, sample: int = 0, **changes) -> EpisodeRecord:
    turn = Turn("go", "go", True, True, "there", 2)
    base = EpisodeRecord(
        "m", 0, "evaluation", "s", game, "heat", 0, True, 1, 0, False, turns=[turn], sample=sample, seconds=1.0
    )
    return replace(base, **changes)


def opened(path: Path, settings: dict = SETTINGS, samples: int = 1, **flags: bool) -> Output:
    return Output(path, settings, PANEL, samples, **flags)


def close(output: Output) -> None:
    episodes = output.episodes()
    output.finish(episodes, finished(episodes, model="m", panel="p", panel_hash="ab", sampling={}))


def test_episodes_may_end_in_any_order(tmp_path: Path):
    output = opened(tmp_path / "a.jsonl", samples=2)
    for game, sample in (("s/3", 0), ("s/1", 1), ("s/2", 0), ("s/3", 1), ("s/1", 0)):
        output.write(episode(game, sample))
    assert output.missing == [("s/2", 1)]
    with pytest.raises(OutputError, match="1 episodes are missing, the first of s/2"):
        close(output)
    output.write(episode("s/2", 1))
    output.write(episode("s/2", 1))
    close(output)
    output.pause(1)
    file = read_records(tmp_path / "a.jsonl")
    assert [(e.game_id, e.sample) for e in file] == [(game, sample) for game in PANEL for sample in (0, 1)]
    assert file.summary is not None and [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_an_interrupted_file_is_continued_with_the_same_settings_only(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    output = opened(path)
    output.write(episode("s/2"))
    output.pause(2.5)
    with path.open("a") as file:
        file.write('{"kind": "episode", "ga')  # killed while it wrote
    for other, message in (
        ({**SETTINGS, "temperature": 0.4}, r"temperature 0, now 0\.4\. Use another --out"),
        ({**SETTINGS, "model": "n", "panel hash": "cd"}, "model 'm', now 'n'; panel hash 'ab', now 'cd'"),
        ({**SETTINGS, "new": 1}, "new None, now 1"),
    ):
        with pytest.raises(OutputError, match=message):
            opened(path, other, resume=True)
    again = opened(path, resume=True)
    assert again.missing == [("s/1", 0), ("s/3", 0)] and again.wall_seconds == 2.5
    again.pause(1)
    assert opened(path, resume=True).wall_seconds == 3.5


def test_a_file_without_its_settings_is_not_guessed_at(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    output = opened(path)
    output.write(episode("s/2"))
    output.pause(1)
    (output.work_dir / "settings.json").unlink()
    with pytest.raises(OutputError, match="which says what was being evaluated, cannot be read"):
        opened(path, resume=True)
    assert len(opened(path, overwrite=True).missing) == 3


def test_a_finished_file_of_another_evaluation_is_refused(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    output = opened(path)
    for game in PANEL:
        output.write(episode(game))
    episodes = output.episodes()
    summary = finished(episodes, model="m", panel="p", panel_hash="ab", sampling={})
    output.finish(episodes, replace(summary, results={**summary.results, "settings": output.settings}))
    output.pause(1)
    assert opened(path, resume=True).summary is not None
    with pytest.raises(OutputError, match="model 'm', now 'n'"):
        opened(path, {**SETTINGS, "model": "n"}, resume=True)


def test_two_writers_are_refused(tmp_path: Path):
    output = opened(tmp_path / "a.jsonl")
    with pytest.raises(RecordError, match="is being written by another process"):
        opened(tmp_path / "a.jsonl", resume=True)
    output.pause(0)


def test_an_empty_file_is_no_evaluation(tmp_path: Path):
    opened(tmp_path / "a.jsonl").pause(1)
    check_free(tmp_path / "a.jsonl", overwrite=False, resume=False)
    assert len(opened(tmp_path / "a.jsonl").missing) == 3


def test_a_path_that_cannot_be_written_is_said_early(tmp_path: Path):
    with pytest.raises(OutputError, match="is a folder: name a file in it"):
        check_free(tmp_path, overwrite=False, resume=False)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        check_free(tmp_path / "file" / "a.jsonl", overwrite=False, resume=False)
    check_free(tmp_path / "new" / "a.jsonl", overwrite=False, resume=False)
    assert not (tmp_path / "new" / "a.jsonl").exists()


def test_the_outcome_hash_is_of_words_not_of_seconds():
    episodes = [episode(game) for game in PANEL]
    value = outcome_hash(episodes)
    assert outcome_hash([replace(one, seconds=9.0, run="n") for one in reversed(episodes)]) == value
    assert outcome_hash([*episodes[:2], replace(episodes[2], won=False)]) != value
    other = replace(episodes[2], turns=[replace(episodes[2].turns[0], text="go ")])
    assert outcome_hash([*episodes[:2], other]) != value
    summary = finished(episodes, model="m", panel="p", panel_hash="ab", sampling={})
    assert json.loads(with_outcome_hash(summary, episodes).to_json())["results"]["outcomes"] == value
