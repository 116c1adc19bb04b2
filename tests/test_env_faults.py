"""Episodes lost to the environment are named; too many of them stop the run with the first trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from verl.agentopsd.env_faults import FILE_NAME, EnvironmentsFailed, report_faults
from verl.agentopsd.episodes import Episode


def episodes(lost: int, of: int) -> list[Episode]:
    made = []
    for index in range(of):
        error = {"env_error": "step: KeyError: 'x'", "env_trace": "Traceback\n  play.py\nKeyError: 'x'\n"}
        facts = {"game_id": f"train/{index}", "turns": [{}] * 3, "env_error": "", "env_trace": ""}
        row = torch.ones(1)
        key = f"000001-0000_{index}_0"
        made.append(Episode(key, row, row, row.bool(), row, row, 0.0, facts | error if index < lost else facts))
    return made


def test_lost_episodes_are_named_and_a_few_are_tolerated(tmp_path: Path):
    report_faults(episodes(1, 4), step=7, max_share=0.25, run_dir=tmp_path)
    report_faults(episodes(0, 4), step=8, max_share=0.25, run_dir=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert [(line["step"], line["game_id"], line["sample"], line["turn"]) for line in lines] == [(7, "train/0", 0, 3)]
    assert lines[0]["error"] == "step: KeyError: 'x'" and lines[0]["trace"].endswith("KeyError: 'x'\n")


def test_a_line_that_a_kill_tore_spoils_no_other(tmp_path: Path):
    file = tmp_path / FILE_NAME
    file.write_text('{"step": 6}\n{"step": 6, "ga')
    report_faults(episodes(1, 4), step=7, max_share=1, run_dir=tmp_path)
    report_faults(episodes(1, 4), step=8, max_share=1, run_dir=tmp_path)
    first, torn, *added = file.read_text().splitlines()
    assert (first, torn) == ('{"step": 6}', '{"step": 6, "ga')
    assert [json.loads(line)["step"] for line in added] == [7, 8]


@pytest.mark.parametrize(("lost", "share"), [(2, 0.25), (1, 0.0), (4, 1.0)])
def test_more_than_the_share_stops_the_run_with_the_first_trace(tmp_path: Path, lost: int, share: float):
    with pytest.raises(EnvironmentsFailed) as error:
        report_faults(episodes(lost, 4), step=7, max_share=share, run_dir=tmp_path)
    why = "none is left" if share == 1 else f"more than env.max_error_share={share:g} allows"
    assert f"update 7: {lost} of 4 episodes were lost to the environment, {why} (" in str(error.value)
    assert str(error.value).endswith("train/0: step: KeyError: 'x'\nTraceback\n  play.py\nKeyError: 'x'")
    assert len((tmp_path / FILE_NAME).read_text().splitlines()) == lost
