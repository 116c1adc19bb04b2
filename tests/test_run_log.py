"""The run log: metrics.jsonl grows, survives a resume, and holds numbers only."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch

from verl.agentopsd.run_log import RunLog, plain_number, summary_line


class Tracking:
    def __init__(self) -> None:
        self.seen: list[tuple[int, dict]] = []
        self.exit_code: int | None = None

    def log(self, data, step):
        self.seen.append((step, data))

    def finish(self, exit_code=0):
        self.exit_code = exit_code


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_upstream_s_tracking_sees_everything_and_the_file_the_numbers(tmp_path: Path):
    tracking = Tracking()
    log = RunLog(tracking, tmp_path, total_steps=2, first_step=0)
    log.log({"a": np.float32(0.5), "b": torch.tensor(2), "c": "text", "d": math.nan, "e": True}, step=1)
    log.finish()
    assert tracking.seen[0][1]["c"] == "text" and tracking.exit_code == 0
    assert lines(tmp_path) == [{"step": 1, "data": {"a": 0.5, "b": 2.0}}]


def test_a_resumed_run_drops_what_it_will_do_again(tmp_path: Path):
    first = RunLog(Tracking(), tmp_path, 5, first_step=0)
    for step in (1, 2, 3):
        first.log({"x": step}, step)
    first.finish()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "da')  # killed while writing
    again = RunLog(Tracking(), tmp_path, 5, first_step=2)
    again.log({"x": 30}, 3)
    again.finish()
    assert [(row["step"], row["data"]["x"]) for row in lines(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_plain_number():
    assert [plain_number(x) for x in (1, 2.5, np.int64(3), torch.tensor(4.0))] == [1.0, 2.5, 3.0, 4.0]
    assert [plain_number(x) for x in (None, "5", True, math.inf, np.array([1, 2]))] == [None] * 5


def test_one_line_per_update():
    line = summary_line(
        7, {"group/success_rate": 0.5, "val/success_rate": 0.25, "timing_s/step": 9.0, "timing_s/gen": 4.0}
    )
    assert line == "update    7  success 0.500  validation success 0.250  9.0 s (gen 4.0)"


def test_what_the_metrics_say_is_printed_once(tmp_path: Path, capfd):
    log = RunLog(Tracking(), tmp_path, total_steps=3, first_step=0)
    for step in (1, 2, 3):
        flat = {"group/success_rate": 0.3, "val/success_rate": 0.3, "val/episodes": 4, "teacher/gap_abs_mean": 0.0}
        log.log({**flat, "teacher/rows_scored": 4}, step)
    log.finish()
    warnings = [line for line in capfd.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1 and "skill" in warnings[0]
