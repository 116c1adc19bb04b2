"""An existing run directory belongs to one process and to one run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from verl.agentopsd import run_guard
from verl.agentopsd.checkpoints import CheckpointFailed
from verl.agentopsd.evaluation.records import RecordError, RecordWriter
from verl.agentopsd.main import GROUPS, compose_config, config_group, prepare, take_options
from verl.agentopsd.run_guard import ConfigChanged, RunDirLocked, UnsafeCheckpoint
from verl.agentopsd.task_runner import write_run_files


def config(run_dir: Path, *overrides: str):
    made = compose_config(["model=tiny", "device=cpu", f"run_dir={run_dir}", *overrides])
    prepare(made)
    return made


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with a checkpoint of update 4."""
    made = config(tmp_path)
    OmegaConf.resolve(made)
    write_run_files(made)
    actor = tmp_path / "checkpoints" / "global_step_4" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    model = Path(made.actor_rollout_ref.model.path)
    (actor / "huggingface" / "config.json").write_text((model / "config.json").read_text())
    torch.save({"a": torch.ones(2)}, actor / "model_world_size_1_rank_0.pt")
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    return tmp_path


def test_the_same_settings_pass(run_dir: Path):
    made = config(run_dir)
    run_guard.check_unchanged(made)
    run_guard.check_checkpoint(made)


@pytest.mark.parametrize(
    "override",
    [
        "trainer.total_training_steps=99",
        "trainer.save_freq=3",
        "limits.rollout=60",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "env.max_concurrent_episodes=3",
        "data.val_max_samples=5",
        "trainer.logger=[console]",
        "ray_kwargs.ray_init.num_cpus=4",
    ],
)
def test_what_changes_no_number_may_change(run_dir: Path, override: str):
    run_guard.check_unchanged(config(run_dir, override))


def test_a_directory_may_move(run_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    moved = tmp_path_factory.mktemp("moved") / "run"
    run_dir.rename(moved)
    run_guard.check_unchanged(config(moved))


def test_a_change_is_refused_with_every_difference_once(run_dir: Path):
    changed = config(run_dir, "agentopsd.lambda=0.3", "env.seed=7")
    OmegaConf.update(changed, "agentopsd.teacher.extra", 1, force_add=True)  # as of a version that knows more keys
    with pytest.raises(ConfigChanged) as error:
        run_guard.check_unchanged(changed)
    lines = str(error.value).splitlines()
    assert lines[0].endswith("would be resumed after update 4 with other settings:")
    assert lines[1:-1] == [
        "  agentopsd.lambda: 0.5 -> 0.3",
        "  agentopsd.teacher.extra: (absent) -> 1",
        "  env.seed: 0 -> 7",
    ]
    assert "--allow-config-change agentopsd.lambda (and so on for each)" in lines[-1]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("env.max_turns_schedule=[[0,10],[5,20]]", r"env.max_turns_schedule: .* -> \[\[0, 10\], \[5, 20\]\]"),
        ("env.invalid_action_penalty=0.1", r"env.invalid_action_penalty: 0.0 -> 0.1"),
        ("data.sampling.strategy=difficulty", r'data.sampling.strategy: "shuffle" -> "difficulty"'),
        ("agentopsd.base_estimator=rloo", r'agentopsd.base_estimator: "grpo" -> "rloo"'),
    ],
)
def test_a_schedule_is_no_detail(run_dir: Path, override: str, line: str):
    with pytest.raises(ConfigChanged, match=line):
        run_guard.check_unchanged(config(run_dir, override))


def test_an_override_of_a_key_that_usually_repeats_another_is_not_dropped(run_dir: Path):
    started = config(run_dir, "data.seed=7")
    OmegaConf.resolve(started)
    write_run_files(started)
    run_guard.check_unchanged(config(run_dir, "data.seed=7"))
    with pytest.raises(ConfigChanged, match=r"settings:\n  data.seed: 7 -> 0\nGive the old values"):
        run_guard.check_unchanged(config(run_dir))


