"""What a user can get wrong, one table: the value or the file, and the exact sentence that refuses it."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl.agentopsd import task_runner, value_checks
from verl.agentopsd.config import ConfigError, validate
from verl.agentopsd.envs.alfworld.games import discover, load_game
from verl.agentopsd.evaluation.records import read_records
from verl.agentopsd.main import compose_config, main
from verl.agentopsd.rollout.chat import ChatFormat, ChatFormatError
from verl.agentopsd.skills.bank import SkillBank

TINY = ["model=tiny", "device=cpu"]

WHOLE_1, FLAG, SPLIT = "a whole number, at least 1", "true or false", "the name of a split, or a list of them"
POSITIVE, NOT_NEGATIVE = "a number, greater than 0", "a number, at least 0"
SHARE = "a number, greater than 0 and at most 1"
MEGATRON = ("tensor_model", "pipeline_model", "context")
FREQUENCY = "a whole number of updates, or -1 for never"

VALUES = [
    ("agentopsd.base_estimator", "3", "3", "a text"),
    ("agentopsd.max_logprob_gap", "0", "0", POSITIVE),
    ("agentopsd.teacher.skills", "null", "None", "a text"),
    ("env.check_counts", "maybe", "maybe", FLAG),
    ("env.show_admissible", "1", "1", FLAG),
    ("env.data_dir", "5", "5", "null, or a text"),
    ("env.reset_timeout", "0", "0", POSITIVE),
    ("env.step_timeout", "-1", "-1", POSITIVE),
    ("env.workers", "0", "0", WHOLE_1),
    ("env.episodes_per_worker", "2.5", "2.5", WHOLE_1),
    ("env.worker_memory_mb", "1", "1", "a whole number, at least 64"),
    ("env.generated.dir", "[]", "[]", "null, or a text"),
    ("env.generated.train", "0", "0", WHOLE_1),
    ("env.generated.valid_seen", "many", "many", WHOLE_1),
    ("env.generated.valid_unseen", "-3", "-3", WHOLE_1),
    ("env.generated.seed", "-1", "-1", "a whole number, at least 0"),
    ("env.name", "''", "", "a text"),
    ("run_dir", "7", "7", "a text"),
    ("trust_checkpoint", "1", "1", FLAG),
    ("hardware.gpu", "3", "3", "a text"),
    ("hardware.gpus_per_node", "0", "0", WHOLE_1),
    ("hardware.sequence_parallel", "0", "0", WHOLE_1),
    ("hardware.tensor_parallel", "-1", "-1", WHOLE_1),
    ("hardware.rollout_tensor_parallel", "two", "two", WHOLE_1),
    ("hardware.rollout_memory", "1.5", "1.5", SHARE),
    ("hardware.optimizer_offload", "1", "1", FLAG),
    ("hardware.cpu_micro_batch", "0", "0", WHOLE_1),
    ("hardware.cpu_weight_bucket_megabytes", "0", "0", WHOLE_1),
    *((f"limits.{stage}", "0", "0", POSITIVE) for stage in ("start", "rollout", "validation", "log_prob")),
    *((f"limits.{stage}", "inf", "inf", POSITIVE) for stage in ("teacher", "update", "weight_sync", "save")),
    ("data.train_files", "[]", "[]", SPLIT),
    ("data.val_files", "[1]", "[1]", SPLIT),
    ("data.train_batch_size", "0", "0", WHOLE_1),
    ("data.train_max_samples", "-2", "-2", "a whole number, at least -1"),
    ("data.val_max_samples", "all", "all", "a whole number, at least -1"),
    ("data.max_prompt_length", "0", "0", WHOLE_1),
    ("data.max_response_length", "1e3", "1000.0", WHOLE_1),
    ("data.dataloader_num_workers", "-1", "-1", "a whole number, at least 0"),
    ("data.shuffle", "random", "random", FLAG),
    ("data.trust_remote_code", "3", "3", FLAG),
    ("actor_rollout_ref.model.path", "null", "None", "a text"),
    ("actor_rollout_ref.model.trust_remote_code", "yes_please", "yes_please", FLAG),
    ("actor_rollout_ref.model.lora_rank", "low", "low", "a whole number, at least 0"),
    ("actor_rollout_ref.actor.ppo_mini_batch_size", "two", "two", WHOLE_1),
    *(
        (f"actor_rollout_ref.{name}{per_gpu}", given, given, f"null, or {WHOLE_1}")
        for name in ("actor.ppo_micro_batch_size", "ref.log_prob_micro_batch_size", "rollout.log_prob_micro_batch_size")
        for per_gpu, given in (("", "-4"), ("_per_gpu", "two"))
    ),
    ("actor_rollout_ref.actor.use_dynamic_bsz", "sometimes", "sometimes", FLAG),
    ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "0", "0", WHOLE_1),
    ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", "many", "many", WHOLE_1),
    ("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu", "null", "None", WHOLE_1),
    ("actor_rollout_ref.actor.clip_ratio", "null", "None", NOT_NEGATIVE),
    ("actor_rollout_ref.actor.clip_ratio_low", "-0.2", "-0.2", f"null, or {NOT_NEGATIVE}"),
    ("actor_rollout_ref.actor.clip_ratio_high", "inf", "inf", f"null, or {NOT_NEGATIVE}"),
    ("actor_rollout_ref.actor.clip_ratio_c", "1", "1", "a number, greater than 1"),
    ("actor_rollout_ref.actor.kl_loss_coef", "-0.01", "-0.01", NOT_NEGATIVE),
    ("algorithm.kl_ctrl.kl_coef", "inf", "inf", NOT_NEGATIVE),
    ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "0", "0", WHOLE_1),
    ("actor_rollout_ref.ref.ulysses_sequence_parallel_size", "0", "0", WHOLE_1),
    *((f"actor_rollout_ref.actor.megatron.{of}_parallel_size", "0", "0", WHOLE_1) for of in MEGATRON),
    *((f"actor_rollout_ref.rollout.{of}_parallel_size", "0", "0", WHOLE_1) for of in ("tensor_model", "data")),
    *((f"actor_rollout_ref.rollout.{of}_parallel_size", "x", "x", WHOLE_1) for of in ("pipeline_model", "expert")),
    ("actor_rollout_ref.rollout.gpu_memory_utilization", "0", "0", SHARE),
    ("actor_rollout_ref.rollout.max_model_len", "abc", "abc", f"null, or {WHOLE_1}"),
    ("actor_rollout_ref.rollout.nnodes", "-1", "-1", "a whole number, at least 0"),
    ("actor_rollout_ref.actor.ppo_epochs", "0", "0", WHOLE_1),
    ("actor_rollout_ref.actor.optim.lr", "nan", "nan", "a number, at least 0"),
    ("actor_rollout_ref.rollout.n", "0", "0", WHOLE_1),
    ("actor_rollout_ref.rollout.temperature", "0", "0", POSITIVE),
    ("actor_rollout_ref.rollout.agent.num_workers", "0", "0", WHOLE_1),
    ("trainer.total_training_steps", "0", "0", WHOLE_1),
    ("trainer.total_epochs", "null", "None", WHOLE_1),
    ("trainer.save_freq", "0", "0", FREQUENCY),
    ("trainer.test_freq", "often", "often", FREQUENCY),
    ("trainer.val_before_train", "2", "2", FLAG),
    ("trainer.max_actor_ckpt_to_keep", "0", "0", "null, or a whole number, at least 1"),
    ("trainer.n_gpus_per_node", "0", "0", WHOLE_1),
    ("trainer.nnodes", "-1", "-1", WHOLE_1),
]


@pytest.mark.parametrize(("key", "given", "shown", "must_be"), VALUES, ids=[row[0] for row in VALUES])
def test_a_value_that_cannot_be_is_refused_with_its_key(key: str, given: str, shown: str, must_be: str):
    with pytest.raises(ConfigError) as error:
        validate(compose_config([*TINY, f"{'++' if 'megatron' in key else ''}{key}={given}"]))
    assert f"{key}={shown}: must be {must_be}" in str(error.value).splitlines()


def test_the_table_above_has_every_check():
    assert {row[0] for row in VALUES} == set(value_checks.CHECKS)


@pytest.mark.parametrize("size", ["actor.ppo_micro_batch_size", "rollout.log_prob_micro_batch_size_per_gpu"])
def test_null_stays_where_verl_fills_it_in(size: str):
    validate(compose_config([*TINY, f"actor_rollout_ref.{size}=null", "actor_rollout_ref.actor.clip_ratio_low=null"]))
    validate(compose_config([*TINY, "actor_rollout_ref.rollout.max_model_len=null"]))


def test_what_is_computed_from_a_bad_value_is_not_named_as_well():
    with pytest.raises(ConfigError) as error:
        validate(compose_config(["model=qwen2.5_3b", "device=gpu", "hardware.sequence_parallel=0"]))
    assert {line.split("=")[0] for line in str(error.value).splitlines()} == {
        "hardware.sequence_parallel",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
    }
    with pytest.raises(ConfigError) as error:
        validate(compose_config([*TINY, "data.max_prompt_length=abc"]))
    assert str(error.value) == f"data.max_prompt_length=abc: must be {WHOLE_1}"


OWN = ("agentopsd", "env", "hardware", "limits")


def test_no_setting_of_ours_takes_just_anything():
    """Every leaf of our own sections refuses a value of an impossible kind, by name, before anything is started."""
    composed = compose_config(TINY)
    sections = {name: OmegaConf.to_container(composed[name], resolve=False) for name in OWN}
    accepted = []
    for key in [f"{name}.{leaf}" for name, tree in sections.items() for leaf in leaves(tree)]:
        config = composed.copy()
        OmegaConf.update(config, key, {"no": "such value"}, merge=False)
        try:
            validate(config)
        except (ConfigError, ValueError) as error:
            if key not in str(error):
                accepted.append(f"{key}: {error}")
        else:
            accepted.append(key)
    assert accepted == []


def leaves(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for name, value in tree.items():
        nested = isinstance(value, dict) and value
        found += leaves(value, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]  # type: ignore[arg-type]
    return found


def test_log_probs_of_another_engine_are_refused():
    with pytest.raises(ConfigError, match="bypass_mode=true: the actor's log-probs would be the sampler's"):
        validate(compose_config([*TINY, "++algorithm.rollout_correction.bypass_mode=true"]))


# -- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def game(alfworld_data: Path, tmp_path: Path) -> Path:
    """A copy of a real game's folder, at its place in a data folder."""
    task = discover(alfworld_data, "valid_unseen")[0]
    return Path(shutil.copytree(Path(task.path).parent, tmp_path / "json_2.1.1" / task.game_id))


