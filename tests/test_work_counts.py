"""How much work an update does, counted instead of timed: these numbers may fall but not grow."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

from verl.agentopsd import turns as turns_module
from verl.agentopsd.config import TeacherConfig
from verl.agentopsd.contract import check_batch
from verl.agentopsd.credit import CreditConfig, agentopsd_credit
from verl.agentopsd.credited import credit_episodes
from verl.agentopsd.episodes import Episode
from verl.agentopsd.methods import METHODS
from verl.agentopsd.privilege import Skill
from verl.agentopsd.skills.bank import SkillBank
from verl.agentopsd.teacher import TeacherPolicy


class Operations(TorchDispatchMode):
    """Counts what reaches torch: a loop over rows or turns in Python would multiply it."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def credit_operations(rows: int, turns: int, per_turn: int = 4) -> int:
    ids = torch.arange(turns * per_turn).div(per_turn, rounding_mode="floor").expand(rows, -1).clone()
    with Operations() as counted:
        agentopsd_credit(torch.ones(rows), torch.ones(ids.shape), ids, torch.full((rows,), 0.5), CreditConfig())
    return counted.count


def test_credit_has_no_loop_over_rows_and_only_a_logarithm_of_the_turns():
    assert credit_operations(8, 16) == credit_operations(512, 16)
    # the recursion doubles: 16 turns take 4 passes, 64 take 6
    assert credit_operations(8, 64) - credit_operations(8, 16) == 2 * (
        credit_operations(8, 32) - credit_operations(8, 16)
    )
    assert credit_operations(8, 16) <= 120


def test_blocks_of_the_credit_grow_with_tokens_not_with_rows():
    ids = torch.zeros(64, 640).long()
    assert len(turns_module._blocks(ids)) == 1
    assert len(turns_module._blocks(torch.zeros(128, 16384).long())) == 16


class Chat:
    """A token per character."""

    rendered = 0

    def initial_ids(self, messages: list[dict[str, str]]) -> list[int]:
        self.rendered += 1
        return [ord(letter) for message in messages for letter in message["content"]]


class Engine:
    def __init__(self) -> None:
        self.rows: list[int] = []
        self.calls = 0

    def __call__(self, batch: TensorDict) -> TensorDict:
        self.calls += 1
        rows = batch["input_ids"].unbind()
        self.rows += [len(row) for row in rows]
        assert batch["calculate_entropy"] is False
        values = torch.nested.as_nested_tensor([torch.zeros(len(row)) for row in rows], layout=torch.jagged)
        return TensorDict({"log_probs": values}, batch_size=[len(rows)])


def episode(game: int, sample: int, length: int) -> Episode:
    facts = {
        "game_id": f"train/{game}",
        "task_type": "find",
        "messages": [{"role": "user", "content": f"look {game}"}],
        "turns": [],
        "env_error": "",
    }
    ids = torch.full((length,), 7)
    values = torch.zeros(length)
    return Episode(f"{game}_{sample}_0", torch.tensor([1]), ids, torch.ones(length).bool(), values, values, 1.0, facts)


@pytest.mark.parametrize(("games", "group"), [(2, 4), (8, 8)])
def test_the_teacher_reads_each_row_once_in_one_call_and_renders_each_game_once(games: int, group: int):
    engine, chat = Engine(), Chat()
    policy = TeacherPolicy(
        TeacherConfig(skill_position="user"),
        chat,  # type: ignore[arg-type]
        compute_log_prob=engine,
        temperature=1.0,
        max_length=1000,
        row_multiple=4,
        privilege=Skill(SkillBank("test", "open", {"find": "take a"})),
    )
    episodes = [episode(game, sample, 10 + sample) for game in range(games) for sample in range(group)]
    policy.log_probs(episodes[:-3])
    prompt = len("look 0\nopen\ntake a")
    needed = sum(prompt + len(one.response_ids) for one in episodes[:-3])
    padding = -(len(episodes) - 3) % 4
    assert engine.calls == 1
    assert len(engine.rows) == len(episodes) - 3 + padding
    # rows that only fill up the last micro-batch are copies of the shortest
    assert sum(engine.rows) == needed + padding * min(engine.rows)
    assert chat.rendered == games


def played(group: int, sample: int, tokens: int) -> Episode:
    """Two turns of so many tokens with as many of context between them; a batch of these keeps the contract."""
    mask = torch.ones(3 * tokens).bool()
    mask[tokens : 2 * tokens] = False
    old = -torch.ones(3 * tokens)
    facts = {
        "game_id": f"train/{group}",
        "turns": [{"span": [0, tokens]}, {"span": [2 * tokens, 3 * tokens]}],
        "min_global_steps": 4,
        "max_global_steps": 4,
        "won": sample == 0,
        "env_error": "",
    }
    key = f"000005-{group:04d}_{sample}_0"
    return Episode(key, torch.tensor([1]), torch.arange(3 * tokens), mask, old, (old + 1e-5) * mask, 1.0, facts)


def lines_of_python(games: int, tokens: int, run_dir: Path) -> int:
    """Lines of this package that are executed between the episodes of an update and their advantages."""
    episodes = [played(group, sample, tokens) for group in range(games) for sample in range(4)]
    scores = {one.key: one.old_log_probs + 0.1 for one in episodes}
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "agentopsd" not in frame.f_code.co_filename or "tests" in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        check_batch(episodes, step=5, games=games, group_size=4, max_logprob_gap=0.1, run_dir=run_dir)
        advantages, rates = [1.0 if one.won else -1.0 for one in episodes], [0.25] * len(episodes)
        credit_episodes(episodes, advantages, rates, scores, METHODS["agentopsd"], CreditConfig(), [0, 5])
    finally:
        sys.settrace(before)
    return count


def test_no_line_of_python_runs_once_per_token_and_rows_cost_the_same_each(tmp_path: Path):
    """Longer turns cost no line more; eight times as many games less than eight times as many lines."""
    few = lines_of_python(2, 4, tmp_path)
    assert lines_of_python(2, 64, tmp_path) == few
    assert few < lines_of_python(16, 4, tmp_path) <= 8 * few
    assert few <= 140 * 8, "140 lines an episode, with the contract and the control's dealing"
