"""Before Ray starts: what is missing or does not fit is one sentence with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.agentopsd import preflight
from verl.agentopsd.config import ConfigError
from verl.agentopsd.main import compose_config


def config(data: Path, *overrides: str):
    return compose_config(
        ["model=tiny", "device=cpu", f"env.data_dir={data}", "data.train_files=valid_seen", *overrides]
    )


def look(settings) -> str:
    """Games, skills, then lengths with the model's tokenizer, as the doctor does."""
    family, tasks = preflight.games(settings)
    bank = preflight.skills(settings, family)
    chat = preflight.chat_format(settings, settings.actor_rollout_ref.model.path)
    return preflight.check_lengths(settings, family, tasks, bank, chat)


def test_the_arithmetic_of_lengths(alfworld_data: Path):
    tokens = look(config(alfworld_data))
    assert "of 384" in tokens and "of 2048" in tokens


def test_games_of_every_split(alfworld_data: Path):
    _, tasks = preflight.games(config(alfworld_data))
    assert {split: len(games) for split, games in tasks.items()} == {"valid_seen": 140, "valid_unseen": 134}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_prompt_length=100", r"the prompt of valid_\w+/.* has \d+ tokens, but data.max_prompt_length=100"),
        ("data.max_response_length=1700", r"max_model_len=2084 .* but the model has 2048 positions"),
        (
            "agentopsd.teacher.skills=alfworld",
            r"teacher's row of .* tokens, but a row may have 2048; privileged text is never cut",
        ),
        ("data.val_files=valid_unsen", r"data.val_files=valid_unsen: split 'valid_unsen' is not one of train"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(alfworld_data: Path, override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        look(config(alfworld_data, override))


def test_a_missing_skill_set_is_refused(alfworld_data: Path):
    with pytest.raises(LookupError, match="no skill set 'nothing'"):
        look(config(alfworld_data, "agentopsd.teacher.skills=nothing"))


def test_a_folder_without_a_tokenizer_is_refused(alfworld_data: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="has no tokenizer that loads"):
        look(config(alfworld_data, f"actor_rollout_ref.model.path={tmp_path}"))


def test_the_real_engine_must_be_installed(alfworld_data: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed: run 'bash scripts/install.sh --textworld'"):
        look(config(alfworld_data, "env.backend=textworld"))