PRESETS = [f"{group}={choice}" for group in GROUPS for choice in config_group(group)]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_resumed_with_the_same_settings(tmp_path: Path, preset: str):
    overrides = [preset, f"run_dir={tmp_path}"]
    (tmp_path / "checkpoints" / "global_step_4").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    made = compose_config(overrides)
    start = OmegaConf.create(OmegaConf.to_container(made, resolve=True))
    OmegaConf.save(start, tmp_path / "config.yaml")
    run_guard.check_unchanged(made)


def test_an_allowed_change_passes_by_key_and_by_section(run_dir: Path):
    changed = config(run_dir, "agentopsd.lambda=0.3", "env.seed=7")
    run_guard.check_unchanged(changed, ["agentopsd", "env.seed"])
    with pytest.raises(ConfigChanged, match="env.seed"):
        run_guard.check_unchanged(changed, ["agentopsd.lambda"])


def test_the_length_of_the_run_is_no_detail_when_the_learning_rate_follows_it(run_dir: Path):
    cosine = config(run_dir, "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine")
    OmegaConf.resolve(cosine)
    write_run_files(cosine)
    longer = ["actor_rollout_ref.actor.optim.lr_scheduler_type=cosine", "trainer.total_training_steps=99"]
    with pytest.raises(ConfigChanged, match="trainer.total_training_steps: 20 -> 99"):
        run_guard.check_unchanged(config(run_dir, *longer))


@pytest.mark.parametrize("method", ["rlsd", "skill_sd"])
def test_the_length_of_the_run_is_no_detail_when_a_schedule_follows_it(run_dir: Path, method: str):
    started = config(run_dir, f"method={method}")
    OmegaConf.resolve(started)
    write_run_files(started)
    run_guard.check_unchanged(config(run_dir, f"method={method}"))
    with pytest.raises(ConfigChanged, match=r"warmdown_steps: 20 -> 99\n"):
        run_guard.check_unchanged(config(run_dir, f"method={method}", "trainer.total_training_steps=99"))


