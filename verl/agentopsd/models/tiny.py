"""A small Qwen3-architecture language model in plain torch: the reference for log-probs, cloning and fast CPU play.

Parameter names and shapes are those of ``transformers``' ``Qwen3ForCausalLM``, so a state dict moves either way
without conversion. One key/value head and tied embeddings are assumed; everything else comes from :class:`TinyConfig`.
Runs with torch alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TINY_ALFWORLD = Path(__file__).with_name("tiny_alfworld")
"""The shipped checkpoint; also loadable by ``transformers`` and vLLM."""


@dataclass(frozen=True)
class TinyConfig:
    """Sizes, under the names of a Qwen3 ``config.json``."""

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 3
    num_attention_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @staticmethod
    def from_pretrained(directory: Path) -> TinyConfig:
        """Reads ``config.json``.

        Raises:
            ValueError: the model is not a tied Qwen3 with one key/value head.
        """
        stored = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if stored["model_type"] != "qwen3" or stored["num_key_value_heads"] != 1 or not stored["tie_word_embeddings"]:
            raise ValueError(f"{directory} is not a Qwen3 model with tied embeddings and one key/value head")
        theta = stored.get("rope_theta") or stored["rope_parameters"]["rope_theta"]
        sizes = {name: stored[name] for name in asdict(TinyConfig()) if name != "rope_theta"}
        return TinyConfig(**sizes, rope_theta=float(theta))


class _Weight(nn.Module):
    """A bare parameter called ``weight``."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


class _Attention(nn.Module):
    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        wide = c.num_attention_heads * c.head_dim
        self.q_proj, self.o_proj = _Weight(wide, c.hidden_size), _Weight(c.hidden_size, wide)
        self.k_proj, self.v_proj = _Weight(c.head_dim, c.hidden_size), _Weight(c.head_dim, c.hidden_size)
        self.q_norm, self.k_norm = _Weight(c.head_dim), _Weight(c.head_dim)


class _MLP(nn.Module):
    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (_Weight(c.intermediate_size, c.hidden_size) for _ in range(2))
        self.down_proj = _Weight(c.hidden_size, c.intermediate_size)


class _Layer(nn.Module):
    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = _Attention(c), _MLP(c)
        self.input_layernorm, self.post_attention_layernorm = _Weight(c.hidden_size), _Weight(c.hidden_size)


