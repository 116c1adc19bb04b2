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


def test_notes_say_what_was_found(alfworld_data: Path):
    games, tokens = preflight.check(config(alfworld_data))
    assert games == "games    valid_seen 140, valid_unseen 134"
    assert "of 384" in tokens and "of 2048" in tokens


def test_a_hub_model_is_said_to_be_unchecked(alfworld_data: Path):
    notes = preflight.check(config(alfworld_data, "actor_rollout_ref.model.path=Nobody/Nothing"))
    assert notes[1].startswith("lengths  not checked here: Nobody/Nothing is not a local folder")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_prompt_length=100", r"the prompt of valid_\w+/.* has \d+ tokens, but data.max_prompt_length=100"),
        ("data.max_response_length=1700", r"max_model_len=2084 .* but the model has 2048 positions"),
        (
            "agentopsd.teacher.skills=alfworld",
            r"teacher's row of .* tokens, but a row may have 2048; skills are never cut",
        ),
        ("data.val_files=valid_unsen", r"data.val_files=valid_unsen: split 'valid_unsen' is not one of train"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_arithmetic(alfworld_data: Path, override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        preflight.check(config(alfworld_data, override))


def test_a_missing_skill_set_is_refused(alfworld_data: Path):
    with pytest.raises(LookupError, match="no skill set 'nothing'"):
        preflight.check(config(alfworld_data, "agentopsd.teacher.skills=nothing"))


def test_a_folder_without_a_tokenizer_is_refused(alfworld_data: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="has no tokenizer that loads"):
        preflight.check(config(alfworld_data, f"actor_rollout_ref.model.path={tmp_path}"))


def test_the_real_engine_must_be_installed(alfworld_data: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed: run 'bash scripts/install.sh --textworld'"):
        preflight.check(config(alfworld_data, "env.backend=textworld"))
