"""The environment in docs/extend.md is a whole one: registered, checked and played as any other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from verl.agentopsd import preflight
from verl.agentopsd.envs import base
from verl.agentopsd.main import compose_config

ROOT = Path(__file__).resolve().parents[1]
(TEXT,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extend.md").read_text(), re.DOTALL)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_FACTORIES", dict(base._FACTORIES))
    exec(compile(TEXT, "docs/extend.md", "exec"), {"__name__": "guess"})


def test_its_games_are_found_and_their_prompts_fit(tmp_path: Path):
    for name in ("general", "guess"):
        (tmp_path / f"{name}.md").write_text("Halve the range with every guess.")
    config = compose_config(["model=tiny", "device=cpu", "env.name=guess", f"agentopsd.teacher.skills={tmp_path}"])
    family, tasks = preflight.games(config)
    assert {split: len(found) for split, found in tasks.items()} == {"train": 16, "valid_unseen": 4}
    chat = preflight.chat_format(config, config.actor_rollout_ref.model.path)
    note = preflight.check_lengths(config, family, tasks, preflight.skills(config, family), chat)
    assert "longest prompt" in note


def test_it_is_won_by_halving():
    family = base.make_family({"name": "guess"})
    for task in family.tasks("valid_unseen"):
        env = family.make(task)
        observation, low, high = env.reset(), 1, 20
        assert not env.step("a mug").valid
        while not observation.done:
            guess = (low + high) // 2
            observation = env.step(family.parse_action(f" {guess}\n").command)
            low, high = (guess + 1, high) if observation.text == "Higher." else (low, guess - 1)
        assert observation.won
