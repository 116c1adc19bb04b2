"""Logits of sampled tokens alone, in verl's FSDP engines.

verl's engine multiplies every hidden state with the output matrix: (tokens × vocabulary) numbers, most of them at
prompts and observations, whose log-probs nothing reads. Here the hidden states that predict a token of the loss mask go
through the output layer, and every other log-prob and entropy is 0. What is computed at a position is upstream's code
for packed rows, which is given these positions as one short row.

Installed in every process by the ``verl.plugins`` entry point; the engine is registered when upstream's is.
``agentopsd.action_logits=false`` leaves upstream's.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

import torch
import wrapt
from tensordict import TensorDict
from torch import Tensor

VARIABLE = "AGENTOPSD_ACTION_LOGITS"
BACKENDS = ("fsdp", "fsdp2")
LEAVE_IT = "With agentopsd.action_logits=false the engine makes logits of every token, as verl does"
Jagged = Any
"""A nested tensor, whose methods torch's types do not have."""


def install() -> None:
    wrapt.register_post_import_hook(_register, "verl.workers.engine.fsdp.transformer_impl")


def _register(module: ModuleType) -> None:
    from verl.workers.engine.base import EngineRegistry

    ours = engine_class(module.FSDPEngineWithLMHead)
    for backend in BACKENDS:
        engines = EngineRegistry._engines["language_model"][backend]
        for device, found in engines.items():
            if found is module.FSDPEngineWithLMHead:
                engines[device] = ours


def predicting(loss_mask: Jagged, input_ids: Jagged) -> Tensor:
    """(tokens,) bool: the packed positions whose hidden state predicts a token of the loss mask.

    Args:
        loss_mask: jagged; a row is as long as its tokens or as their last part, the response.
        input_ids: jagged.
    """
    ends, lengths = input_ids.offsets()[1:], loss_mask.offsets().diff()
    begins = (ends - lengths).repeat_interleave(lengths)
    within = torch.arange(len(begins), device=begins.device) - loss_mask.offsets()[:-1].repeat_interleave(lengths)
    kept = torch.zeros(len(input_ids.values()), dtype=torch.bool, device=begins.device)
    kept[begins + within - 1] = loss_mask.values().bool()
    return kept