def old_put(data: dict[str, Any]) -> str:
    return json.dumps(
        data | {"grammar": data["grammar"].replace('template :: "move {o} to {r}"', 'template :: "put {o} in/on {r}"')}
    )


GAME_FILES: list[tuple[str, Callable[[dict[str, Any]], str | bytes | None], str]] = [
    ("missing", lambda data: None, "game.tw-pddl: cannot be read (No such file or directory)"),
    ("empty", lambda data: "", "game.tw-pddl: not readable as JSON (Expecting value: line 1 column 1 (char 0))"),
    ("cut", lambda data: json.dumps(data)[:1000], "game.tw-pddl: not readable as JSON ("),
    ("binary", lambda data: b"\xff\xfe\x00", "game.tw-pddl: not readable as JSON ('utf-8' codec can't decode"),
    ("list", lambda data: "[]", "game.tw-pddl: not a game file (a JSON list, not an object)"),
    ("no problem", lambda data: json.dumps({**data, "pddl_problem": None}), "pddl_problem is no text"),
    ("old grammar", old_put, 'this file has the old "put X in/on Y" wording; ALFWorld now says "move X to Y"'),
    ("unsolvable", lambda data: json.dumps({**data, "solvable": False}), "solvable"),
]


@pytest.mark.parametrize(("kind", "spoil", "message"), GAME_FILES, ids=[row[0] for row in GAME_FILES])
def test_a_bad_game_file_is_refused_by_name(game: Path, kind: str, spoil: Any, message: str):
    file = game / "game.tw-pddl"
    spoiled = spoil(json.loads(file.read_text()))
    file.unlink() if spoiled is None else file.write_bytes(spoiled if isinstance(spoiled, bytes) else spoiled.encode())
    with pytest.raises(ValueError) as error:
        load_game(game)
    assert message in str(error.value) and str(game) in str(error.value)


