"""The evaluation command on the real stack: Ray, the transfer queue, vLLM's CPU build, the shipped model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from stack import Run, environment, heed_interrupts, left_behind

from verl.agentopsd.envs.base import make_family
from verl.agentopsd.evaluation.records import RecordFile, read_records
from verl.agentopsd.evaluation.statistics import wilson
from verl.agentopsd.skills.bank import SkillBank, assert_skill_free

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

GAMES = ["--panel", "valid_unseen", "--limit-per-split", "12"]
TIMINGS = ("seconds", "env_seconds", "gen_seconds")


@dataclass(frozen=True)
class Done:
    """A finished call of the command line."""

    path: Path
    returncode: int
    output: str

    @property
    def file(self) -> RecordFile:
        return read_records(self.path)

    @property
    def outcomes(self) -> list[dict[str, Any]]:
        """Every field of every episode, in the order written, except what a clock measured and rounding may move."""
        episodes = [row for row in map(json.loads, self.path.read_text().splitlines()) if row["kind"] == "episode"]
        for row in episodes:
            for name in TIMINGS:
                row.pop(name)
            for turn in row["turns"]:
                turn["rollout_logprob_sum"] = round(turn["rollout_logprob_sum"], 3)
        return episodes


def command(path: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "verl.agentopsd.evaluate", "--out", str(path), "device=cpu", *arguments]


def evaluate(path: Path, *arguments: str, timeout: float = 420) -> Done:
    done = subprocess.run(
        command(path, *arguments),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=path.parent,
        env=environment(path),
    )
    errors = path.with_name(f"{path.name}.work") / "worker-errors.log"  # there only when something went wrong
    output = done.stdout + done.stderr + (errors.read_text()[-3000:] if errors.exists() else "")
    return Done(path, done.returncode, output)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, alfworld_data: Path) -> Done:
    """Twelve games, one worker, all of them at once."""
    done = evaluate(tmp_path_factory.mktemp("straight") / "records.jsonl", *GAMES)
    assert done.returncode == 0, done.output[-4000:]
    return done


def test_every_game_is_played_once_in_the_panel_s_order(straight: Done):
    games = [episode.game_id for episode in straight.file]
    assert len(games) == 12 and games == sorted(set(games))
    assert all(episode.turns and not episode.env_error for episode in straight.file)
    assert {len(episode.turns) == 30 for episode in straight.file if episode.truncated} <= {True}
    assert left_behind(straight.path) == []
    assert [path.name for path in straight.path.parent.iterdir()] == ["records.jsonl"]


def test_the_summary_counts_what_the_records_say(straight: Done):
    summary, episodes = straight.file.summary, straight.file.episodes
    assert summary is not None
    won = sum(episode.won for episode in episodes)
    assert 0 < won < 12, "the shipped model wins some games and not all"
    expected = wilson(won, 12)
    assert summary.results["success"] == {
        **{"rate": won / 12, "won": won, "n": 12},
        **{"low": expected.low, "high": expected.high},
    }
    assert (summary.panel, summary.games, summary.samples, summary.skill) == ("valid_unseen-12", 12, 1, False)
    assert summary.sampling["temperature"] == 0 and summary.versions["verl"].startswith("0.9.")
    assert summary.wall_seconds > 0 and len(summary.panel_hash) == 16
    assert f"{won / 12:.1%}" in straight.output and summary.results["outcomes"] in straight.output


def test_no_prompt_has_a_skill(straight: Done, alfworld_data: Path):
    family = make_family({"name": "alfworld", "data_dir": str(alfworld_data)})
    for name in ("alfworld", "alfworld_tiny"):
        bank = SkillBank.load(name, family.task_types)
        for episode in straight.file:
            assert not episode.skill
            assert_skill_free(episode.messages, bank)


def test_workers_servers_and_concurrency_change_no_word(straight: Done, tmp_path: Path):
    other = evaluate(
        *(tmp_path / "records.jsonl", *GAMES, "--workers", "3"),
        *("trainer.n_gpus_per_node=2", "env.max_concurrent_episodes=2"),
    )
    assert other.returncode == 0, other.output[-4000:]
    assert other.outcomes == straight.outcomes
    assert other.file.summary.results["outcomes"] == straight.file.summary.results["outcomes"]


def test_an_interrupted_evaluation_continues_and_ends_like_a_straight_one(straight: Done, tmp_path: Path):
    path, log = tmp_path / "records.jsonl", tmp_path / "log"
    slow = [*GAMES, "env.max_concurrent_episodes=1"]
    with log.open("w") as output:
        process = subprocess.Popen(
            command(path, *slow),
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            env=environment(path),
            preexec_fn=heed_interrupts,
        )
        try:
            deadline = time.monotonic() + 300
            while not path.exists() or path.read_text().count("\n") < 2:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=120) == 130
        finally:
            process.kill()
    assert "--resume continues" in log.read_text() and "Traceback" not in log.read_text()
    assert left_behind(path) == []
    played = read_records(path)
    assert played.summary is None and 2 <= len(played.episodes) < 12

    refused = evaluate(path, *GAMES)
    assert refused.returncode == 1 and "--resume continues it" in refused.output
    other = evaluate(path, "--resume", "--panel", "valid_seen", "--limit-per-split", "12")
    assert other.returncode == 1 and "panel 'valid_unseen-12', now 'valid_seen-12'" in other.output
    resumed = evaluate(path, *GAMES, "--resume")
    assert resumed.returncode == 0, resumed.output[-4000:]
    assert f"continues after {len(played.episodes)} of 12" in resumed.output
    assert resumed.outcomes == straight.outcomes
    assert resumed.file.summary.wall_seconds > 0


def test_a_checkpoint_plays_as_it_did_in_the_validation_of_its_training(run: Run, tmp_path: Path):
    """Weights through FSDP shards and a merged folder give the words that the trainer's own engine gave."""
    done = evaluate(tmp_path / "records.jsonl", str(run.directory), "--panel", "valid_unseen", "--limit-per-split", "6")
    assert done.returncode == 0, done.output[-4000:]
    summary = done.file.summary
    assert summary is not None and (summary.step, summary.run) == (2, f"{run.directory.name}-step2")
    assert summary.sampling["max_turns"] == 12
    validated = read_records(run.directory / "validation" / "000002.jsonl")
    assert validated.summary is not None and validated.summary.panel_hash == summary.panel_hash
    theirs = {episode.game_id: [turn.text for turn in episode.turns] for episode in validated}
    ours = {episode.game_id: [turn.text for turn in episode.turns] for episode in done.file}
    assert ours == theirs


