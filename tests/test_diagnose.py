"""Every warning appears when its metric says so, and a healthy run has none."""

import json
import re
from pathlib import Path

import pytest

from verl.agentopsd import diagnose as cli
from verl.agentopsd.diagnose import Limits, diagnose
from verl.agentopsd.evaluation.run_metrics import RunMetrics

HEALTHY = {
    "group/success_rate": 0.4,
    "group/zero_adv_frac": 0.2,
    "group/zero_adv_frac_all_fail": 0.1,
    "group/zero_adv_frac_all_success": 0.1,
    "group/reward_mean": 0.4,
    "group/reward_std": 0.49,
    "teacher/gap_abs_mean": 0.8,
    "teacher/skill_fallbacks": 0.0,
    "teacher/rows_scored": 48.0,
    "credit/saturated_frac": 0.2,
    "credit/weight_clip_frac": 0.1,
    "credit/belief_last_mean": 0.3,
    "credit/evidence_mean": -0.5,
    "rollout/logprob_gap_abs_mean": 1e-3,
    "rollout/logprob_gap_abs_max": 0.1,
    "rollout/straggler_ratio": 1.4,
    "env/invalid_frac": 0.1,
    "env/errors": 0.0,
}


def run(steps: int = 12, **series) -> RunMetrics:
    """A healthy run with some metrics replaced: a number for all steps, or a function of the step."""
    data = {}
    for step in range(1, steps + 1):
        changed = {name: value(step) if callable(value) else value for name, value in series.items()}
        data[step] = {name: value for name, value in {**HEALTHY, **changed}.items() if value is not None}
    return RunMetrics(Path("metrics.jsonl"), data)


def codes(metrics: RunMetrics, **options) -> list[str]:
    return [finding.code for finding in diagnose(metrics, **options)]


def test_a_healthy_run_has_no_warnings() -> None:
    assert codes(run()) == [] and codes(run(1)) == []


@pytest.mark.parametrize(
    ("code", "changes", "words"),
    [
        (
            "no_signal",
            {"group/zero_adv_frac": 1.0, "group/zero_adv_frac_all_fail": 1.0, "group/zero_adv_frac_all_success": 0.0},
            "all groups failed",
        ),
        (
            "no_signal",
            {"group/zero_adv_frac": 1.0, "group/zero_adv_frac_all_fail": 0.0, "group/zero_adv_frac_all_success": 1.0},
            "the games are solved",
        ),
        ("no_success", {"group/success_rate": 0.005}, "success is 0.50%"),
        ("skill_unseen", {"teacher/gap_abs_mean": 0.0}, "does it see the skill"),
        ("skill_missing", {"teacher/skill_fallbacks": 3.0}, "3 of 48 scored rows"),
        ("saturated", {"credit/saturated_frac": 0.8}, "80% of the turns.*-0.50 a turn.*evidence=centered"),
        ("at_bound", {"credit/weight_clip_frac": 0.7}, "70% of the turns"),
        (
            "reward_without_success",
            {"group/reward_mean": lambda s: 0.1 * s, "group/success_rate": lambda s: 0.4 - 0.001 * s},
            "farmed",
        ),
        ("rollout_differs", {"rollout/logprob_gap_abs_mean": 0.05}, r"0.050 nats per token \(up to 0.10\)"),
        ("stragglers", {"rollout/straggler_ratio": 4.5}, "4.5 times the mean"),
        ("invalid_rising", {"env/invalid_frac": lambda s: 0.02 * s}, "from 6.0% to 20.0%"),
        ("environment_fails", {"env/errors": lambda s: 2.0 if s == 12 else 0.0}, "2 episodes were lost"),
    ],
)
def test_each_warning(code: str, changes: dict, words: str) -> None:
    (finding,) = diagnose(run(**changes))
    assert finding.code == code
    assert re.search(words, finding.text), finding.text
    assert (finding.last_step, str(finding).startswith("steps")) == (12, True)


def test_only_the_latest_steps_are_judged() -> None:
    recovered = run(**{"credit/saturated_frac": lambda s: 0.9 if s <= 7 else 0.1})
    assert codes(recovered) == []
    assert codes(recovered, up_to=7) == ["saturated"]
    assert codes(recovered, limits=Limits(window=12)) == ["saturated"]


def test_one_good_group_is_a_signal() -> None:
    assert codes(run(**{"group/zero_adv_frac": lambda s: 0.9 if s == 10 else 1.0})) == []


def test_a_rise_needs_two_windows() -> None:
    assert codes(run(9, **{"env/invalid_frac": lambda s: 0.1 * s})) == []
    assert codes(run(10, **{"env/invalid_frac": lambda s: 0.1 * s})) == ["invalid_rising"]


def test_reward_that_rises_with_success_is_well() -> None:
    assert codes(run(**{"group/reward_mean": lambda s: 0.1 * s, "group/success_rate": lambda s: 0.1 + 0.05 * s})) == []


def test_a_metric_that_is_no_longer_logged_is_not_judged() -> None:
    assert codes(run(**{"teacher/gap_abs_mean": lambda s: 0.0 if s < 12 else None})) == []


def test_metrics_of_another_method_are_not_missed() -> None:
    assert codes(run(**{name: None for name in HEALTHY if name.startswith(("credit/", "teacher/"))})) == []


def test_the_command(tmp_path, capsys) -> None:
    assert cli.main([str(tmp_path)]) == 2
    assert "metrics.jsonl does not exist" in capsys.readouterr().err
    data = {**HEALTHY, "group/success_rate": 0.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3, "data": data}) + "\n")
    assert cli.main([str(tmp_path)]) == 0
    assert "warning: step 3: success is 0.00%" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3, "data": HEALTHY}) + "\n")
    assert cli.main([str(tmp_path)]) == 0
    assert "nothing to warn about" in capsys.readouterr().out