def test_wrong_counts_are_refused_with_both_numbers(game: Path, capsys: pytest.CaptureFixture[str]):
    data_dir = game.parents[3]
    assert main(["--dry-run", *TINY, f"env.data_dir={data_dir}", "data.train_files=valid_unseen"]) == 1
    shown = capsys.readouterr().err
    assert "split 'valid_unseen' has 1 games below" in shown and "expected 134" in shown
    assert "env.check_counts=false" in shown


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no skill set .*: give a built-in name .* or a directory that contains general.md"),
        (b"", "general.md is empty"),
        (b"  \n\t\n", "general.md is empty"),
        ("Überall".encode("latin-1"), "general.md is not UTF-8"),
    ],
)
def test_a_bad_skill_file_is_refused_by_name(tmp_path: Path, content: bytes | None, message: str):
    if content is not None:
        (tmp_path / "general.md").write_bytes(content)
    with pytest.raises(LookupError, match=message):
        SkillBank.load(str(tmp_path), ("pick",), on_missing="general")


def tokenizer(template: str | None) -> Any:
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(str(compose_config(TINY).actor_rollout_ref.model.path))
    made.chat_template = template
    return made


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            None,
            "has no chat template: use an instruction-tuned model, or set actor_rollout_ref.model.custom_chat_template",
        ),
        (
            "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}",
            "does not end the assistant's turn with a special token",
        ),
        ("{{ raise_exception('no') }}", "refuses a conversation of"),
    ],
)
def test_a_model_that_cannot_converse_is_refused(template: str | None, message: str):
    with pytest.raises(ChatFormatError) as error:
        ChatFormat(tokenizer(template), {})
    assert message in str(error.value)


