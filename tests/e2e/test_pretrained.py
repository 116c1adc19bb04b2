"""A pretrained model, with its own vocabulary and chat template, made and trained as docs/cluster.md says."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from stack import Run, environment, left_behind

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
LEARNING_RATE, WEIGHT_DECAY = 1e-6, 0.01
"""Of the preset and of verl."""

SMALLEST = [
    # pure chance does not win a game in two turns: the teacher's reading is what is learnt from
    "method=opd",
    "data.train_files=valid_seen",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "env.max_turns=2",
    "env.max_action_tokens=12",
    "data.max_response_length=128",
    "trainer.save_freq=1",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that scripts/build_smollm2.py makes, where the preset looks for it."""
    cache = tmp_path_factory.mktemp("cache")
    spec = spec_from_file_location("build_smollm2", ROOT / "scripts" / "build_smollm2.py")
    assert spec is not None and spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(sys, "argv", ["build_smollm2.py"])
        script.main()
    yield cache / "agentopsd" / "smollm2-135m-instruct"
    shutil.rmtree(cache)


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory, alfworld_data: Path) -> Iterator[Run]:
    """One update of the preset at its smallest."""
    directory = tmp_path_factory.mktemp("pretrained") / "out"
    done = subprocess.run(
        [sys.executable, "-m", "verl.agentopsd.main", "model=smollm2_135m", "device=cpu", *SMALLEST]
        + [f"run_dir={directory}"],
        env=environment(directory) | {"XDG_CACHE_HOME": str(model.parents[1])},
        capture_output=True,
        text=True,
        timeout=600,
        cwd=directory.parent,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    yield Run(directory, done.returncode, done.stdout + done.stderr)
    shutil.rmtree(directory)  # half a gigabyte of weights


def test_an_update_is_completed_with_finite_numbers(trained: Run):
    assert list(trained.metrics) == [1] and left_behind(trained.directory) == []
    metrics = trained.metrics[1]
    assert [name for name, value in metrics.items() if not math.isfinite(value)] == []
    assert metrics["actor/loss"] != 0 and metrics["actor/grad_norm"] > 0
    records = trained.rollouts(1)
    assert [len(record.turns) for record in records] == [2] * 4
    assert len({record.game_id for record in records}) == 2


def test_sampler_and_actor_agree(trained: Run):
    assert trained.metrics[1]["rollout/logprob_gap_abs_max"] < 1e-4


def test_the_teacher_has_read_every_episode(trained: Run):
    assert trained.metrics[1]["teacher/rows_scored"] == 4
    for turn in (turn for record in trained.rollouts(1) for turn in record.turns):
        assert turn.e == pytest.approx(turn.teacher_logprob_sum - turn.logprob_sum, abs=1e-4)
        assert abs(turn.e) > 1e-3, "a skill in the prompt changes what is expected"


def test_every_layer_has_moved_by_adam_s_first_step(trained: Run, model: Path):
    """Adam's first step is the learning rate in the direction of the gradient's sign, plus the decay, in float32."""
    from transformers import AutoModelForCausalLM

    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    after = trained.checkpoint(1)
    rounding = torch.finfo(torch.float32).eps
    for name, value in after.items():
        step, size = (value - start[name]).abs(), start[name].abs()
        assert (step <= LEARNING_RATE * (1.01 + WEIGHT_DECAY * size) + rounding * size).all(), name
        assert step.max() > 0.5 * LEARNING_RATE, name
