"""The soak run's own judgement: faults at the set rate, lost and doubled episodes found, growing memory seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.faulty_env import FaultyEnv
from benchmarks.soak import ORDERLY, VICTIMS, Memory, Plan, findings
from verl.agentopsd.envs.base import Observation
from verl.agentopsd.evaluation.records import EpisodeRecord, RecordWriter


class Quiet:
    def reset(self) -> Observation:
        return Observation("start")

    def step(self, command: str) -> Observation:
        return Observation("done")

    def close(self) -> None:
        pass


def faults(rate: float, episodes: int) -> list[str]:
    found = []
    for number in range(episodes):
        env = FaultyEnv(Quiet(), rate, f"game-{number}")
        try:
            answer = env.reset()
            if answer is None or len(answer.text) > 10:
                found.append("garbage" if answer is None else "text")
        except Exception as error:
            found.append(type(error).__name__)
    return found


def test_faults_come_at_the_set_rate_in_every_kind_and_repeat():
    found = faults(0.2, 2000)
    assert len(found) == pytest.approx(400, abs=72)  # four standard deviations of a binomial count
    assert set(found) == {"ValueError", "EnvironmentFault", "garbage", "text"}
    assert faults(0.2, 2000) == found and faults(0, 2000) == []


def write_run(run_dir: Path, episodes: list[tuple[int, int, int]]) -> None:
    """Records (step, game, sample); the first was lost to the environment."""
    steps = sorted({step for step, _, _ in episodes})
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "data": {"a": 1.0}}) + "\n" for step in steps)
    )
    for step in steps:
        with RecordWriter(run_dir / "rollouts" / f"{step:06d}.jsonl") as writer:
            for own, game, sample in [one for one in episodes if one[0] == step]:
                error = "injected" if (own, game, sample) == episodes[0] else ""
                writer.write(
                    EpisodeRecord(
                        *("run", own, "train", "train", f"train/{game}", "pick", 0, False, 1, 0, False),
                        group=f"{game}",
                        sample=sample,
                        env_error=error,
                    )
                )
    step, game, sample = episodes[0]
    lost = {"step": step, "game_id": f"train/{game}", "sample": sample}
    # the second: of an update that was repeated after a blow
    (run_dir / "env-errors.jsonl").write_text(2 * (json.dumps(lost) + "\n"))
    (run_dir / "checkpoints" / f"global_step_{steps[-1]}").mkdir(parents=True)
    (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(steps[-1]))


WHOLE = [(step, game, sample) for step in (1, 2) for game in range(4) for sample in range(4)]


def test_a_whole_run_passes(tmp_path: Path):
    write_run(tmp_path / "run", WHOLE)
    assert findings(tmp_path / "run") == {"updates": 2, "episodes": 32, "lost to injected faults": 1}


@pytest.mark.parametrize(
    ("episodes", "message"),
    [
        (WHOLE[:-1], "too few or too many"),
        ([*WHOLE, WHOLE[-1]], "too few or too many|twice"),
        ([one for one in WHOLE if one != WHOLE[4]] + [WHOLE[5]], "too few or too many|twice"),
        ([(3, game, sample) if step == 2 else (step, game, sample) for step, game, sample in WHOLE], "line is missing"),
    ],
)
def test_what_is_lost_or_doubled_is_found(tmp_path: Path, episodes: list, message: str):
    write_run(tmp_path / "run", episodes)
    with pytest.raises(AssertionError, match=message):
        findings(tmp_path / "run")


def test_an_unnamed_loss_is_found(tmp_path: Path):
    write_run(tmp_path / "run", WHOLE)
    (tmp_path / "run" / "env-errors.jsonl").write_text("")
    with pytest.raises(AssertionError, match="not in env-errors.jsonl"):
        findings(tmp_path / "run")


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_of_process_is_killed_in_the_first_half(seed: int):
    plan = Plan.drawn(200, 5, seed)
    assert sorted(victim for _, victim in plan.blows) == sorted([*VICTIMS, ORDERLY])
    moments = [moment for moment, _ in plan.blows]
    assert moments == sorted(moments) and 0 < moments[0] and moments[-1] <= 100
    assert Plan.drawn(200, 5, seed) == plan and Plan.drawn(200, 0, seed).blows == []


def test_growth_is_measured_after_the_warm_up(tmp_path: Path):
    memory = Memory()
    for second in range(0, 3600, 10):
        memory.seconds.append(second)
        memory.by_process["grows"].append((second, 100 + second / 36))  # 100 MiB in an hour
        memory.by_process["flat"].append((second, 50.0 if second > 600 else second / 12))
        memory.by_process["fills"].append((second, min(100, second / 24)))  # a cache, full after 40 minutes
    rows = {name: values for name, *values in memory.table()}
    assert rows["grows"][3] == pytest.approx(100, rel=0.05)
    assert rows["flat"] == [50.0, 50.0, 50.0, 0.0]
    first, middle, last, slope = rows["fills"]
    assert first < middle < last == 100 and slope < 30
    memory.write(tmp_path / "memory.csv")
    lines = (tmp_path / "memory.csv").read_text().splitlines()
    assert len(lines) == 1 + 3 * 360 and lines[-1] == "fills,3590,100.00"
    assert (tmp_path / "memory.png").stat().st_size > 10_000