class OnlyAt:
    """Before the output layer: keeps the chosen hidden states, in one forward pass."""

    def __init__(self) -> None:
        self.positions: Tensor | None = None
        """Into the flattened (rows × columns) hidden states."""

    def __call__(self, layer: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.positions is None:
            return None
        positions, self.positions = self.positions, None
        hidden, *rest = inputs
        return hidden.reshape(-1, hidden.shape[-1])[positions][None], *rest


@functools.cache
def engine_class(upstream: Any) -> Any:
    """The engine on top of ``upstream``, verl's ``FSDPEngineWithLMHead``."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.ulysses import ulysses_pad_and_slice_inputs
    from verl.workers.engine.utils import pad_packed_inputs

    class ActionLogitsEngine(upstream):
        """verl's FSDP engine with logits at the positions of the loss mask alone."""

        def initialize(self) -> None:
            super().initialize()
            self.choose_positions(os.environ.get(VARIABLE) == "1")

        def choose_positions(self, chooses: bool) -> None:
            """Whether to choose; once, when the module is built."""
            self._only_at, self._one_row, self._chooses = OnlyAt(), False, chooses
            if chooses:
                layer = self.module.get_output_embeddings()
                if layer is None:
                    raise RuntimeError(f"{type(self.module).__name__} has no output layer to be found. {LEAVE_IT}")
                layer.register_forward_pre_hook(self._only_at)

        def _applies(self, micro_batch: TensorDict) -> bool:
            """Not where upstream never has logits, or looks at those of every token."""
            others = ("use_fused_kernels", "distillation_use_topk")
            used = any(tu.get_non_tensor_data(micro_batch, key, False) for key in others)
            return self._chooses and not used and micro_batch["loss_mask"].is_nested

        def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
            inputs, arguments = super().prepare_model_inputs(micro_batch)
            if not self._applies(micro_batch):
                return inputs, arguments
            ids = micro_batch["input_ids"]
            kept = predicting(micro_batch["loss_mask"], ids)
            if padded := "temperature" in arguments:  # rows side by side, each padded to the longest
                row, column = self._places(ids)
                places = row * inputs["input_ids"].shape[1] + column
                arguments["temperature_rmpad"] = arguments["temperature"][row]
                if inputs["position_ids"].dim() == 2:  # text alone
                    self._without_mask(inputs)
            else:
                kept = pad_packed_inputs(kept[None].long(), None, self._get_packed_pad_size(len(kept)))[0]
                if self.use_ulysses_sp:
                    kept, _, _ = ulysses_pad_and_slice_inputs(kept, None, self.ulysses_sequence_parallel_size)
                kept = kept[0].bool()
            chosen = kept.nonzero()[:, 0]
            if not len(chosen):  # a rank's part of a row may be all observation; the layer runs on every rank
                chosen = kept.new_zeros(1, dtype=torch.int64)
            arguments |= {"chosen": chosen, "wanted": kept[chosen]}
            self._only_at.positions = places[chosen] if padded else chosen
            return inputs, arguments

        @staticmethod
        def _without_mask(inputs: dict[str, Any]) -> None:
            """Rows are padded on the right, where no token looks: causal attention alone gives the same numbers, and a
            kernel that is told so does half of the work."""
            inputs["attention_mask"] = None
            columns = torch.arange(inputs["input_ids"].shape[1], device=inputs["input_ids"].device)
            inputs["position_ids"] = columns.expand_as(inputs["input_ids"])

        @staticmethod
        def _places(ids: Jagged) -> tuple[Tensor, Tensor]:
            """Row and column of every packed token."""
            lengths, starts = ids.offsets().diff(), ids.offsets()[:-1]
            row = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
            return row, torch.arange(len(row), device=row.device) - starts[row]

        def prepare_model_outputs(
            self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
        ) -> dict[str, Tensor]:
            chosen = output_args.pop("chosen", None)
            if chosen is None:
                return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
            ids, labels = micro_batch["input_ids"], output_args["input_ids_rmpad_rolled"]
            if output.logits.shape[:2] != (1, len(chosen)):
                raise RuntimeError(
                    f"the model's logits are {tuple(output.logits.shape)}, not those of {len(chosen)} tokens: it does "
                    f"not call its output layer as expected. {LEAVE_IT}"
                )
            row = {
                **{key: output_args[key][chosen] for key in ("input_ids_rmpad_rolled", "temperature_rmpad")},
                "temperature_is_one": output_args["temperature_is_one"],
                "pad_size": 0,
            }
            self._one_row = True
            try:
                found = super().prepare_model_outputs(output, row, self._as_one_row(micro_batch, len(chosen)), None)
            finally:
                self._one_row = False
            result = {}
            for name, values in found.items():
                wanted = values.values() * output_args["wanted"]
                everywhere = wanted.new_zeros(len(labels)).index_copy(0, chosen, wanted)
                everywhere = self._gather_and_unpad_packed(everywhere, output_args.get("pad_size", 0))
                result[name] = torch.nested.nested_tensor_from_jagged(everywhere, ids.offsets())
            return result

        def _gather_and_unpad_packed(self, tensor: Tensor, pad_size: int) -> Tensor:
            # the chosen positions of a rank are no equal part of the row: they are put back before ranks meet
            return tensor if self._one_row else super()._gather_and_unpad_packed(tensor, pad_size)

        @staticmethod
        def _as_one_row(micro_batch: TensorDict, tokens: int) -> TensorDict:
            """The micro-batch's settings over one packed row of ``tokens``."""
            ids = torch.nested.nested_tensor_from_jagged(
                torch.zeros(tokens, dtype=torch.int64, device=micro_batch["input_ids"].device),
                torch.tensor([0, tokens], device=micro_batch["input_ids"].device),
            )
            wanted = ("calculate_entropy", "calculate_sum_pi_squared", "distillation_only")
            settings = {key: tu.get_non_tensor_data(micro_batch, key, False) for key in wanted}
            return tu.get_tensordict({"input_ids": ids}, {**settings, "use_remove_padding": True})

    return ActionLogitsEngine
