"""The main command on the real stack: verl, Ray, vLLM's CPU build and FSDP2 train the shipped model."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plain import turn_log_probs
from stack import Run, interrupt_when, left_behind, texts

from verl.agentopsd.config import TINY_MODEL
from verl.agentopsd.credit import CreditConfig, agentopsd_credit
from verl.agentopsd.envs.base import make_family
from verl.agentopsd.evaluation.records import EpisodeRecord, read_records
from verl.agentopsd.rollout.chat import ChatFormat
from verl.agentopsd.skills.bank import SkillBank, assert_skill_free
from verl.agentopsd.skills.insert import with_skill
from verl.agentopsd.watchdog import STALLED_EXIT_CODE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

EXPECTED_METRICS = (
    "credit/evidence_abs_mean credit/delta_b_abs_mean credit/weight_mean credit/weight_min credit/weight_max "
    "credit/weight_clip_frac credit/belief_first_mean credit/belief_last_mean credit/saturated_frac "
    "group/success_rate group/zero_adv_frac group/reward_mean group/reward_std "
    "teacher/gap_mean teacher/gap_abs_mean teacher/rows_scored teacher/rows_skipped teacher/tokens "
    "teacher/skill_fallbacks teacher/seconds env/turns_mean env/invalid_frac env/truncated_frac env/errors env/seconds "
    "rollout/logprob_gap_abs_mean rollout/logprob_gap_abs_max rollout/tokens_per_second rollout/straggler_ratio "
    "actor/pg_loss actor/grad_norm timing_s/gen timing_s/old_log_prob timing_s/adv timing_s/update_actor"
).split()


def test_a_run_leaves_everything_behind_and_no_process(run: Run):
    for name in ("config.yaml", "versions.json", "metrics.jsonl", "success_curve.png"):
        assert (run.directory / name).stat().st_size > 0, name
    assert json.loads((run.directory / "versions.json").read_text())["verl"].startswith("0.9.")
    assert (run.directory / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert left_behind(run.directory) == []


def test_every_metric_is_there_and_finite(run: Run):
    for step in (1, 2):
        missing = [name for name in EXPECTED_METRICS if name not in run.metrics[step]]
        assert missing == []
        assert all(math.isfinite(value) for value in run.metrics[step].values())


def test_the_screen_shows_one_line_per_update(run: Run):
    lines = [line for line in run.output.splitlines() if line.startswith("update ") and "success" in line]
    assert len(lines) == 2 and "validation success" in lines[1]


def test_sampler_and_actor_agree_on_every_token(run: Run):
    """vLLM and FSDP2 compute the same log-probs from the same weights, in float32, after a weight sync too."""
    assert run.metrics[1]["rollout/logprob_gap_abs_max"] < 1e-4
    assert run.metrics[1]["actor/unread_log_prob_frac"] == 0, "logits of sampled tokens alone"
    assert run.metrics[2]["rollout/logprob_gap_abs_max"] < 1e-4


def test_weights_version_follows_the_updates(run: Run):
    assert {record.weights_version for record in run.rollouts(1)} == {0}
    assert {record.weights_version for record in run.rollouts(2)} == {1}


def test_groups_are_the_games_and_their_episodes(run: Run):
    for step in (1, 2):
        records = run.rollouts(step)
        groups = {record.group: [r for r in records if r.group == record.group] for record in records}
        assert len(records) == 16 and [len(members) for members in groups.values()] == [4] * 4
        for members in groups.values():
            assert len({member.game_id for member in members}) == 1
            assert [member.sample for member in members] == [0, 1, 2, 3]
            assert len({member.seed for member in members}) == 4


def group_advantages(rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (deviation + 1e-6) for reward in rewards]


def test_base_advantages_are_grpo_s(run: Run):
    for step in (1, 2):
        records = run.rollouts(step)
        for start in range(0, len(records), 4):
            members = records[start : start + 4]
            expected = group_advantages([float(member.won) for member in members])
            assert [member.advantage for member in members] == pytest.approx(expected, abs=1e-5)
            assert {member.success_rate for member in members} == {sum(m.won for m in members) / 4}


def scored(records: list[EpisodeRecord]) -> list[EpisodeRecord]:
    return [record for record in records if record.advantage]


def test_only_episodes_with_an_advantage_are_scored(run: Run):
    for step in (1, 2):
        records = run.rollouts(step)
        assert all(turn.e is None for record in records if not record.advantage for turn in record.turns)
        assert all(turn.e is not None for record in scored(records) for turn in record.turns)
        assert run.metrics[step]["teacher/rows_scored"] == len(scored(records))
        assert run.metrics[step]["teacher/rows_skipped"] == 16 - len(scored(records))


def test_recorded_credit_follows_from_the_recorded_evidence(run: Run):
    """A, e and S/G of the record go through the rule again and give the recorded B, w and Ã, within their bounds."""
    for record in scored(run.rollouts(1) + run.rollouts(2)):
        turns = len(record.turns)
        credit = agentopsd_credit(
            torch.tensor([record.advantage], dtype=torch.float64),
            torch.tensor([[turn.e for turn in record.turns]], dtype=torch.float64),
            torch.arange(turns)[None],
            torch.tensor([record.success_rate], dtype=torch.float64),
            CreditConfig(),
        )
        assert [turn.B for turn in record.turns] == pytest.approx(credit.belief[0].tolist(), abs=1e-6)
        assert [turn.w for turn in record.turns] == pytest.approx(credit.weights[0].tolist(), abs=1e-6)
        assert [turn.advantage for turn in record.turns] == pytest.approx(credit.advantages[0].tolist(), rel=1e-5)
        assert all(0.9 <= turn.advantage / record.advantage <= 1.1 for turn in record.turns)


@pytest.mark.parametrize("step", [1, 2])
def test_log_probs_with_and_without_the_skill_equal_plain_transformers(run: Run, alfworld_data: Path, step: int):
    """Student and teacher, recomputed from the text of the records; the teacher's weights follow the actor's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()
    if step > 1:
        model.load_state_dict(run.checkpoint(step - 1))
    chat = ChatFormat(AutoTokenizer.from_pretrained(TINY_MODEL), {})
    family = make_family({"name": "alfworld", "data_dir": str(alfworld_data), "prompt_style": "compact"})
    bank = SkillBank.load("alfworld_tiny", family.task_types)
    compared = 0
    for record in scored(run.rollouts(step)):
        skilled = with_skill(record.messages, bank.text(record.task_type), "user")
        for messages, name in ((record.messages, "logprob_sum"), (skilled, "teacher_logprob_sum")):
            if (sums := turn_log_probs(model, chat, record, messages)) is None:
                break
            assert [getattr(turn, name) for turn in record.turns] == pytest.approx(sums, abs=1e-4 * 14)
        else:
            compared += 1
    assert compared >= 3


