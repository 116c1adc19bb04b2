"""The command and the page as text: safe, self-contained, and of use when the run is damaged."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from verl.agentopsd.diagnose import diagnose
from verl.agentopsd.evaluation.records import EpisodeRecord, Summary
from verl.agentopsd.evaluation.run_metrics import RunError, read_metrics
from verl.agentopsd.report.__main__ import main
from verl.agentopsd.report.page import write_report
from verl.agentopsd.report.source import read_episodes, read_run

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}{% raw %}\x00\x1b[2J\u202e\ud800"


def page(run: Path) -> str:
    return write_report(run).path.read_text(encoding="utf-8")


def test_the_report_lies_in_the_run_and_says_what_it_is_about(run_dir: Path, capsys: Any) -> None:
    assert main([str(run_dir)]) == 0
    assert re.search(r"report\.html: 16 episodes, 0\.\d MB", capsys.readouterr().out)
    html = (run_dir / "report.html").read_text(encoding="utf-8")
    for stated in ("<title>run · credit report</title>", "some/model", "AgentOPSD, λ 0.5, γ 0.95, b 0.2", "0.9.1"):
        assert stated in html
    warnings = [str(finding) for finding in diagnose(read_metrics(run_dir))]
    assert warnings and all(escape(warning) in html for warning in warnings)
    assert "What could not be read" not in html


def test_the_same_run_gives_the_same_page(run_dir: Path) -> None:
    assert page(run_dir) == page(run_dir)


def test_the_page_loads_nothing_and_runs_only_its_own_script(run_dir: Path) -> None:
    html = page(run_dir)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', html)
    assert "default-src 'none'" in policy and "unsafe-inline" not in policy.split("script-src")[1]
    scripts = re.findall(r"<script>(.*?)</script>", html, re.S)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert not re.findall(r"""(?:src|href)=["']?(?!#|data:,)[^"'> ]+""", html.split("<script>")[0])
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "") and "https://" not in html


