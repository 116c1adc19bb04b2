"""What may be done with an existing run directory: one process at a time, and only the run that it holds."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.agentopsd.checkpoints import (
    POINTER,
    CheckpointFailed,
    latest_step,
    saved_steps,
    step_folder,
    write_atomically,
)
from verl.agentopsd.env_faults import FILE_NAME as ENV_ERRORS
from verl.agentopsd.redact import redact_config
from verl.agentopsd.reshard import CannotReshard, check_reshardable, saved_ranks

LOCK = ".lock"
CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
ALLOW = "--allow-config-change"

FREE = (
    # how long and how often
    *("trainer.total_training_steps", "trainer.total_epochs", "trainer.save_freq", "trainer.test_freq"),
    *("trainer.val_before_train", "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep", "limits"),
    *("actor_rollout_ref.actor.optim.total_training_steps", "critic.optim.total_training_steps"),
    # where things lie and who is told
    *("run_dir", "trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
    *("trainer.project_name", "trainer.experiment_name", "trainer.logger", "trainer.resume_mode"),
    *("trainer.resume_from_path", "trust_checkpoint", "trainer.v1.sampler.sampler_kwargs"),
    *("actor_rollout_ref.rollout.agent.agent_loop_config_path", "hydra", "global_profiler"),
    # which machines, how many helpers: they change no number, or its last digits
    *("trainer.nnodes", "trainer.n_gpus_per_node"),
    *("ray_kwargs", "hardware", "transfer_queue", "actor_rollout_ref.rollout.agent.num_workers"),
    "agentopsd.max_logprob_gap",
    "agentopsd.action_logits",  # moves the last digits, and is missing in what was run before there was such a switch
    *("env.workers", "env.max_concurrent_episodes", "env.reset_timeout", "env.step_timeout", "env.episode_timeout"),
    "data.env",  # a copy of env, which is compared itself
    *("env.episodes_per_worker", "env.worker_memory_mb", "env.max_error_share", "data.dataloader_num_workers"),
    # validation does not touch the training
    *("data.val_files", "data.val_max_samples", "data.val_batch_size", "actor_rollout_ref.rollout.val_kwargs"),
)
"""Settings, or whole sections, that a resumed run may change without being asked."""

_MODEL_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "tie_word_embeddings"),
)


class ConfigChanged(ValueError):
    """The run directory holds a run with other settings."""


class RunDirLocked(RuntimeError):
    """Another process is using the run directory."""


class UnsafeCheckpoint(ValueError):
    """A checkpoint file would run code when it is read."""


def lock_run_dir(run_dir: Path) -> TextIO:
    """Takes the run directory for this process, until the returned file is closed or the process ends.

    Raises:
        RunDirLocked: naming the process that has it.
    """
    file = (run_dir / LOCK).open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise RunDirLocked(
            f"run_dir={run_dir} is being used by {holder}: wait for it to end, or choose another run_dir"
        ) from None
    except OSError as error:
        file.close()
        raise RunDirLocked(
            f"run_dir={run_dir} lies on a file system without locks ({error.strerror}), so that two runs could meet in "
            "it: choose a folder on another disk"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def check_unchanged(config: DictConfig, allowed: Sequence[str] = ()) -> None:
    """Compares a run that will be resumed with the configuration it was started with.

    Args:
        config: of this start, resolvable.
        allowed: keys, or sections, whose change was asked for (``--allow-config-change``).

    Raises:
        ConfigChanged: with every difference.
        CheckpointFailed: which of the checkpoints to continue from is not written down.
    """
    run_dir = Path(config.run_dir)
    stored, step = run_dir / CONFIG, latest_step(run_dir / "checkpoints")
    if config.trainer.resume_mode == "auto" and step is None:
        _require_no_unnamed_checkpoint(run_dir)
    if not stored.is_file() or config.trainer.resume_mode == "disable":
        return
    if step is None:
        played = _updates(run_dir)
        if played == 0:
            return
        if played >= config.trainer.total_training_steps:
            raise ConfigChanged(
                f"run_dir={run_dir} holds a finished run of {played} updates and no checkpoint of it (trainer."
                f"save_freq={config.trainer.save_freq}): training it anew would delete its records, so choose another "
                "run_dir"
            )
    start = OmegaConf.load(stored)
    if not isinstance(start, DictConfig):
        raise ConfigChanged(f"{stored} holds no configuration: restore it from a copy, or choose another run_dir")
    free = {*FREE, *allowed, *_derived(config, start)}
    if _learning_rate_depends_on_length(config):
        free -= {"trainer.total_training_steps", "trainer.total_epochs", *_OPTIM_STEPS} - set(allowed)
    before, now = plain(start), plain(config)
    changes = [
        f"  {key}: {_shown(before, key)} -> {_shown(now, key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key, _ABSENT) != now.get(key, _ABSENT) and not _covered(key, free)
    ]
    if changes:
        keys = [change.split(":")[0].strip() for change in changes]
        raise ConfigChanged(
            f"run_dir={run_dir} holds a run that would be "
            + ("started anew, its records deleted," if step is None else f"resumed after update {step}")
            + " with other settings:\n"
            + "\n".join(changes)
            + f"\nGive the old values, another run_dir, or, if the change is meant, {ALLOW} {keys[0]}"
            + (" (and so on for each)" if len(keys) > 1 else "")
        )


def _require_no_unnamed_checkpoint(run_dir: Path) -> None:
    """Without its pointer a run with checkpoints would start from nothing and delete its records.

    A checkpoint of an update without metrics is none: the run was killed before that update was complete.
    """
    folder, played = run_dir / "checkpoints", _updates(run_dir)
    if complete := [step for step in saved_steps(folder) if step <= played]:
        raise CheckpointFailed(
            f"{folder / POINTER} is missing, but there are metrics of {played} updates, which a start from nothing "
            f"would delete: write one of {complete} into the file to continue from it, or choose another run_dir"
        )


def _derived(config: DictConfig, stored: DictConfig) -> set[str]:
    """Keys that repeat another key of the configuration, which is compared itself, now and in the stored run.

    A schedule over the length of the run repeats a key that is not, and is compared like any other.
    """
    own = ("${tiny_model:", "${cache:", "${oc.env:", "${now:")
    stored = stored.copy()
    return {
        key
        for key, value in _leaves(OmegaConf.to_container(config, resolve=False))
        if isinstance(value, str) and "${" in value and not value.startswith(own) and key not in _SCHEDULES
        if _gives_stored_value(stored, key, value)
    }


def _gives_stored_value(stored: DictConfig, key: str, interpolation: str) -> bool:
    """Whether the stored run's value is what the interpolation gives there, hence no override of its own."""
    before = OmegaConf.select(stored, key, default=_ABSENT)
    if before == _ABSENT:
        return False
    OmegaConf.update(stored, key, interpolation, merge=False)
    try:
        return bool(OmegaConf.select(stored, key) == before)
    except OmegaConfBaseException:  # it names a key that the stored run did not have
        return False
    finally:
        OmegaConf.update(stored, key, before, merge=False)