def test_without_an_update_or_without_resuming_anything_goes(run_dir: Path):
    run_guard.check_unchanged(config(run_dir, "agentopsd.lambda=0.3", "trainer.resume_mode=disable"))
    (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").unlink()
    (run_dir / "metrics.jsonl").write_text('{"step": 0, "data": {"val/success_rate": 0.2}}\n')
    run_guard.check_unchanged(config(run_dir, "agentopsd.lambda=0.3"))


def test_records_without_a_checkpoint_are_not_deleted_by_another_run(run_dir: Path):
    (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").unlink()
    (run_dir / "metrics.jsonl").write_text('{"step": 0, "data": {}}\n{"step": 1, "data": {}}\n{"step": 2, "da')
    run_guard.check_unchanged(config(run_dir))  # the same run, interrupted before its first checkpoint
    with pytest.raises(ConfigChanged, match="would be started anew, its records deleted, with other settings"):
        run_guard.check_unchanged(config(run_dir, "agentopsd.lambda=0.3"))
    with pytest.raises(ConfigChanged, match="holds a finished run of 2 updates and no checkpoint of it"):
        run_guard.check_unchanged(config(run_dir, "trainer.total_training_steps=2"))


def test_checkpoints_without_a_pointer_are_no_start_from_nothing(run_dir: Path):
    pointer, metrics = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt", run_dir / "metrics.jsonl"
    pointer.unlink()
    metrics.write_text('{"step": 3, "data": {}}\n')  # killed before update 4 was complete
    made = config(run_dir)
    run_guard.check_unchanged(made)
    metrics.write_text('{"step": 3, "data": {}}\n{"step": 4, "data": {}}\n{"step": 5, "data": {}}\n')
    with pytest.raises(CheckpointFailed, match=rf"^{pointer} is missing, .* metrics of 5 .*: write one of \[4\] into"):
        run_guard.check_unchanged(made)
    (run_dir / "config.yaml").unlink()
    with pytest.raises(CheckpointFailed, match=r"write one of \[4\]"):
        run_guard.check_unchanged(made)
    for mode in ("disable", "resume_path"):
        made.trainer.resume_mode = mode
        run_guard.check_unchanged(made)


def test_the_settings_so_far_are_kept_beside_the_new_ones(run_dir: Path):
    changed = config(run_dir, "agentopsd.lambda=0.3")
    OmegaConf.resolve(changed)
    write_run_files(changed)
    assert OmegaConf.load(run_dir / "config-1.yaml").agentopsd["lambda"] == 0.5
    assert OmegaConf.load(run_dir / "config.yaml").agentopsd["lambda"] == 0.3


def test_a_checkpoint_of_another_model_size_is_refused(run_dir: Path):
    saved = run_dir / "checkpoints" / "global_step_4" / "actor" / "huggingface" / "config.json"
    other = json.loads(saved.read_text()) | {"hidden_size": 4096, "num_hidden_layers": 1}
    mine = json.loads(saved.read_text())
    saved.write_text(json.dumps(other))
    with pytest.raises(ConfigChanged) as error:
        run_guard.check_checkpoint(config(run_dir))
    expected = f"(hidden_size 4096 -> {mine['hidden_size']}, num_hidden_layers 1 -> {mine['num_hidden_layers']})"
    assert "is of another model than actor_rollout_ref.model.path=" in str(error.value)
    assert f"{expected}: give its model, or another run_dir" in str(error.value)


def test_another_number_of_ranks_is_refused_where_the_shards_cannot_be_cut_anew(run_dir: Path):
    actor = run_dir / "checkpoints" / "global_step_4" / "actor"
    (actor / "fsdp_config.json").write_text('{"FSDP_version": 1, "world_size": 1}')
    with pytest.raises(ConfigChanged, match=r"was written by 1 ranks and this run has 2 .*only shards of FSDP2"):
        run_guard.check_checkpoint(config(run_dir, "trainer.n_gpus_per_node=2"))
    (actor / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
    two = config(run_dir, "trainer.n_gpus_per_node=2")
    run_guard.check_checkpoint(two)
    run_guard.check_unchanged(two)


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def test_a_checkpoint_that_would_run_code_is_refused(run_dir: Path):
    file = run_dir / "checkpoints" / "global_step_4" / "data.pt"
    torch.save({"x": Evil()}, file)
    with pytest.raises(UnsafeCheckpoint, match=r"data.pt asks for posix.system, .*set trust_checkpoint=true"):
        run_guard.check_checkpoint(config(run_dir))
    run_guard.check_checkpoint(config(run_dir, "trust_checkpoint=true"))


def test_a_function_behind_the_name_of_a_module_of_torch_is_refused(run_dir: Path):
    file = run_dir / "checkpoints" / "global_step_4" / "data.pt"
    payload = b"\x80\x04ctorch.distributed.tensor._api\ntorch.os.system\nX\x04\x00\x00\x00true\x85R."
    writer = torch._C.PyTorchFileWriter(str(file))
    writer.write_record("data.pkl", payload, len(payload))
    writer.write_end_of_file()
    with pytest.raises(UnsafeCheckpoint, match=r"asks for torch.distributed.tensor._api.torch.os.system, which"):
        run_guard.check_checkpoint(config(run_dir))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-200])


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("model_world_size_1_rank_0.pt", cut),
        ("model_world_size_1_rank_0.pt", lambda file: file.write_bytes(b"")),
        ("model_world_size_1_rank_0.pt", lambda file: file.write_bytes(b"weights" * 99)),
        ("huggingface/config.json", lambda file: file.write_text('{"hidden_size": 12')),
        ("huggingface/config.json", lambda file: file.write_text("3")),
        ("fsdp_config.json", lambda file: file.write_bytes(b"\xff")),
    ],
)
def test_a_damaged_file_is_one_sentence_with_the_other_checkpoints(run_dir: Path, name: str, spoil):
    actor = run_dir / "checkpoints" / "global_step_4" / "actor"
    spoil(actor / name)
    more = ["trainer.n_gpus_per_node=2"] if name == "fsdp_config.json" else []
    made = config(run_dir, *more)
    with pytest.raises(CheckpointFailed, match=rf"{name} is damaged \(.+\); there is no other checkpoint beside it: "):
        run_guard.check_checkpoint(made)
    other = run_dir / "checkpoints" / "global_step_2"
    other.mkdir()
    with pytest.raises(CheckpointFailed, match=rf"are of the updates \[2\]: .*trainer.resume_from_path={other}$"):
        run_guard.check_checkpoint(made)


