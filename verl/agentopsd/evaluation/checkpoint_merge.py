"""Makes a Hugging Face folder of whatever a model was saved as: FSDP shards of any number of ranks, LoRA adapters."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from verl.agentopsd.evaluation.checkpoint import SHARD, CheckpointError, Source, find_model

DTYPES = {"float32": torch.float32, "float": torch.float32, "float16": torch.float16, "half": torch.float16}
_MARKER = "merged_from.json"


def materialize(source: Source, dtype: str) -> Path:
    """A local Hugging Face folder with the model.

    What has to be put together is kept in ``merged-<dtype>`` beside its parts, until these change; in a temporary
    folder where that cannot be written.

    Args:
        dtype: of the rollout engine; merged weights are stored in it.

    Raises:
        CheckpointError: the Hub does not have it, or the parts do not fit together.
    """
    if source.kind == "folder":
        return Path(source.path)
    if source.kind == "hub":
        return _download(source.path)
    kind = DTYPES.get(dtype, torch.bfloat16)
    folder = Path(source.path)
    parts = sorted([*folder.glob("model_world_size_*.pt"), *folder.glob("adapter_model*"), *folder.glob("*.json")])
    stamp = json.dumps([[part.name, part.stat().st_size, part.stat().st_mtime_ns] for part in parts])
    merged = folder / f"merged-{str(kind).removeprefix('torch.')}"
    marker = merged / _MARKER
    if marker.is_file() and marker.read_text(encoding="utf-8") == stamp:
        return merged
    state, base = _adapter(folder, dtype) if source.kind == "adapter" else _checkpoint(source)
    with _new_folder(merged) as target:
        save_model(state, base, target, kind)
        (target / _MARKER).write_text(stamp, encoding="utf-8")
    return merged if marker.is_file() else target


@contextlib.contextmanager
def _new_folder(final: Path) -> Iterator[Path]:
    """A folder that becomes ``final`` when the body has succeeded, so that there is never half a model."""
    writable = os.access(final.parent, os.W_OK)
    target = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=final.parent if writable else None))
    try:
        yield target
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    if writable:
        target.chmod(0o755)
        shutil.rmtree(final, ignore_errors=True)
        target.rename(final)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.gguf", "*.onnx", "*.pth", "original/*"]))
    except Exception as error:  # of many kinds: no such model, no rights, no network
        first = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            f"no model at {name}: no such folder, and the Hugging Face Hub did not give it "
            f"({type(error).__name__}: {first})"
        ) from error


def _checkpoint(source: Source) -> tuple[dict[str, torch.Tensor], Path]:
    """State dict and the folder with configuration and tokenizer of a training checkpoint."""
    folder = Path(source.path)
    state = read_shards(folder)
    if any("lora_" in name for name in state):
        meta = folder / "lora_train_meta.json"
        if not meta.is_file():
            raise CheckpointError(f"{folder} holds a LoRA adapter but no lora_train_meta.json, which has its scale")
        if not any(".base_layer." in name for name in state):
            config = OmegaConf.load(source.run_config) if source.run_config else None
            base = OmegaConf.select(config, "actor_rollout_ref.model.path") if config is not None else None
            if base is None:
                raise CheckpointError(
                    f"{folder} holds an adapter alone and its run's config.yaml, with the base, is gone"
                )
            state |= _weights(materialize(find_model(str(base)), "float32"))
        settings = json.loads(meta.read_text())
        state = fold_lora(state, settings["lora_alpha"] / settings["r"])
    return state, folder / "huggingface"


def _adapter(folder: Path, dtype: str) -> tuple[dict[str, torch.Tensor], Path]:
    """State dict and base folder of a LoRA adapter in PEFT's format."""
    from safetensors.torch import load_file

    settings = json.loads((folder / "adapter_config.json").read_text())
    base = settings.get("base_model_name_or_path")
    if not base or not (folder / "adapter_model.safetensors").is_file():
        raise CheckpointError(f"the adapter in {folder} names no base model, or has no adapter_model.safetensors")
    base_folder = materialize(find_model(str(base)), dtype)
    root = settings["r"] ** 0.5 if settings.get("use_rslora") else settings["r"]
    state = load_file(folder / "adapter_model.safetensors") | _weights(base_folder)
    return fold_lora(state, settings["lora_alpha"] / root), base_folder


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict())