_SCHEDULES = {"agentopsd.warmdown_steps", "agentopsd.distill.warmdown_steps"}


_OPTIM_STEPS = ("actor_rollout_ref.actor.optim.total_training_steps", "critic.optim.total_training_steps")
_ABSENT = "(absent)"


def plain(config: Any) -> dict[str, Any]:
    """A configuration as ``{dotted key: value}``, resolved, without secrets."""
    tree = redact_config(OmegaConf.to_container(config, resolve=True))
    return dict(_leaves(json.loads(json.dumps(tree, default=str))))


def _leaves(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, Mapping) or not tree:
        return [(prefix.rstrip("."), tree)]
    return [leaf for key, value in tree.items() for leaf in _leaves(value, f"{prefix}{key}.")]


def _updates(run_dir: Path) -> int:
    """The last update in ``metrics.jsonl``; 0 without one."""
    file = run_dir / METRICS
    if not file.is_file():
        return 0
    found = re.findall(r'^\{"step": (\d+),', file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return max(map(int, found), default=0)


def _shown(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else _ABSENT


def _covered(key: str, sections: set[str]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:count]) in sections for count in range(1, len(parts) + 1))


def _learning_rate_depends_on_length(config: DictConfig) -> bool:
    optim = config.actor_rollout_ref.actor.optim
    warmup = float(optim.get("lr_warmup_steps_ratio") or 0)
    return optim.get("lr_scheduler_type", "constant") != "constant" or warmup > 0


def resumed_checkpoint(config: DictConfig) -> Path | None:
    """The folder of the checkpoint that a run would start from, None for a start from nothing.

    Raises:
        CheckpointFailed: the one that is asked for does not exist.
    """
    mode, named = config.trainer.resume_mode, config.trainer.resume_from_path
    if mode == "disable":
        return None
    if mode == "resume_path":
        if named is None or not Path(named).is_dir() or not re.fullmatch(r"global_step_\d+", Path(named).name):
            raise CheckpointFailed(
                f"trainer.resume_from_path={named} is no checkpoint: give the path of a folder global_step_N"
            )
        return Path(named)
    folder = Path(config.run_dir) / "checkpoints"
    step = latest_step(folder)
    return None if step is None else step_folder(folder, step)


def check_checkpoint(config: DictConfig) -> None:
    """Looks at the checkpoint that a resume would load: same model, shards that these ranks can load, no code in it.

    Raises:
        ConfigChanged: it belongs to another model, or to another number of ranks and cannot be cut anew.
        UnsafeCheckpoint: a file of it asks for code that a checkpoint does not need.
        CheckpointFailed: a file of it is damaged.
    """
    checkpoint = resumed_checkpoint(config)
    if checkpoint is None:
        return
    _check_model(config, checkpoint)
    _check_ranks(config, checkpoint / "actor")
    if not config.get("trust_checkpoint", False):
        for file in sorted(checkpoint.rglob("*.pt")):
            try:
                _check_pickle(file)
            except UnsafeCheckpoint:
                raise
            except Exception as error:  # torch tells damage in many ways
                raise _damaged(file, checkpoint, error) from error


