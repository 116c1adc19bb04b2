"""Logits at sampled tokens alone: the numbers and gradients of upstream's engine there, nothing elsewhere."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from benchmarks import bare_engine as bare
from benchmarks.bare_engine import OURS, UPSTREAM, bare_engine, micro_batch
from verl.agentopsd import main
from verl.agentopsd.config import TINY_MODEL
from verl.agentopsd.platform.action_logits import VARIABLE, predicting

LENGTHS, RESPONSES, WORDS = (9, 14, 6), (5, 10, 3), 60


class TokenModel(nn.Module):
    """Reads every token by itself, so that a rank's slice of a row has the logits of the whole row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS, bias=False)
        self.seen: list[int] = []

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, **unused: Any) -> Any:
        logits = self.head(self.embed(input_ids))
        self.seen.append(logits.shape[:-1].numel())
        return SimpleNamespace(logits=logits)


def batch_of(packed: bool, masks: list[Tensor], whole: bool = False, **settings: Any) -> TensorDict:
    """``whole``: the loss mask covers the prompts too, with zeros, as the teacher's does."""
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, WORDS, (length,), generator=drawn) for length in LENGTHS]
    if whole:
        masks = [torch.cat([torch.zeros(n - len(m)).long(), m]) for n, m in zip(LENGTHS, masks, strict=True)]
    settings = {"use_remove_padding": packed, "temperature": 0.7, "calculate_entropy": True, **settings}
    return micro_batch(rows, masks, **settings)


def some_masks(seed: int = 1) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [(torch.rand(length, generator=drawn) < 0.4).long() for length in RESPONSES]


def expected_at(masks: list[Tensor]) -> Tensor:
    """(tokens,) bool, from the definition: position t of a row predicts token t + 1."""
    rows = []
    for length, mask in zip(LENGTHS, masks, strict=True):
        row = torch.zeros(length).bool()
        for t in range(1, length):
            row[t - 1] = t >= length - len(mask) and bool(mask[t - (length - len(mask))])
        rows.append(row)
    return torch.cat(rows)


def scored(made: Any, batch: TensorDict) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, and gradients of a weighted sum of them over the loss mask."""
    made.module.zero_grad()
    found: dict[str, Tensor] = {}

    def loss(model_output: dict[str, Tensor], data: TensorDict, dp_group: Any) -> tuple[Tensor, dict]:
        found.update({name: value.values().detach().clone() for name, value in model_output.items()})
        at = predicting(data["loss_mask"], data["input_ids"]).float()
        weight = torch.linspace(-1, 2, len(at)) * at
        return sum((value.values() * weight).sum() for value in model_output.values()), {}

    made.forward_step(batch, loss, forward_only=False)[0].backward()
    return found, {name: p.grad.clone() for name, p in made.module.named_parameters() if p.grad is not None}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a bare engine says of its device is forgotten after the test."""
    for name in ("get_device_id", "get_device_name"):
        monkeypatch.setattr(transformer_impl, name, getattr(transformer_impl, name))


@pytest.fixture(scope="module")
def tiny() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)


def test_the_plugin_has_put_it_where_upstream_s_was():
    for backend in ("fsdp", "fsdp2"):
        assert set(EngineRegistry._engines["language_model"][backend].values()) == {OURS}
        assert OURS not in EngineRegistry._engines["value_model"][backend].values()


@pytest.mark.parametrize("whole", [False, True])
def test_positions_are_those_that_predict_a_token_of_the_mask(whole: bool):
    masks = some_masks()
    batch = batch_of(True, masks, whole)
    assert torch.equal(predicting(batch["loss_mask"], batch["input_ids"]), expected_at(masks))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bucket", [0, 16])
@pytest.mark.parametrize("temperature", [1.0, 0.7, torch.tensor([0.5, 1.0, 2.0])])
def test_numbers_and_gradients_are_upstream_s(tiny: nn.Module, packed: bool, bucket: int, temperature: Any):
    masks = some_masks()
    batch = batch_of(packed, masks, temperature=temperature, calculate_sum_pi_squared=True)
    theirs, their_gradients = scored(bare_engine(UPSTREAM, tiny, bucket), batch.clone())
    ours, our_gradients = scored(bare_engine(OURS, tiny, bucket), batch.clone())
    at = expected_at(masks)
    assert ours.keys() == theirs.keys() == {"log_probs", "entropy", "sum_pi_squared"}
    for name, values in ours.items():
        torch.testing.assert_close(values[at], theirs[name][at], atol=2e-5, rtol=0)
        assert not values[~at].any() and theirs[name][~at].all()
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(gradient, their_gradients[name], atol=2e-5, rtol=1e-4)


