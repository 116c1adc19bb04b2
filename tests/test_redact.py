"""Tokens and keys do not reach files, logs or the screen; numbers and names that only sound like them do."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl.agentopsd import main as command
from verl.agentopsd.main import compose_config
from verl.agentopsd.redact import RedactingFile, is_secret_name, redact, redact_config, without_secrets
from verl.agentopsd.rollout.failures import report, worker_errors
from verl.agentopsd.task_runner import write_run_files

HF = "hf_" + "AbCdEfGhIjKlMnOpQrStUv"
KEY = "sk-" + "a1b2c3d4e5f6g7h8i9j0k1"


@pytest.mark.parametrize(
    "name", ["hf_token", "HF_TOKEN", "WANDB_API_KEY", "token", "db.password", "AWS_SECRET_ACCESS_KEY"]
)
def test_names_of_secrets(name: str):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["max_action_tokens", "tokenizer", "pad_token_id", "key", "keys", "log_prob_max_token_len"]
)
def test_names_that_only_sound_like_secrets(name: str):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"login {HF} ok", "login *** ok"),
        (f"OPENAI: {KEY}", "OPENAI: ***"),
        ("clone https://me:pw@host/x", "clone https://***@host/x"),
        ("run +hf_token=abc +x=1", "run +hf_token=*** +x=1"),
        ('{"api_key": "abc", "n": 3}', '{"api_key": ***, "n": 3}'),
        ("max_action_tokens=14 token ids", "max_action_tokens=14 token ids"),
        ("train/pick_cool-Apple-1/trial_T2019", "train/pick_cool-Apple-1/trial_T2019"),
    ],
)
def test_secrets_are_hidden_in_texts(text: str, shown: str):
    assert redact(text) == shown


def test_values_of_secret_variables_are_hidden_wherever_they_appear(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct-horse-battery")
    monkeypatch.setenv("OTHER_TOKEN", "0")
    assert redact("sent correct-horse-battery, got 200") == "sent ***, got 200"


def test_a_config_keeps_everything_but_its_secrets():
    given = {"a": {"hf_token": HF, "max_tokens": 5, "list": [HF, "x"], "empty_token": "", "token": None}, "flag": True}
    assert redact_config(given) == {
        "a": {"hf_token": "***", "max_tokens": 5, "list": ["***", "x"], "empty_token": "", "token": None},
        "flag": True,
    }


def test_no_file_of_a_run_holds_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "sys.argv", ["main", f"+ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN={HF}", "+x.password=hidden77"]
    )
    config = compose_config(
        [
            *(
                "model=tiny",
                "device=cpu",
                f"run_dir={tmp_path}",
                "+x.password=hidden77",
                "+x.address=https://me:hidden77@h/",
            ),
            f"+ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN={HF}",
        ]
    )
    OmegaConf.resolve(config)
    write_run_files(config)
    report(tmp_path, "train/game", ValueError(f"401 for {HF}"))
    with (tmp_path / "verl.log").open("w") as log:
        print(f"logged in as {HF}", file=RedactingFile(log))
    for file in tmp_path.iterdir():
        assert "hidden77" not in file.read_text() and HF not in file.read_text(), file
    assert "401 for ***" in worker_errors(tmp_path)
    assert OmegaConf.load(tmp_path / "config.yaml").env.max_turns == config.env.max_turns


def test_nothing_secret_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    assert command.main(["--cfg", "model=tiny", "device=cpu", "+x.password=hidden77"]) == 0
    assert "hidden77" not in capsys.readouterr().out

    def fail(*args, **kwargs):
        raise command.ConfigError(f"no such model with {HF}")

    monkeypatch.setattr(command, "train", fail)
    assert command.main([]) == 1
    assert capsys.readouterr().err == "error: no such model with ***\n"


def test_a_redacting_file_is_a_file():
    file = io.StringIO()
    wrapped = RedactingFile(file)
    assert wrapped.write(HF) == len(HF)
    wrapped.flush()
    assert file.getvalue() == "***" and wrapped.writable()


def test_trackers_get_a_configuration_without_secrets():
    given = without_secrets(lambda project_name, config: (project_name, config))(
        project_name="p", config={"a": {"token": "hidden77"}, "n": 1}
    )
    assert given == ("p", {"a": {"token": "***"}, "n": 1})
