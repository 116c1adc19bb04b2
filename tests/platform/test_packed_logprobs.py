"""Log-probs of packed tokens: the right values and gradients, a call per chunk, and upstream still goes one by one."""

from __future__ import annotations

import inspect

import pytest
import torch
import verl.utils.torch_functional as upstream

from verl.agentopsd.platform.packed_logprobs import CHUNK, in_chunks

ROWWISE = upstream.logprobs_from_logits_v2.__wrapped__


def test_the_plugin_has_put_it_where_the_engine_looks():
    assert ROWWISE.__module__ == upstream.__name__
    assert upstream.logprobs_from_logits.__globals__["logprobs_from_logits_v2"] is upstream.logprobs_from_logits_v2


def test_upstream_loops_over_the_first_dimension():
    source = inspect.getsource(ROWWISE)
    assert "for logit in logits" in source and "for row_logits, row_labels in zip(logits" in source


@pytest.mark.parametrize("tokens", [0, 1, CHUNK, 2 * CHUNK + 3])
def test_values_and_gradients_are_those_of_a_log_softmax(tokens: int):
    drawn = torch.Generator().manual_seed(tokens)
    logits = (8 * torch.randn(tokens, 50, generator=drawn)).requires_grad_()
    labels = torch.randint(0, 50, (tokens,), generator=drawn)
    weights = torch.randn(tokens, generator=drawn)
    got = upstream.logprobs_from_logits(logits, labels)
    (gradient,) = torch.autograd.grad((got * weights).sum(), logits)

    exact = logits.detach().double().requires_grad_()
    expected = torch.log_softmax(exact, -1)[torch.arange(tokens), labels]
    (right,) = torch.autograd.grad((expected * weights.double()).sum(), exact)
    assert got.shape == (tokens,)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient.double(), right, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_is_a_row_and_other_shapes_pass(dtype: torch.dtype):
    shapes = []

    def counted(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shapes.append((tuple(logits.shape), tuple(labels.shape)))
        return ROWWISE(logits, labels)

    logits = torch.randn(CHUNK + 7, 5).to(dtype)
    labels = torch.randint(0, 5, (CHUNK + 7,))
    packed = in_chunks(counted)(logits, labels)
    assert shapes == [((1, CHUNK, 5), (1, CHUNK)), ((1, 7, 5), (1, 7))]
    torch.testing.assert_close(packed, ROWWISE(logits, labels))
    batch = in_chunks(counted)(logits[:6].view(2, 3, 5), labels[:6].view(2, 3))
    assert shapes[2:] == [((2, 3, 5), (2, 3))]
    torch.testing.assert_close(batch, ROWWISE(logits[:6], labels[:6]).view(2, 3))
