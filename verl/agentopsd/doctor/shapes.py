"""The sizes of a model that decide its memory and time, from its config.json or, without one, from a table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer with a gated MLP, possibly with linear-attention layers between.

    Attributes:
        positions: longest row the model was made for; None when unknown.
        tied: input and output embeddings are one matrix.
        bias: query, key and value projections have a bias (Qwen2.5).
        linear_layers: of ``layers``, those with a recurrent state instead of a KV cache (Qwen3.5).
        linear_key, linear_value: widths of keys and values of those layers, over all their heads.
        query_gate: full attention has a gate as wide as its queries (Qwen3.5).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    positions: int | None = None
    tied: bool = True
    bias: bool = False
    linear_layers: int = 0
    linear_key: int = 0
    linear_value: int = 0
    query_gate: bool = False

    @property
    def attention_layers(self) -> int:
        return self.layers - self.linear_layers

    @property
    def parameters(self) -> int:
        """All weights, text model only."""
        return self.matrix_parameters + self.vocab * self.hidden * (0 if self.tied else 1) + self._vectors

    @property
    def matrix_parameters(self) -> int:
        """Weights that every token is multiplied with, the output embedding included: 2 FLOPs each."""
        return self.attention_layers * self._attention + self.linear_layers * self._linear + self._mlps + self._output

    @property
    def layer_parameters(self) -> int:
        """Weights of one full-attention layer: what FSDP gathers at once."""
        return self._attention + 3 * self.hidden * self.intermediate

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in bf16, all layers."""
        return 2 * 2 * self.attention_layers * self.kv_heads * self.head_dim

    @property
    def _attention(self) -> int:
        queries = self.heads * self.head_dim
        return self.hidden * (queries * (3 if self.query_gate else 2) + 2 * self.kv_heads * self.head_dim)

    @property
    def _linear(self) -> int:
        return self.hidden * (2 * self.linear_key + 3 * self.linear_value)

    @property
    def _mlps(self) -> int:
        return 3 * self.layers * self.hidden * self.intermediate

    @property
    def _output(self) -> int:
        return self.vocab * self.hidden

    @property
    def _vectors(self) -> int:
        bias = self.attention_layers * (self.heads + 2 * self.kv_heads) * self.head_dim if self.bias else 0
        return self.hidden * (2 * self.layers + 1) + bias


def _qwen25(name: str, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int) -> ModelShape:
    return ModelShape(
        name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128 if hidden > 896 else 64,
        intermediate=intermediate,
        vocab=152064 if hidden >= 3584 else 151936,
        positions=32768,
        tied=hidden < 3584,
        bias=True,
    )


# From the models' published config.json. Used when the path is a name on the hub; a local folder is always read.
KNOWN = {
    shape.name: shape
    for shape in (
        _qwen25("Qwen/Qwen2.5-0.5B-Instruct", 24, 896, 14, 2, 4864),
        _qwen25("Qwen/Qwen2.5-1.5B-Instruct", 28, 1536, 12, 2, 8960),
        _qwen25("Qwen/Qwen2.5-3B-Instruct", 36, 2048, 16, 2, 11008),
        _qwen25("Qwen/Qwen2.5-7B-Instruct", 28, 3584, 28, 4, 18944),
        _qwen25("Qwen/Qwen2.5-14B-Instruct", 48, 5120, 40, 8, 13824),
        ModelShape(
            "Qwen/Qwen3.5-4B",
            layers=32,
            hidden=2560,
            heads=16,
            kv_heads=4,
            head_dim=256,
            intermediate=9216,
            vocab=248320,
            positions=262144,
            linear_layers=24,
            linear_key=2048,
            linear_value=4096,
            query_gate=True,
        ),
        ModelShape("Qwen/Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, positions=40960),
        ModelShape("Qwen/Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, positions=40960, tied=False),
        ModelShape("HuggingFaceTB/SmolLM2-135M-Instruct", 30, 576, 9, 3, 64, 1536, 49152, positions=8192),
        ModelShape("meta-llama/Llama-3.2-1B-Instruct", 16, 2048, 32, 8, 64, 8192, 128256, positions=131072),
        ModelShape("meta-llama/Llama-3.2-3B-Instruct", 28, 3072, 24, 8, 128, 8192, 128256, positions=131072),
        ModelShape(
            "meta-llama/Llama-3.1-8B-Instruct", 32, 4096, 32, 8, 128, 14336, 128256, positions=131072, tied=False
        ),
    )
}


def folder_of(path: str) -> Path | None:
    """Where the model's files are on this machine; None when they would have to be downloaded."""
    if Path(path).is_dir():
        return Path(path)
    if path.startswith(("/", "~", ".")):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "tokenizer_config.json")
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def shape_of(path: str) -> ModelShape | None:
    """The shape of a local model folder or of a known name; None for a name that is neither.

    Raises:
        ValueError: the folder's config.json is missing or lacks a size; names the file and the key.
    """
    folder = Path(path)
    return from_config(folder / "config.json") if folder.is_dir() else KNOWN.get(path)


def from_config(file: Path) -> ModelShape:
    """Reads a Hugging Face ``config.json``."""
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    text = config.get("text_config") or config
    try:
        heads = int(text["num_attention_heads"])
        kinds = text.get("layer_types") or []
        return ModelShape(
            name=str(file.parent),
            layers=int(text["num_hidden_layers"]),
            hidden=int(text["hidden_size"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or int(text["hidden_size"]) // heads),
            intermediate=int(text["intermediate_size"]),
            vocab=int(text["vocab_size"]),
            positions=text.get("max_position_embeddings"),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            bias=text.get("model_type") == "qwen2",
            linear_layers=sum(kind == "linear_attention" for kind in kinds),
            linear_key=int(text.get("linear_num_key_heads", 0)) * int(text.get("linear_key_head_dim", 0)),
            linear_value=int(text.get("linear_num_value_heads", 0)) * int(text.get("linear_value_head_dim", 0)),
            query_gate=str(text.get("model_type", "")).startswith("qwen3_5"),
        )
    except KeyError as error:
        raise ValueError(f"{file} has no {error}: the planner cannot size this model") from error