def _damaged(file: Path, checkpoint: Path, error: Exception) -> CheckpointFailed:
    folder = checkpoint.parent
    others = [step for step in saved_steps(folder) if step_folder(folder, step) != checkpoint]
    remedy = (
        f"the other checkpoints there are of the updates {others}: continue from one with trainer.resume_mode="
        f"resume_path trainer.resume_from_path={step_folder(folder, others[-1])}"
        if others
        else "there is no other checkpoint beside it: restore the file from a copy, or choose another run_dir"
    )
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return CheckpointFailed(f"{file} is damaged ({reason}); {remedy}")


def _check_model(config: DictConfig, checkpoint: Path) -> None:
    saved = checkpoint / "actor" / "huggingface" / "config.json"
    current = Path(str(config.actor_rollout_ref.model.path)) / "config.json"
    if not saved.is_file() or not current.is_file():
        return
    try:
        before = dict(json.loads(saved.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise _damaged(saved, checkpoint, error) from error
    now = json.loads(current.read_text(encoding="utf-8"))
    different = [
        f"{key} {before[key]} -> {now[key]}"
        for key in _MODEL_SIZES
        if key in before and key in now and before[key] != now[key]
    ]
    if different:
        raise ConfigChanged(
            f"the checkpoint in {checkpoint} is of another model than actor_rollout_ref.model.path="
            f"{config.actor_rollout_ref.model.path} ({', '.join(different)}): give its model, or another run_dir"
        )


def _check_ranks(config: DictConfig, actor: Path) -> None:
    saved, ranks = saved_ranks(actor), config.trainer.n_gpus_per_node * config.trainer.nnodes
    if saved in (None, ranks):
        return
    try:
        check_reshardable(actor)
    except CannotReshard as error:
        raise ConfigChanged(
            f"the checkpoint in {actor.parent} was written by {saved} ranks and this run has {ranks} (trainer.nnodes × "
            f"trainer.n_gpus_per_node): {error}; give the same numbers again"
        ) from error
    except ValueError as error:
        raise _damaged(actor / "fsdp_config.json", actor.parent, error) from error


def _check_pickle(file: Path) -> None:
    """Reads which classes and functions a file asks for, without calling any."""
    import torch

    for name in torch.serialization.get_unsafe_globals_in_checkpoint(file):
        if name not in _HARMLESS:
            raise UnsafeCheckpoint(
                f"{file} asks for {name}, which no checkpoint of ours needs: reading it could run code. If you know "
                "where the file comes from, set trust_checkpoint=true"
            )


_HARMLESS = {
    *("numpy.dtype", "numpy.ndarray", "numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct"),
    *("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar", "numpy.dtypes.UInt32DType"),
    *("_codecs.encode", "torch.torch_version.TorchVersion", "torch.distributed.device_mesh.DeviceMesh"),
    *("torch.distributed._mesh_layout._MeshLayout", "torch.distributed._mesh_layout._FlatLayout"),
    *("torch.distributed.tensor.DTensor", "torch.distributed.tensor._dtensor_spec.DTensorSpec"),
    *("torch.distributed.tensor._dtensor_spec.TensorMeta", "torch.distributed.tensor._dtensor_spec.ShardOrderEntry"),
    *("torch.distributed.tensor.placement_types.Shard", "torch.distributed.tensor.placement_types._StridedShard"),
    *("torch.distributed.tensor.placement_types.Replicate", "torch.distributed.tensor.placement_types.Partial"),
}
"""Whole names only: a pickle may write ``module.function`` of another module behind the name of a module."""


def drop_later(run_dir: Path, step: int) -> int:
    """Removes what updates after ``step`` left, which a resumed run plays again. Returns how many episode files.

    Without this, files of a run that went on from an earlier update would mix with those of the run before.
    """
    files = [
        file
        for folder in ("rollouts", "validation")
        for file in (run_dir / folder).glob("*.jsonl")
        if (number := file.stem.removesuffix("-with-skill")).isdecimal() and (int(number) > step or step == 0)
    ]
    for file in files:
        file.unlink()
    _drop_later_faults(run_dir / ENV_ERRORS, step)
    return len(files)


def _drop_later_faults(file: Path, step: int) -> None:
    if not file.is_file():
        return
    lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    kept = [line for line in lines if line and (own := _step_of(line)) is not None and own <= step and step > 0]
    write_atomically(file, "".join(line + "\n" for line in kept))


def _step_of(line: str) -> int | None:
    """The update that a line is about; None of a torn one."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
