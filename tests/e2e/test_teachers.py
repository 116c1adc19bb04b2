"""Every method on the real stack, and whose weights each teacher source has. One start per source."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import rotation
import torch
from plain import turn_log_probs
from stack import Run, command, environment, left_behind

from verl.agentopsd.config import TINY_MODEL
from verl.agentopsd.methods import METHODS
from verl.agentopsd.rollout.chat import ChatFormat

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

NONE = "agentopsd.teacher.privilege=none"


@pytest.fixture(scope="module")
def rotate(tmp_path_factory: pytest.TempPathFactory, alfworld_data: Path) -> Callable[..., Run]:
    """One update with every method that has a teacher, and then with ``baselines`` of those that have none."""

    def start(*overrides: str, baselines: int = 0) -> Run:
        directory = tmp_path_factory.mktemp("run") / "out"
        updates = f"trainer.total_training_steps={len(rotation.ORDER) + baselines}"
        arguments = command(directory, updates, "trainer.save_freq=-1", *overrides)
        done = subprocess.run(
            [sys.executable, rotation.__file__, *arguments[arguments.index("-m") + 2 :]],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=directory.parent,
            env=environment(directory),
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return Run(directory, done.returncode, done.stdout + done.stderr)

    return start


@pytest.fixture(scope="module")
def own_weights(rotate: Callable[..., Run]) -> Run:
    return rotate("agentopsd.teacher.privilege=hindsight", baselines=len(rotation.BASELINES))


@pytest.fixture(scope="module")
def reference(rotate: Callable[..., Run]) -> Run:
    kl, control = "actor_rollout_ref.actor.use_kl_loss=true", "agentopsd.shuffle_evidence=true"
    return rotate("agentopsd.teacher.source=ref", NONE, kl, control)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with its output layer turned a little: same words, other log-probs."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(TINY_MODEL, folder)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(rotate: Callable[..., Run], other_model: Path) -> Run:
    """A teacher of its own, on a GPU (here: a logical one) of its own."""
    return rotate(
        "agentopsd.teacher.source=model",
        f"agentopsd.teacher.path={other_model}",
        "agentopsd.teacher.n_gpus_per_node=1",
        NONE,
    )


@pytest.mark.parametrize("source", ["own_weights", "reference", "checkpoint"])
def test_every_method_completes_an_update_with_every_teacher(source: str, request: pytest.FixtureRequest):
    run: Run = request.getfixturevalue(source)
    assert set(run.metrics) >= set(range(1, len(rotation.ORDER) + 1))
    for step, name in enumerate(rotation.ORDER, 1):
        metrics, method = run.metrics[step], METHODS[name]
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["actor/grad_norm"] > 0
        episodes = run.rollouts(step)
        expected = len(episodes) if method.rescored == "valid" else sum(one.advantage != 0 for one in episodes)
        assert metrics["teacher/rows_scored"] == expected
        assert ("actor/distill_loss" in metrics) == (method.loss_term is not None)
        assert ("credit/belief_last_mean" in metrics) == (method.believes and expected > 0)
    assert left_behind(run.directory) == []


@pytest.mark.parametrize("name", rotation.BASELINES)
def test_verls_other_baselines_complete_an_update(own_weights: Run, name: str):
    """Leave-one-out and centred returns, from the recorded outcomes; no teacher."""
    step = len(rotation.ORDER) + 1 + rotation.BASELINES.index(name)
    metrics, episodes = own_weights.metrics[step], own_weights.rollouts(step)
    assert "teacher/rows_scored" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())
    trained = False
    for one in episodes:
        rewards = [float(other.won) for other in episodes if other.group == one.group]
        centred = one.won - sum(rewards) / len(rewards)
        expected = centred if name == "dr_grpo" else centred * len(rewards) / (len(rewards) - 1)
        assert one.advantage == pytest.approx(expected, abs=1e-6)
        trained |= expected != 0
    assert (metrics["actor/grad_norm"] > 0) == trained and trained


def test_hindsight_counts_the_episodes_without_a_won_sibling(own_weights: Run):
    for step, name in enumerate(rotation.ORDER, 1):
        alone = 0
        episodes = own_weights.rollouts(step)
        for one in episodes:
            siblings = [other for other in episodes if other.group == one.group and other is not one and other.won]
            asked = METHODS[name].rescored == "valid" or one.advantage != 0
            alone += asked and not siblings
            if asked and not siblings:
                assert all(turn.e == 0 for turn in one.turns), "the student itself behind its own prompt"
        assert own_weights.metrics[step]["teacher/without_hindsight"] == alone


def test_the_reference_stays_where_the_actor_began(reference: Run):
    """Before the first update both have the same weights; after it only the actor has moved."""
    gaps = [reference.metrics[step].get("teacher/gap_abs_mean", 0.0) for step in reference.metrics]
    assert gaps[0] < 1e-5
    assert max(gaps[1:]) > 1e-3


def test_under_lora_the_reference_is_the_model_without_its_adapter(train: Callable[..., Run]):
    """No second copy of the weights: the teacher's log-probs are the base model's in plain transformers, before and
    after the adapter has learnt something."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    lora = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.rollout.load_format=safetensors"]
    learn = ["actor_rollout_ref.actor.optim.lr=1e-2", "trainer.total_training_steps=2", "trainer.save_freq=-1"]
    done = train(*lora, *learn, "agentopsd.teacher.source=ref", NONE)
    assert done.returncode == 0, done.output[-4000:]
    assert done.metrics[1]["teacher/gap_abs_mean"] < 1e-5, "an adapter begins with nothing"
    assert done.metrics[2]["teacher/gap_abs_mean"] > 1e-3
    chat = ChatFormat(AutoTokenizer.from_pretrained(TINY_MODEL), {})
    base = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()
    compared = 0
    for record in (one for step in (1, 2) for one in done.rollouts(step) if one.advantage):
        if (sums := turn_log_probs(base, chat, record, record.messages)) is not None:
            assert [turn.teacher_logprob_sum for turn in record.turns] == pytest.approx(sums, abs=1e-4 * 14)
            compared += 1
    assert compared >= 4


def test_a_model_of_its_own_scores_with_its_own_weights(checkpoint: Run, other_model: Path):
    """The teacher's log-probs in the records are those of its checkpoint in plain transformers, in every update."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chat = ChatFormat(AutoTokenizer.from_pretrained(TINY_MODEL), {})
    model = AutoModelForCausalLM.from_pretrained(other_model, dtype=torch.float32).eval()
    compared = 0
    for step in (4, len(rotation.ORDER)):
        for record in checkpoint.rollouts(step)[:6]:
            sums = turn_log_probs(model, chat, record, record.messages)
            if sums is None:
                continue
            assert [turn.teacher_logprob_sum for turn in record.turns] == pytest.approx(sums, abs=1e-4 * 14)
            compared += 1
    assert compared >= 4


def test_a_teacher_of_another_vocabulary_is_refused_before_the_start(train: Callable[..., Run], tmp_path: Path):
    from transformers import AutoTokenizer

    folder = tmp_path / "other"
    shutil.copytree(TINY_MODEL, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|extra|>"])
    tokenizer.save_pretrained(folder)
    done = train("agentopsd.teacher.source=model", f"agentopsd.teacher.path={folder}")
    assert done.returncode != 0
    assert "another vocabulary than the student: 1 of" in done.output and "'<|extra|>'" in done.output
    assert not (done.directory / "metrics.jsonl").exists()
