"""The success curve: which points it shows, and that a run in any state gives a picture or one clear sentence."""

import json
import logging

import pytest

from verl.agentopsd.evaluation import plots
from verl.agentopsd.evaluation.records import EpisodeRecord, RecordWriter
from verl.agentopsd.evaluation.run_metrics import read_metrics
from verl.agentopsd.evaluation.statistics import wilson

PNG = b"\x89PNG"


def write(run_dir, steps: dict[int, dict]) -> None:
    lines = [json.dumps({"step": step, "data": data}) + "\n" for step, data in steps.items()]
    (run_dir / "metrics.jsonl").write_text("".join(lines))


def test_a_run_gives_a_picture_and_its_points(tmp_path) -> None:
    write(
        tmp_path,
        {
            0: {"val/success_rate": 0.25, "val/episodes": 40},
            1: {"group/success_rate": 0.3},
            2: {"group/success_rate": 0.5, "val/success_rate": 0.5, "val/episodes": 40},
        },
    )
    assert plots.success_curve(tmp_path) == tmp_path / "success_curve.png"
    assert (tmp_path / "success_curve.png").read_bytes().startswith(PNG)
    points = plots.validation_points(tmp_path, read_metrics(tmp_path))
    assert [(p.step, p.rate, p.n) for p in points] == [(0, 0.25, 40), (2, 0.5, 40)]
    assert (points[0].low, points[0].high) == (wilson(10, 40).low, wilson(10, 40).high)
    assert list(tmp_path.glob(".*.part")) == []


@pytest.mark.parametrize(
    "steps",
    [
        {1: {"group/success_rate": 0.0}},
        {0: {"val/success_rate": 1.0, "val/episodes": 3}},
        {s: {"group/success_rate": 0.1} for s in range(1, 31)},
    ],
    ids=["one update", "validation only", "many updates"],
)
def test_short_and_long_runs_give_a_picture(tmp_path, steps) -> None:
    write(tmp_path, steps)
    out = plots.success_curve(tmp_path, tmp_path / "deep" / "curve.png")
    assert out.read_bytes().startswith(PNG)


def test_validation_comes_from_the_records_where_the_metrics_have_none(tmp_path) -> None:
    write(tmp_path, {1: {"group/success_rate": 0.5}})
    common = dict(
        run="r", phase="validation", split="s", task_type="t", seed=0, num_turns=1, invalid=0, truncated=False
    )
    for step, won in ((10, 2), (5, 1)):
        with RecordWriter(tmp_path / "validation" / f"{step:06d}.jsonl") as writer:
            for i in range(4):
                writer.write(EpisodeRecord(step=step, game_id=f"g{i}", won=i < won, **common))
            writer.write(EpisodeRecord(step=step, game_id="lost", won=False, env_error="crash", **common))
    points = plots.validation_points(tmp_path, read_metrics(tmp_path))
    assert [(p.step, p.rate, p.n) for p in points] == [(5, 0.25, 4), (10, 0.5, 4)]


def test_metrics_are_merged_by_step_and_freed_of_what_is_no_number(tmp_path, caplog) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 2, "data": {"a": 1, "b": NaN}}\n{"step": 1, "data": {"a": 5}}\n'
        '{"step": 2, "data": {"a": 3, "c": 4}}\n\n{"step": 3, "da'
    )
    with caplog.at_level(logging.WARNING):
        metrics = read_metrics(tmp_path)
    assert metrics.steps == {1: {"a": 5.0}, 2: {"a": 3.0, "c": 4.0}}
    assert metrics.series("c") == ([2], [4.0]) and metrics.names("a") == ["a"]
    assert (
        "not finite numbers are left out: b" in caplog.text and "metrics.jsonl:5: the last line is torn" in caplog.text
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("", "holds no step yet"),
        ('{"step": 1}\n{"step": 2, "data": {}}\n', "metrics.jsonl:1: not a line of metrics"),
        ('{"step": 1, "data": {"actor/lr": 0.1}}\n', "holds no success rate yet"),
    ],
)
def test_a_run_without_a_curve_says_why(tmp_path, capsys, content, message) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert plots.main([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_the_command_prints_the_path(tmp_path, capsys) -> None:
    write(tmp_path, {1: {"group/success_rate": 0.5}})
    assert plots.main([str(tmp_path), "--out", str(tmp_path / "x.png")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "x.png")