def test_the_output_layer_meets_the_sampled_tokens_alone():
    masks, model = some_masks(), TokenModel()
    made = bare_engine(OURS, model)
    for packed in (False, True):
        scored(made, batch_of(packed, masks))
    assert model.seen == [int(expected_at(masks).sum())] * 2
    # and a pass that no mask was announced for sees everything
    model(torch.ones(2, 3).long())
    assert model.seen[-1] == 6


def test_rows_without_a_sampled_token_have_zeros():
    nothing = [torch.zeros(length).long() for length in RESPONSES]
    found, gradients = scored(bare_engine(OURS, TokenModel()), batch_of(True, nothing))
    assert [len(values) for values in found.values()] == [sum(LENGTHS)] * 2
    assert not any(values.any() for values in found.values())
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("adapted", [False, True])
def test_the_setting_reaches_the_engine_and_finds_the_output_layer(
    tiny: nn.Module, adapted: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FSDPEngine, "initialize", lambda self: None)
    monkeypatch.setattr(main, "activate_cpu", dict)
    for value in (True, False):
        config = main.compose_config(["model=tiny", "device=cpu", f"agentopsd.action_logits={value}"])
        monkeypatch.setenv(VARIABLE, main.worker_environment(config)[VARIABLE])
        model = copy.deepcopy(tiny)
        made = OURS.__new__(OURS)
        made.module = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear")) if adapted else model
        made.initialize()
        assert (made._only_at in model.lm_head._forward_pre_hooks.values()) is value


def test_a_model_without_an_output_layer_is_an_error():
    model = TokenModel()
    model.get_output_embeddings = lambda: None  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(RuntimeError, match=r"TokenModel has no output layer.*agentopsd.action_logits=false"):
        bare_engine(OURS, model)


@pytest.mark.parametrize("settings", [{VARIABLE: "0"}, {"use_fused_kernels": True}, {"distillation_use_topk": True}])
def test_upstream_s_way_where_it_must_or_shall_be(settings: dict[str, Any]):
    made = bare_engine(OURS, TokenModel())
    made._chooses = settings.pop(VARIABLE, "1") == "1"
    inputs, arguments = made.prepare_model_inputs(batch_of(True, some_masks(), **settings))
    assert "chosen" not in arguments and made._only_at.positions is None


def test_a_model_that_goes_around_its_output_layer_is_an_error():
    class Around(TokenModel):
        def forward(self, input_ids: Tensor, **unused: Any) -> Any:
            return SimpleNamespace(logits=self.embed(input_ids) @ self.head.weight.T)

    with pytest.raises(RuntimeError, match=r"logits are \(1, 29, 60\), not those of .*agentopsd.action_logits=false"):
        scored(bare_engine(OURS, Around()), batch_of(True, some_masks()))


def on_a_rank(rank: int, port: int, bucket: int, late: int) -> None:
    """Two ranks share every row, as with Ulysses; compares both engines. ``late``: the first has no sampled token."""
    from verl.utils.ulysses import set_ulysses_sequence_parallel_group

    torch.distributed.init_process_group("gloo", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
    set_ulysses_sequence_parallel_group(torch.distributed.group.WORLD)
    torch.manual_seed(0)
    model = TokenModel()
    model.config = object()  # type: ignore[assignment]
    masks = [torch.zeros(5).long(), torch.zeros(10).long(), torch.ones(3).long()] if late else some_masks()
    batch = batch_of(True, masks)
    theirs, their_gradients = scored(bare_engine(UPSTREAM, model, bucket, 2), batch.clone())
    model.seen.clear()
    ours, our_gradients = scored(bare_engine(OURS, model, bucket, 2), batch.clone())
    at = expected_at(masks)
    counts = torch.tensor(model.seen)
    torch.distributed.all_reduce(counts)
    assert counts.item() == at.sum() + late  # the output layer runs on every rank
    for name, values in ours.items():
        torch.testing.assert_close(values[at], theirs[name][at], atol=1e-5, rtol=0)
        assert not values[~at].any()
    for name, gradient in our_gradients.items():
        torch.testing.assert_close(gradient, their_gradients[name], atol=1e-5, rtol=1e-5)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("bucket", "late"), [(0, 0), (16, 0), (0, 1)])
def test_ranks_that_share_rows_put_their_parts_together(bucket: int, late: int):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    commands = [[sys.executable, __file__, str(rank), str(port), str(bucket), str(late)] for rank in range(2)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(Path(bare.__file__).parents[1])}
    ranks = [subprocess.Popen(one, env=environment, **output) for one in commands]
    for rank in ranks:
        said, _ = rank.communicate(timeout=180)
        assert rank.returncode == 0, said[-3000:]


if __name__ == "__main__":
    on_a_rank(*map(int, sys.argv[1:]))