def read_shards(folder: Path) -> dict[str, torch.Tensor]:
    """The whole state dict from the FSDP shards in ``folder``, in the precision they were saved in.

    ``verl.model_merger`` does the same but rounds to bfloat16, after which a model trained in float32 plays
    differently from the one that training validated.
    """
    from torch.distributed.tensor import DTensor

    # that meshes are read before there are process groups is intended: there will be none
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    sizes = [int(match[1]) for entry in folder.iterdir() if (match := SHARD.fullmatch(entry.name))]

    def load(rank: int) -> dict[str, Any]:
        file = folder / f"model_world_size_{sizes[0]}_rank_{rank}.pt"
        return torch.load(file, map_location="cpu", weights_only=True)  # DTensor, imported above, is known to torch

    first = load(0)
    mesh = next((value.device_mesh.mesh for value in first.values() if isinstance(value, DTensor)), torch.zeros(1, 1))
    # rows of a two-dimensional mesh are replicas
    ranks = [int(rank) for rank in mesh.reshape(-1, mesh.shape[-1])[0]]
    shards = [first, *(load(rank) for rank in ranks[1:])]
    state: dict[str, torch.Tensor] = {}
    for name in list(first):
        parts = [shard.pop(name) for shard in shards]
        if not isinstance(parts[0], DTensor):
            state[name] = parts[0]
            continue
        placement: Any = parts[0].placements[-1]
        local = [part.to_local() for part in parts]
        state[name] = local[0] if placement.is_replicate() else torch.cat(local, dim=placement.dim)
    return state


def fold_lora(state: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """W + scale · B A for every adapted layer, under the model's own names.

    Raises:
        CheckpointError: an adapter without its layer, or one of another kind.
    """
    plain: dict[str, torch.Tensor] = {}
    adapters: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        own = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if match := re.fullmatch(r"(.*)\.lora_([AB])(?:\.\w+)?\.weight", own):
            adapters.setdefault(match[1], {})[match[2]] = tensor
        elif ".lora_" in own:
            raise CheckpointError(f"{name} belongs to a kind of adapter that cannot be merged: only plain LoRA can")
        else:
            plain[own] = tensor
    for layer, pair in adapters.items():
        if f"{layer}.weight" not in plain or pair.keys() != {"A", "B"}:
            raise CheckpointError(f"the adapter of {layer} lacks its layer, or one of its two matrices")
        weight = plain[f"{layer}.weight"]
        delta = scale * (pair["B"].float() @ pair["A"].float())
        plain[f"{layer}.weight"] = (weight.float() + delta).to(weight.dtype)
    return plain


def save_model(state: dict[str, torch.Tensor], base: Path, target: Path, dtype: torch.dtype) -> None:
    """Writes ``state`` as a Hugging Face folder with configuration, tokenizer and chat template of ``base``.

    Raises:
        CheckpointError: the model has tensors that are not there.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar
    from verl.utils.transformers_compat import drop_tied_target_keys

    config = AutoConfig.from_pretrained(base)
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    needed = {name for name, _ in model.named_parameters()}  # a tied tensor has one name
    if missing := sorted(needed - state.keys()):
        raise CheckpointError(f"the checkpoint lacks {len(missing)} tensors of the model, the first is {missing[0]}")
    drop_tied_target_keys(state, model, config)
    disable_progress_bar()
    model.save_pretrained(target, state_dict={name: tensor.to(dtype) for name, tensor in state.items()})
    for file in base.iterdir():  # tokenizer, chat template, generation settings
        if file.suffix in (".json", ".jinja", ".txt", ".model") and not file.name.endswith(".index.json"):
            if not (target / file.name).exists() or file.name == "generation_config.json":
                shutil.copy(file, target / file.name)