def test_validation_changes_nothing_in_the_training(run: Run, train: Callable[..., Run]):
    """A run that validates before and after every update ends with the very parameters of one that hardly does."""
    often = train(
        *("trainer.total_training_steps=2", "trainer.save_freq=2"),
        *("trainer.test_freq=1", "trainer.val_before_train=true"),
    )
    assert often.returncode == 0, often.output[-4000:]
    assert sorted(path.stem for path in (often.directory / "validation").iterdir()) == ["000000", "000001", "000002"]
    for step in (1, 2):
        games = [[(e.game_id, [turn.text for turn in e.turns]) for e in one.rollouts(step)] for one in (often, run)]
        assert games[0] == games[1]
    left, right = often.checkpoint(2), run.checkpoint(2)
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_samples_with_a_skill_are_drawn_anew_and_labelled(tmp_path: Path, alfworld_data: Path):
    done = evaluate(
        *(tmp_path / "records.jsonl", "--panel", "valid_seen", "--limit-per-split", "4"),
        *("--samples", "3", "--temperature", "1", "--with-skill"),
    )
    assert done.returncode == 0, done.output[-4000:]
    file = done.file
    assert [(e.game_id, e.sample) for e in file] == sorted((e.game_id, e.sample) for e in file) and len(file) == 12
    assert file.summary is not None and file.summary.skill and all(episode.skill for episode in file)
    assert set(file.summary.results["pass_at"]) == {"1", "2", "3"} and "CONTROL" in done.output
    texts = {(episode.game_id, tuple(turn.text for turn in episode.turns)) for episode in file}
    assert len(texts) > 4, "samples of a game differ"
    assert len({episode.seed for episode in file}) == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["/no/such/model"], "no model at /no/such/model"),
        (["trainer.n_gpus_per_node=3", "ray_kwargs.ray_init.num_gpus=1"], "the run needs 3 GPUs"),
    ],
)
def test_what_cannot_work_ends_with_one_sentence(tmp_path: Path, alfworld_data: Path, change: list[str], message: str):
    done = evaluate(tmp_path / "records.jsonl", *GAMES, *change)
    assert done.returncode == 1
    errors = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0] and "Traceback" not in done.output, done.output[-3000:]