def test_validation_plays_every_game_once_without_a_skill(run: Run, alfworld_data: Path):
    file = read_records(run.directory / "validation" / "000002.jsonl")
    assert file.summary is not None and (file.summary.games, file.summary.skill) == (6, False)
    assert len({record.game_id for record in file.episodes}) == 6
    assert {record.split for record in file.episodes} == {"valid_unseen"}
    family = make_family({"name": "alfworld", "data_dir": str(alfworld_data)})
    for name in ("alfworld", "alfworld_tiny"):
        bank = SkillBank.load(name, family.task_types)
        for record in file.episodes:
            assert_skill_free(record.messages, bank)
    assert run.metrics[2]["val/success_rate"] == sum(record.won for record in file.episodes) / 6


def test_lambda_0_trains_exactly_like_grpo(train: Callable[..., Run], run: Run):
    one = ["trainer.total_training_steps=1", "trainer.save_freq=1"]
    grpo = train(*one, "algorithm.adv_estimator=grpo")
    zero = train(*one, "agentopsd.lambda=0")
    assert (grpo.returncode, zero.returncode) == (0, 0), grpo.output[-2000:] + zero.output[-2000:]
    assert texts(grpo.rollouts(1)) == texts(zero.rollouts(1)) == texts(run.rollouts(1))
    left, right, other = grpo.checkpoint(1), zero.checkpoint(1), run.checkpoint(1)
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert any(not torch.equal(left[name], other[name]) for name in left)
    assert "teacher/rows_scored" not in grpo.metrics[1]


def test_two_ranks_with_a_reference_give_the_same_advantages(train: Callable[..., Run], run: Run):
    two = train(
        "trainer.total_training_steps=1",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "agentopsd.bound=0.2",
    )
    assert two.returncode == 0, two.output[-4000:]
    assert texts(two.rollouts(1)) == texts(run.rollouts(1))
    for ours, theirs in zip(two.rollouts(1), run.rollouts(1), strict=True):
        assert [turn.advantage for turn in ours.turns] == pytest.approx(
            [turn.advantage for turn in theirs.turns], abs=1e-6
        )
    assert two.metrics[1]["actor/grad_norm"] == pytest.approx(run.metrics[1]["actor/grad_norm"], rel=0.05)
    assert two.metrics[1]["actor/kl_loss"] >= 0


def test_overrides_and_the_real_engine(train: Callable[..., Run]):
    done = train(
        "trainer.total_training_steps=1",
        "env.backend=textworld",
        "env.max_turns=4",
        "data.train_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "agentopsd.lambda=0.3",
        "agentopsd.gamma=1.0",
        "agentopsd.bound=0.5",
        timeout=600,
    )
    assert done.returncode == 0, done.output[-4000:]
    assert done.metrics[1]["env/errors"] == 0
    assert done.metrics[1]["env/turns_mean"] == 4
    assert "λ 0.3  γ 1.0  b 0.5" in done.output


def test_control_c_stops_cleanly_and_says_how_to_continue(tmp_path: Path, alfworld_data: Path):
    done = interrupt_when(tmp_path / "run", "update    1", signal.SIGINT, "trainer.total_training_steps=50")
    assert done.returncode == 130
    assert "give the same run_dir to continue" in done.output
    assert left_behind(done.directory) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env.data_dir=/nowhere"], "/nowhere"),
        (["data.max_prompt_length=40"], "data.max_prompt_length=40"),
        (["trainer.nnodes=2", "ray_kwargs.ray_init.num_gpus=1"], "the run needs 2 GPUs"),
    ],
)
def test_what_cannot_work_ends_with_one_sentence(train: Callable[..., Run], overrides: list[str], message: str):
    done = train("trainer.total_training_steps=1", *overrides)
    assert done.returncode == 1
    errors = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], done.output[-3000:]
    assert "Traceback" not in done.output
    assert left_behind(done.directory) == []


def test_a_stalled_stage_is_an_error_and_leaves_its_stacks(train: Callable[..., Run]):
    """A limit that the real weight sync cannot keep: the run ends by itself, with everything it started."""
    done = train("trainer.total_training_steps=1", "limits.weight_sync=0.001")
    assert done.returncode == STALLED_EXIT_CODE
    assert "the stage 'weight_sync' was not over after 0 s" in done.output
    assert "update_weights" in (done.directory / "stalled-weight_sync.txt").read_text()
    assert left_behind(done.directory) == []
