"""Tokens and keys do not reach files, logs or the screen; numbers and names that only sound like them do."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from verl.agentopsd import main as command
from verl.agentopsd.contract import ContractViolation, check_teacher
from verl.agentopsd.env_faults import report_faults
from verl.agentopsd.envs.base import EnvironmentFault
from verl.agentopsd.episodes import Episode
from verl.agentopsd.main import compose_config
from verl.agentopsd.redact import RedactingFile, is_secret_name, redact, redact_config, without_secrets
from verl.agentopsd.rollout.agent_loop import TextEnvAgentLoop
from verl.agentopsd.rollout.failures import report, worker_errors
from verl.agentopsd.task_runner import write_run_files
from verl.agentopsd.watchdog import write_stacks

HF = "hf_" + "AbCdEfGhIjKlMnOpQrStUv"
KEY = "sk-" + "a1b2c3d4e5f6g7h8i9j0k1"
JWT = "eyJhbGciOiJIUzI1NiJ9." + "eyJzdWIiOiIxMjM0In0" + ".abc-DEF_1"
SLACK = "xoxb-" + "123456789-abcdefgh"


@pytest.mark.parametrize(
    "name",
    [
        *("hf_token", "HF_TOKEN", "WANDB_API_KEY", "token", "db.password", "AWS_SECRET_ACCESS_KEY"),
        *("secret_key", "credentials", "api-key", "Authorization"),
    ],
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
        ("Authorization: Bearer abc.def-1", "Authorization: Bearer ***"),
        ("{'Authorization': 'Basic abc=', 'n': 1}", "{'Authorization': 'Basic ***', 'n': 1}"),
        ("Authorization: a1b2c3d4e5", "Authorization: ***"),
        ("sent Bearer a1b2c3d4e5, got 401", "sent Bearer ***, got 401"),
        (f"signed {JWT}.", "signed ***."),
        ("secret_key=abc", "secret_key=***"),
        ("+x.credentials=abc", "+x.credentials=***"),
        ("GET https://h/p?a=1&token=abc&b=2", "GET https://h/p?a=1&token=***&b=2"),
        ("clone https://ghp_x@host/r", "clone https://***@host/r"),
        ("clone https://me:p@ss@host/r", "clone https://***@host/r"),
        ("run --api-key abc --n 3", "run --api-key *** --n 3"),
        ("['--api-key', 'a b', '--n']", "['--api-key', ***, '--n']"),
        ("--hf-token=abc", "--hf-token=***"),
        (f"as {SLACK} ok", "as *** ok"),
        ("token='abc def' n=1", "token=*** n=1"),
        ('password="a\\"b c" n=1', "password=*** n=1"),
        ("token='never closed\nnext", "token=***\nnext"),
        (r"{\"api_key\": \"a b\", \"n\": 1}", r"{\"api_key\": ***, \"n\": 1}"),
        ('{"argv": "+x.password=abc"}', '{"argv": "+x.password=***"}'),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx", "***\nx"),
    ],
)
def test_secrets_are_hidden_in_texts(text: str, shown: str):
    assert redact(text) == shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens=5",
        "--max-tokens 5",
        "agentopsd.evidence=token_mean",
        "teacher/tokens",
        "rollout/tokens_sampled=5 tokens: 7",
        "pad_token_id=3 tokenizer: x key=3 keys: [1]",
        "action token 2 is not finite",
        "the bearer certificates",
        "authorization failed: see https://h/doc1",
        "ssh://git@github.com/x http://h/x?mail=a@b.com me@h.org",
        "game train/a-b.c, turn 3: step: KeyError: 'inner'",
    ],
)
def test_ordinary_words_are_left_alone(text: str):
    assert redact(text) == text


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


def played(fault: str) -> Episode:
    """One row from the agent loop, of an episode that ends at once; with an error where ``fault`` is given."""

    class Loop(TextEnvAgentLoop):
        def __init__(self) -> None:
            self.context = SimpleNamespace(
                **{"seed": 0, "max_turns": 2, "episode_timeout": 60, "executor": None, "max_concurrent_episodes": 1},
                **{"chat": SimpleNamespace(end_of_turn_id=0), "skill_position": "user", "success_reward": 1.0},
            )  # type: ignore[assignment]
            self.server_manager = SimpleNamespace()

        async def _play(self, *given: Any) -> None:
            if fault:
                raise EnvironmentFault(fault)

    info = {"game_id": "train/a", "split": "train", "task_type": "find", "path": ""}
    row = asyncio.run(Loop()._episode({}, extra_info=info))
    zeros = torch.zeros(len(row.response_ids))
    tensors = torch.tensor(row.prompt_ids), torch.tensor(row.response_ids), zeros.bool(), zeros, zeros
    return Episode(f"000001-0000_{int(bool(fault))}_0", *tensors, 0.0, row.extra_fields)


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
    lost, won = played(f"401 for https://me:hidden77@h/ with {HF}"), played("")
    report_faults([lost, won], step=1, max_share=1.0, run_dir=tmp_path)
    won.facts["messages"] = [{"role": "user", "content": f"password='a hidden77' {HF}"}]
    with pytest.raises(ContractViolation):
        check_teacher({"a": won}, {"a": torch.zeros(5)}, 1, tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", "--api-key", "hidden77", f"+hf_token={HF}"]
    )
    try:
        write_stacks(tmp_path / "stalled-update.txt")
    finally:
        child.kill()
        child.wait()
    assert f"=== {child.pid} " in (tmp_path / "stalled-update.txt").read_text()
    names = {file.name for file in tmp_path.iterdir()}
    assert names >= {"env-errors.jsonl", "contract-violation.json", "stalled-update.txt", "worker-errors.log"}
    for file in tmp_path.iterdir():
        assert "hidden77" not in file.read_text() and HF not in file.read_text(), file
    assert "401 for https://***@h/ with ***" in (tmp_path / "env-errors.jsonl").read_text()
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