def test_what_an_environment_wrote_is_never_markup(
    tmp_path: Path, make_episode: Callable[..., EpisodeRecord], make_run: Callable[..., Path]
) -> None:
    record = make_episode()
    turns = [replace(record.turns[0], text=HOSTILE, command=HOSTILE, observation=HOSTILE)]
    bad = replace(record, turns=turns, game_id=HOSTILE, task_type=HOSTILE, phase=HOSTILE, env_error=HOSTILE)
    run = make_run(tmp_path / "<b>{{ 7*7 }}", {})
    (run / "rollouts").mkdir()
    line = json.dumps({"kind": "episode", "schema": 1, **vars(bad), "turns": [vars(turn) for turn in turns]})
    (run / "rollouts" / "000001.jsonl").write_text(line + "\n")
    (run / "versions.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    (run / "config.yaml").write_text(f"actor_rollout_ref: {{model: {{path: {json.dumps(HOSTILE)}}}}}")
    html = page(run)
    assert write_report(run).episodes == 1
    assert html.count("<script") == 1 + len(re.findall(r'<script type="text/plain"', html)) == html.count("</script>")
    assert "U+001B" in html and "U+202E" in html and not re.search("[\x00\x1b\u202e\ufffd]", html)
    assert "<img" not in html and "<b>" not in html and "7*7" in html and "49" not in html.split("<script")[0]


def test_an_earlier_report_is_replaced_but_nothing_else(run_dir: Path, tmp_path: Path, capsys: Any) -> None:
    write_report(run_dir)
    write_report(run_dir)
    other = tmp_path / "notes.html"
    other.write_text("mine")
    assert main([str(run_dir), "--out", str(other)]) == 2
    assert "--overwrite" in capsys.readouterr().err and other.read_text() == "mine"
    assert main([str(run_dir), "--out", str(other), "--overwrite"]) == 0
    assert other.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert not list(tmp_path.glob(".*")), "no unfinished file is left"
    with pytest.raises(RunError, match="is a directory"):
        write_report(run_dir, tmp_path)


def test_a_folder_that_is_no_run_is_one_sentence(tmp_path: Path, capsys: Any) -> None:
    assert main([str(tmp_path / "missing")]) == 2
    assert main([str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("error: ") for line in lines)
    assert "is not a directory" in lines[0] and "holds no metrics.jsonl" in lines[1]


def test_an_empty_run_is_a_page_that_says_so(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.yaml").write_text("algorithm: {adv_estimator: grpo}")
    assert main([str(tmp_path)]) == 0
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "No training curves: metrics.jsonl does not exist" in html
    assert "No episodes: the run has not written a record yet" in html and "GRPO" in html
    assert "metrics.jsonl" in capsys.readouterr().err


def test_a_torn_last_line_and_a_bad_line_cost_only_themselves(run_dir: Path) -> None:
    file = run_dir / "rollouts" / "000001.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    lines[2] = '{"kind": "episode", "schema": 1, "run": 3}\n'
    lines[7] = lines[7][:100]
    file.write_text("".join(lines))
    with (run_dir / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "da')
    written = write_report(run_dir)
    assert written.episodes == 14
    text = " ".join(written.notes)
    assert "rollouts/000001.jsonl: 2 lines were left out: line 3 is not a record" in text
    assert "metrics.jsonl:4: the last line is torn and left out" in text
    assert "2 lines were left out" in written.path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"kind": "epis', "line 1 is torn"),
        (b"{]\n", "line 1 is not a record"),
        (b"[1]\n", "not a JSON object"),
        (b"\xff\xfe\n", "line 1 is not a record"),
        (b'{"kind": "episode", "schema": 9}\n', "schema 9, this version reads 1"),
        (b'{"kind": "other", "schema": 1}\n', "kind 'other'"),
        (b'{"kind": "episode", "schema": 1, "turns": "ab"}\n', "line 1 is not a record"),
        (b"[" * 100_000 + b"\n", "line 1 is not a record"),
    ],
)
def test_each_kind_of_damage_has_its_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    file, notes = tmp_path / "000001.jsonl", []
    file.write_bytes(line)
    assert list(read_episodes(file, notes)) == []
    assert len(notes) == 1 and reason in notes[0]


def test_summaries_are_no_episodes_and_no_damage(tmp_path: Path, make_episode: Callable[..., EpisodeRecord]) -> None:
    file, notes = tmp_path / "000001.jsonl", []
    summary = Summary("r", "m", 1, "p", "h", 1, 1, False, {}, {})
    file.write_text(make_episode().to_json() + "\n\n" + summary.to_json() + "\n" + summary.to_json() + "\n")
    assert len(list(read_episodes(file, notes))) == 1 and not notes


def test_metrics_that_are_not_finite_are_noted(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "data": {"actor/entropy": NaN, "group/success_rate": 0.4}}\n')
    run = read_run(run_dir)
    assert run.notes == [
        "metrics.jsonl: values that are not finite numbers are left out: actor/entropy."
    ]  # the step itself stays
    assert run.metrics is not None and run.metrics.series("group/success_rate")[1][-1] == 0.4


def test_broken_metrics_leave_the_episodes(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text("nonsense\n{}\n")
    written = write_report(run_dir)
    assert written.episodes == 16
    assert len(written.notes) == 1 and written.notes[0].startswith("No training curves: metrics.jsonl:1: not a line")


def test_broken_configuration_is_noted(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("a: [1, {")
    (run_dir / "versions.json").write_text("[]")
    notes = write_report(run_dir).notes
    assert notes[0].startswith("config.yaml cannot be read") and notes[1].startswith("versions.json cannot be read")
    assert not any("\n" in note for note in notes)


def test_records_are_read_in_the_order_they_were_played(
    tmp_path: Path, make_episode: Callable[..., EpisodeRecord], make_run: Callable[..., Path]
) -> None:
    names = ("rollouts/000002.jsonl", "rollouts/000001.jsonl", "validation/000000.jsonl", "validation/000002.jsonl")
    run = make_run(tmp_path / "run", {name: [make_episode(run=name)] for name in names})
    order = [episode.run for episode in read_run(run).episodes()]
    assert order == [names[2], names[1], names[3], names[0]]


def test_ablations_are_named_in_the_method(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text(
        "algorithm: {adv_estimator: agentopsd}\n"
        "agentopsd: {lambda: 0.3, granularity: token, recursion: false, prior: 0.5, direction: signed}\n"
    )
    assert dict(read_run(run_dir).facts)["Method"] == "AgentOPSD, λ 0.3, granularity token, recursion False, prior 0.5"
