"""A skill in the student's prompt: what training rows say, what the lengths allow, what validation reports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import DictConfig

from verl.agentopsd import preflight
from verl.agentopsd.config import ConfigError
from verl.agentopsd.main import compose_config

SKILLED = ["method=grpo", "agentopsd.student_skill=true"]


def config(data: Path, *overrides: str) -> DictConfig:
    return compose_config(
        ["model=tiny", "device=cpu", f"env.data_dir={data}", "data.train_files=valid_seen", *overrides]
    )


def longest_prompt(one: DictConfig) -> int:
    family, tasks = preflight.games(one)
    chat = preflight.chat_format(one, str(one.actor_rollout_ref.model.path))
    note = preflight.check_lengths(one, family, tasks, preflight.skills(one, family), chat)
    found = re.search(r"longest prompt (\d+) of", note)
    assert found is not None, note
    return int(found[1])


def test_the_student_s_skill_counts_as_its_prompt(alfworld_data: Path):
    plain, skilled = longest_prompt(config(alfworld_data)), longest_prompt(config(alfworld_data, *SKILLED))
    assert skilled > plain
    limit = f"data.max_prompt_length={skilled - 1}"
    assert longest_prompt(config(alfworld_data, limit)) == plain
    with pytest.raises(ConfigError, match=rf"has {skilled} tokens, but {limit}"):
        longest_prompt(config(alfworld_data, *SKILLED, limit))


def test_an_update_needs_as_many_different_games_as_it_plays(alfworld_data: Path):
    message = r"data.train_batch_size=8 different games, but data.train_files=valid_seen has 7"
    with pytest.raises(ConfigError, match=message):
        preflight.games(config(alfworld_data, "data.train_max_samples=7"))
