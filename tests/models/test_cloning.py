"""What the tiny model is cloned from, and that an interrupted build ends like an uninterrupted one."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from verl.agentopsd.envs.alfworld.expert import Clumsiness, load_prior
from verl.agentopsd.envs.alfworld.games import TASK_TYPES
from verl.agentopsd.envs.base import make_family
from verl.agentopsd.models.play import ChatTokens
from verl.agentopsd.models.tiny import TINY_ALFWORLD, TinyConfig, TinyLM
from verl.agentopsd.skills.bank import SkillBank

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from tiny_model.card import wilson  # noqa: E402
from tiny_model.cloning import STAGES, clone, command_weights  # noqa: E402
from tiny_model.demonstrations import Row, Teacher, batches, to_row  # noqa: E402
from tiny_model.optimizer import orthogonalized  # noqa: E402


@pytest.fixture(scope="module")
def tokens() -> ChatTokens:
    return ChatTokens(TINY_ALFWORLD / "tokenizer.json")


@pytest.fixture(scope="module")
def teacher(alfworld_data: Path) -> Teacher:
    family = make_family(
        {"name": "alfworld", "data_dir": str(alfworld_data), "prompt_style": "compact", "action_format": "plain"}
    )
    return Teacher(family, SkillBank.load("alfworld_tiny", TASK_TYPES), load_prior())


@pytest.mark.parametrize(("general", "specific"), [(True, True), (False, False), (True, False), (False, True)])
def test_prompt_holds_the_skills_that_the_expert_plays_with(teacher: Teacher, general: bool, specific: bool) -> None:
    task = teacher.family.tasks("train")[0]
    demonstration = teacher.play(task, general, specific, Clumsiness(), random.Random(0))
    general_line, specific_line = teacher.skills.text(task.task_type).split("\n")
    lines = demonstration.messages[1]["content"].split("\n")
    assert lines[2:] == [general_line] * general + [specific_line] * specific


def test_row_is_the_chat_with_its_commands_marked(teacher: Teacher, tokens: ChatTokens) -> None:
    demonstration = teacher.play(teacher.family.tasks("train")[5], True, True, Clumsiness(), random.Random(0))
    assert demonstration.won
    row = to_row(demonstration, tokens, skilled_weight=2.0)
    text = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in demonstration.messages) + "<|assistant|>"
    text += "<|assistant|>".join(
        f"{turn.command}<|end|>" + f"<|user|>{turn.answer}<|end|>" * (turn is not demonstration.turns[-1])
        for turn in demonstration.turns
    )
    assert tokens.decode(row.ids) == text
    assert [tokens.decode(row.ids[a:b]) for a, b in row.spans] == [f"{t.command}<|end|>" for t in demonstration.turns]
    weights = command_weights([row], len(row.ids) + 3)[0]
    assert weights.sum() == 2.0 * sum(b - a for a, b in row.spans) and weights[-3:].sum() == 0


def test_batches_hold_every_row_once_within_the_limit() -> None:
    rows = [Row([1] * n, [(0, 1)], 1.0) for n in random.Random(0).choices(range(10, 200), k=50)]
    packed = batches(rows, 400, random.Random(1))
    assert sorted(id(row) for batch in packed for row in batch) == sorted(map(id, rows))
    assert all(len(batch) * max(len(row.ids) for row in batch) <= 400 for batch in packed)


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (32, 8)])
def test_orthogonalized_has_singular_values_near_one_and_the_same_directions(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalized(matrices)
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    inner = u.mT @ result @ vh.mT
    values = inner.diagonal(dim1=1, dim2=2)
    assert values.min() > 0.3 and values.max() < 1.3 and values.mean() == pytest.approx(0.9, abs=0.2)
    assert (inner - torch.diag_embed(values)).abs().max() < 1e-3


def test_wilson_interval_of_a_textbook_case() -> None:
    assert wilson(7, 10) == pytest.approx((0.3968, 0.8922), abs=1e-4)
    assert wilson(0, 17)[0] == 0.0


@pytest.mark.parametrize("stage", STAGES)
def test_schedule_moves_from_start_to_end(stage) -> None:
    assert stage.mixture_at(0.0) == list(stage.start_mixture)
    assert stage.mixture_at(0.9) == pytest.approx(list(stage.mixture))
    assert stage.answer_weight_at(0.9) == 0.0
    assert stage.learning_rate_at(0.0, 0) == stage.learning_rate / stage.warmup_steps
    assert stage.learning_rate_at(1.0, 9999) == pytest.approx(stage.learning_rate * stage.final_learning_rate)


def test_interrupted_cloning_ends_with_the_same_weights(teacher: Teacher, tokens: ChatTokens, tmp_path: Path) -> None:
    tasks = teacher.family.tasks("train")[:40]
    stage = replace(STAGES[0], tokens=8000, episodes_per_round=8)
    config = TinyConfig(vocab_size=tokens.tokenizer.get_vocab_size())

    def run(name: str, minutes: float):
        model = TinyLM.initialized(config, 3)
        return model, clone(model, teacher, tasks, tokens, stage, 3, tmp_path / name, minutes, lambda *_: None)

    whole, progress = run("whole.pt", 10.0)
    for _ in range(progress.rounds - 1):
        with pytest.raises(TimeoutError, match="--resume"):
            run("parts.pt", 0.0)
    parts, same = run("parts.pt", 0.0)
    assert progress.rounds > 1 and (same.tokens, same.steps) == (progress.tokens, progress.steps)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, parts.state_dict()[name]), name
