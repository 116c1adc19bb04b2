"""Finds the model that an evaluation was asked for.

Known are a Hugging Face folder, an id on the Hub, a LoRA adapter's folder, and what training leaves behind: a run
directory, one of its ``checkpoints/global_step_N``, or the ``actor`` folder in it.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
LLM_VOCABULARY = 10_000
"""A model with more words than this speaks English, not only the games' language."""

_PART = 64 * 2**20


class CheckpointError(ValueError):
    """No model where one was looked for, or one that is not complete."""


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes:
        kind: ``folder``, ``adapter``, ``shards`` or ``hub``.
        path: the folder, or the id on the Hub.
        name: short, for records and file names.
        step: of the training run; 0 for a model that is not from one of ours.
        run_config: the configuration that the training run resolved, if it is still there.
    """

    kind: str
    path: str
    name: str
    step: int = 0
    run_config: Path | None = None


def find_model(given: str) -> Source:
    """Says what ``given`` is, without loading anything.

    Raises:
        CheckpointError: nothing that can be evaluated; says what was looked for.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        return _find_in_folder(path.resolve())
    if HUB_ID.fullmatch(given) and not path.exists() and not given.startswith("."):
        return Source("hub", given, given.rsplit("/", 1)[-1])
    raise CheckpointError(f"no model at {given}: no such folder, and not an id on the Hugging Face Hub")


def _find_in_folder(path: Path) -> Source:
    if any(path.glob("model_world_size_*_rank_0.pt")):
        return _shards(path)
    if (path / "actor").is_dir():
        return _shards(path / "actor")
    for folder in (path / "checkpoints", path):
        latest = folder / "latest_checkpointed_iteration.txt"
        if latest.is_file():
            return _shards(folder / f"global_step_{latest.read_text().strip()}" / "actor")
    if (path / "adapter_config.json").is_file():
        return Source("adapter", str(path), path.name)
    if (path / "config.json").is_file():
        if not any(path.glob("*.safetensors")) and not any(path.glob("*.bin")):
            raise CheckpointError(f"{path} has a config.json but no weights (*.safetensors): copy the whole model")
        return Source("folder", str(path), path.name)
    if (path / "config.yaml").is_file() and (path / "versions.json").is_file():
        raise CheckpointError(f"the run in {path} has no checkpoint yet: let it reach trainer.save_freq updates")
    raise CheckpointError(
        f"{path} is neither a Hugging Face model (config.json), nor a run directory, nor a checkpoint of one "
        "(checkpoints/global_step_N, or the actor folder in it)"
    )


def _shards(actor: Path) -> Source:
    shards = [SHARD.fullmatch(entry.name) for entry in actor.glob("*.pt")] if actor.is_dir() else []
    found = {(int(match[1]), int(match[2])) for match in shards if match}
    if not found:
        raise CheckpointError(f"{actor} has no weights (model_world_size_*_rank_*.pt): the checkpoint is not complete")
    sizes = sorted({size for size, _ in found})
    if len(sizes) > 1:
        raise CheckpointError(f"{actor} holds shards of runs with {sizes} ranks: remove those that do not belong there")
    if missing := [rank for rank in range(sizes[0]) if (sizes[0], rank) not in found]:
        raise CheckpointError(
            f"{actor} lacks the shard of rank {missing[0]} of {sizes[0]}: copy the shards of all nodes into one folder"
        )
    checkpoint, run = actor.parent, actor.parents[2]
    step = re.fullmatch(r"global_step_(\d+)", checkpoint.name)
    config = run / "config.yaml"
    return Source(
        "shards",
        str(actor),
        f"{run.name}-step{step[1]}" if step else actor.name,
        int(step[1]) if step else 0,
        config if config.is_file() else None,
    )


def run_overrides(source: Source) -> list[str]:
    """Overrides that give a checkpoint the prompts and limits of its training run; empty for other models.

    What only concerns the machine (workers, time limits, backend) is left to the evaluation.
    """
    if source.run_config is None:
        return []
    config = OmegaConf.load(source.run_config)
    keys = [f"env.{key}" for key in _INHERITED_ENV] + list(_INHERITED)
    values = {key: OmegaConf.select(config, key) for key in keys}
    data_dir = OmegaConf.select(config, "env.data_dir")
    if data_dir and Path(str(data_dir)).is_dir():
        values["env.data_dir"] = str(data_dir)
    given = {key: value for key, value in values.items() if value is not None and value != {}}
    # keys of a dictionary are added to those of the preset
    return [f"{'++' if OmegaConf.is_dict(value) else ''}{key}={_literal(value)}" for key, value in given.items()]


_INHERITED_ENV = (
    *("name", "max_turns", "max_action_tokens", "show_admissible", "prompt_style", "action_format"),
    *("generated.dir", "generated.train", "generated.valid_seen", "generated.valid_unseen", "generated.seed"),
)
_INHERITED = (
    *("data.max_prompt_length", "data.max_response_length"),
    *("data.apply_chat_template_kwargs", "actor_rollout_ref.model.custom_chat_template"),
    *("agentopsd.teacher.skills", "agentopsd.teacher.skill_position"),
)


def _literal(value: Any) -> str:
    """A value as Hydra's override grammar writes it."""
    if OmegaConf.is_dict(value):
        return "{" + ",".join(f"{key}:{_literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return str(value)
    return "'" + str(value).replace("\\", "\\\\").replace("'", "\\'") + "'"


def preset(source: Source) -> str:
    """The configuration group ``model`` whose prompts and lengths suit the model: a language model gets the LLM's."""
    if source.kind == "hub":
        return "qwen2.5_3b"
    folder = Path(source.path) / "huggingface" if source.kind == "shards" else Path(source.path)
    try:
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    except (OSError, ValueError, KeyError):
        return "qwen2.5_3b"
    return "qwen2.5_3b" if vocabulary > LLM_VOCABULARY else "tiny"


def model_hash(folder: Path) -> str:
    """16 hex digits over configuration, tokenizer and weights; of files above 128 MiB only both ends and the size."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if not file.name.startswith(_DECIDING) or not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as handle:
            digest.update(handle.read(_PART))
            if size > _PART:
                handle.seek(max(_PART, size - _PART))
                digest.update(handle.read(_PART))
    return digest.hexdigest()[:16]


_DECIDING = (
    *("config.json", "model", "pytorch_model", "tokenizer", "chat_template"),
    *("vocab", "merges", "added_tokens", "special_tokens"),
)