class _Model(nn.Module):
    def __init__(self, c: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = _Weight(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(_Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = _Weight(c.hidden_size)


@dataclass
class Cache:
    """Keys and values of every layer, ``(rows, capacity, head_dim)`` each; the capacity grows as needed."""

    keys: list[Tensor]
    values: list[Tensor]

    @staticmethod
    def empty(rows: int, c: TinyConfig) -> Cache:
        def new() -> list[Tensor]:
            return [torch.zeros(rows, 0, c.head_dim) for _ in range(c.num_hidden_layers)]

        return Cache(new(), new())

    def reserve(self, length: int) -> None:
        """Makes room for ``length`` positions, in steps of 128."""
        missing = -(-length // 128) * 128 - self.keys[0].shape[1]
        if missing > 0:
            self.keys = [F.pad(key, (0, 0, 0, missing)) for key in self.keys]
            self.values = [F.pad(value, (0, 0, 0, missing)) for value in self.values]

    def select(self, rows: Tensor) -> Cache:
        """A cache with these rows, in this order; rows may repeat."""
        return Cache([key[rows] for key in self.keys], [value[rows] for value in self.values])


class TinyLM(nn.Module):
    """The model. ``hidden``/``logits`` are for training, ``extend`` is for sampling with a cache."""

    _cos: Tensor
    _sin: Tensor

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Model(config)
        frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), frequencies).repeat(1, 2)
        self.register_buffer("_cos", angles.cos(), persistent=False)
        self.register_buffer("_sin", angles.sin(), persistent=False)

    @staticmethod
    def initialized(config: TinyConfig, seed: int) -> TinyLM:
        """Fresh weights: embeddings of std .02, matrices of std fan_in^-½, those that write to the residual × .4."""
        model = TinyLM(config)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                std = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
                std *= 0.4 if "o_proj" in name or "down_proj" in name else 1.0
                nn.init.normal_(parameter, 0.0, std, generator=generator)
        return model

    @staticmethod
    def from_pretrained(directory: Path) -> TinyLM:
        """Loads ``config.json`` and ``model.safetensors`` in fp32."""
        from safetensors.torch import load_file

        model = TinyLM(TinyConfig.from_pretrained(directory))
        stored = {k: v.float() for k, v in load_file(directory / "model.safetensors").items() if k != "lm_head.weight"}
        model.load_state_dict(stored)
        return model.eval()

    def hidden(self, ids: Tensor) -> Tensor:
        """Last hidden states ``(N, T, hidden)`` of right-padded ``ids`` ``(N, T)``; causal."""
        rows, length = ids.shape
        c = self.config
        x = F.embedding(ids, self.model.embed_tokens.weight)
        cos, sin = self._cos[:length], self._sin[:length]
        for layer in self._layers:
            q, k, v = self._qkv(layer, x, cos, sin)
            shared = (rows, c.num_attention_heads, length, c.head_dim)
            mixed = F.scaled_dot_product_attention(
                q.transpose(1, 2), k[:, None].expand(shared), v[:, None].expand(shared), is_causal=True
            )
            x = x + F.linear(mixed.transpose(1, 2).reshape(rows, length, -1), layer.self_attn.o_proj.weight)
            x = self._mlp(layer, x)
        return self._norm(x, self.model.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)

    def log_probs(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Log-probs of the tokens where ``mask`` ``(N, T)`` is True, flat in row-major order (column 0 must be off)."""
        hidden = self.hidden(ids)[:, :-1][mask[:, 1:]]
        chosen = ids[:, 1:][mask[:, 1:]]
        return F.log_softmax(self.logits(hidden), -1).gather(1, chosen[:, None])[:, 0]

    @torch.no_grad()
    def extend(self, ids: Tensor, lengths: Tensor, cache: Cache, rows: Tensor | None = None) -> Tensor:
        """Appends ``ids`` ``(R, t)`` behind the first ``lengths`` ``(R,)`` cached positions of ``rows`` (None: all).

        Padding at the right end of ``ids`` is harmless as long as the caller's next ``lengths`` leaves it out.

        Returns:
            Hidden states ``(R, t, hidden)``.
        """
        c, (count, new) = self.config, ids.shape
        positions = lengths[:, None] + torch.arange(new)
        end = int(positions.max()) + 1
        cache.reserve(end)
        seen = torch.arange(end) <= positions[:, :, None]
        bias = torch.zeros(seen.shape).masked_fill_(~seen, -1e30)
        heads = c.num_attention_heads
        bias = bias[:, :, None].expand(count, new, heads, end).reshape(count, new * heads, end)
        index = (torch.arange(count) if rows is None else rows)[:, None]
        x = F.embedding(ids, self.model.embed_tokens.weight)
        cos, sin = self._cos[positions], self._sin[positions]
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            q, k, v = self._qkv(layer, x, cos, sin)
            keys[index, positions], values[index, positions] = k, v
            past_k, past_v = keys[:, :end], values[:, :end]
            if rows is not None:
                past_k, past_v = past_k[rows], past_v[rows]
            scores = torch.baddbmm(
                bias, q.reshape(count, new * heads, c.head_dim), past_k.transpose(1, 2), alpha=c.head_dim**-0.5
            )
            mixed = torch.bmm(scores.softmax(-1), past_v).reshape(count, new, -1)
            x = self._mlp(layer, x + F.linear(mixed, layer.self_attn.o_proj.weight))
        return self._norm(x, self.model.norm)

    @property
    def _layers(self) -> list[_Layer]:
        return cast(list[_Layer], list(self.model.layers))

    def _norm(self, x: Tensor, scale: _Weight) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), scale.weight, self.config.rms_norm_eps)

    def _qkv(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries ``(N, T, heads, head_dim)``, rotated keys and values ``(N, T, head_dim)``."""
        c, attention = self.config, layer.self_attn
        stacked = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        projected = F.linear(self._norm(x, layer.input_layernorm), stacked)
        q, k, v = projected.split([c.num_attention_heads * c.head_dim, c.head_dim, c.head_dim], dim=-1)
        q = self._norm(q.unflatten(-1, (c.num_attention_heads, c.head_dim)), attention.q_norm)
        k = self._norm(k, attention.k_norm)
        return _rotate(q, cos[..., None, :], sin[..., None, :]), _rotate(k, cos, sin), v

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        mlp = layer.mlp
        stacked = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        gate, up = F.linear(self._norm(x, layer.post_attention_layernorm), stacked).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, mlp.down_proj.weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