def test_a_records_file_with_a_torn_tail_is_read_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    file = tmp_path / "records.jsonl"
    file.write_bytes(b'{"kind": "episode", "sch')
    assert len(read_records(file)) == 0
    assert "the last line is torn and left out: its writer stopped in it" in caplog.text


# -- the machine -----------------------------------------------------------------------------------------------------


def test_a_read_only_output_directory_is_one_sentence(
    tmp_path: Path, alfworld_data: Path, monkeypatch: pytest.MonkeyPatch
):
    def read_only(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", read_only)
    with pytest.raises(task_runner.RunDirError) as error:
        task_runner.prepare_run_dir(compose_config([*TINY, f"run_dir={tmp_path}"]))
    assert str(error.value) == f"run_dir={tmp_path} cannot be written (Read-only file system): choose another folder"


def test_no_space_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(task_runner.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    with pytest.raises(task_runner.RunDirError) as error:
        task_runner.prepare_run_dir(compose_config([*TINY, f"run_dir={tmp_path}"]))
    assert str(error.value) == (
        f"run_dir={tmp_path}: 1.0 GiB free, a run needs 2 GiB for checkpoints and records: free some space or choose a "
        "folder on another disk"
    )


def test_a_disk_that_fills_up_while_records_are_written_is_one_sentence(tmp_path: Path):
    with pytest.raises(task_runner.RunDirError) as error, task_runner.explained(tmp_path, SimpleNamespace()):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert str(error.value).startswith(f"no space left on the disk of run_dir={tmp_path}: what was written until here")


def test_an_occupied_port_is_said_with_the_remedy(tmp_path: Path):
    log = SimpleNamespace(write=lambda text: None)
    with pytest.raises(task_runner.WorkerFailed) as error, task_runner.explained(tmp_path, log):
        import ray

        raise ray.exceptions.RayTaskError(
            "launch",
            "Traceback\n  ...\nOSError: [Errno 98] error while attempting to bind on address: address already in use",
            OSError(errno.EADDRINUSE, "Address already in use"),
        )
    assert "a worker process failed: " in str(error.value) and "address already in use" in str(error.value)
    assert f"(all of it in {tmp_path / 'verl.log'})" in str(error.value)


def test_nothing_trusts_foreign_code_unless_asked():
    config = compose_config(["model=qwen2.5_3b", "device=gpu"])
    flags = [key for key in all_keys(config) if key.endswith(("trust_remote_code", "trust_checkpoint"))]
    assert len(flags) >= 3 and not any(OmegaConf.select(config, key) for key in flags)


def all_keys(config: Any) -> list[str]:
    from verl.agentopsd.config import known_keys

    return known_keys(OmegaConf.to_container(config, resolve=False))