def test_a_checkpoint_that_is_asked_for_by_path_is_checked_like_the_latest(run_dir: Path):
    elsewhere = run_dir / "kept" / "global_step_2"
    shutil.copytree(run_dir / "checkpoints" / "global_step_4", elsewhere)
    asked = config(run_dir, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={elsewhere}")
    assert run_guard.resumed_checkpoint(asked) == elsewhere
    run_guard.check_checkpoint(asked)
    torch.save({"x": Evil()}, elsewhere / "data.pt")
    with pytest.raises(UnsafeCheckpoint):
        run_guard.check_checkpoint(asked)
    for wrong in (run_dir / "kept", run_dir / "kept" / "global_step_9"):
        asked.trainer.resume_from_path = str(wrong)
        with pytest.raises(CheckpointFailed, match=f"resume_from_path={wrong} is no checkpoint: give the path"):
            run_guard.check_checkpoint(asked)


def test_a_file_system_without_locks_is_not_taken_for_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_guard.fcntl, "flock", no_locks)
    with pytest.raises(RunDirLocked, match=r"file system without locks \(No locks available\)"):
        run_guard.lock_run_dir(tmp_path)
    with pytest.raises(RecordError, match=r"file system without locks \(No locks available\)"):
        RecordWriter(tmp_path / "a.jsonl")


def test_a_run_directory_is_locked_until_its_process_ends(tmp_path: Path):
    code = "import sys; from pathlib import Path; from verl.agentopsd.run_guard import lock_run_dir\n"
    code += "lock = lock_run_dir(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdout.readline() == "locked\n"
    with pytest.raises(RunDirLocked, match=rf"is being used by process {other.pid} on .*: wait for it to end"):
        run_guard.lock_run_dir(tmp_path)
    other.kill()
    other.wait()
    with run_guard.lock_run_dir(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()
    run_guard.lock_run_dir(tmp_path).close()


def test_episodes_that_will_be_played_again_are_dropped(tmp_path: Path):
    for folder in ("rollouts", "validation"):
        (tmp_path / folder).mkdir()
        for step in (0, 1, 2, 3):
            (tmp_path / folder / f"{step:06d}.jsonl").touch()
    (tmp_path / "rollouts" / "mine.jsonl").touch()
    (tmp_path / "validation" / "000003-with-skill.jsonl").touch()
    faults = tmp_path / "env-errors.jsonl"
    faults.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 2, "ga')
    assert run_guard.drop_later(tmp_path, 2) == 3
    assert faults.read_text() == '{"step": 1}\n{"step": 2}\n'
    names = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    assert names == ["000000.jsonl", "000001.jsonl", "000002.jsonl", "mine.jsonl"]
    assert run_guard.drop_later(tmp_path, 0) == 6 and faults.read_text() == ""


def test_the_option_takes_a_value_in_both_forms():
    rest, keys = take_options(
        ["a=1", "--allow-config-change", "env", "--dry-run", "--allow-config-change=b.c"], run_guard.ALLOW
    )
    assert (rest, keys) == (["a=1", "--dry-run"], ["env", "b.c"])
    for arguments in (["--allow-config-change"], ["--allow-config-change", "--dry-run"]):
        with pytest.raises(ValueError, match="--allow-config-change needs a key"):
            take_options(arguments, run_guard.ALLOW)
