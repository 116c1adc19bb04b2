"""Log-probs at action positions equal the ones read from full logits."""

import pytest
import torch

from benchmarks.action_logprobs import action_log_probs


@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equal_to_full_logits(chunk: int, temperature: float):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 9, 8, generator=generator), torch.randn(50, 8, generator=generator)
    ids = torch.randint(50, (3, 9), generator=generator)
    mask = torch.rand(3, 9, generator=generator) < 0.5
    mask[:, 0] = False
    full = torch.log_softmax(hidden.double() @ weight.double().T / temperature, -1)
    expected = torch.stack([full[n, t - 1, ids[n, t]] for n, t in mask.nonzero().tolist()])
    scored = action_log_probs(hidden, weight, ids, mask, temperature, chunk)
    assert scored.dtype == torch.float32
    torch.testing.assert_close(scored.double(), expected, rtol=0, atol=1e-5)


def test_gradients_reach_the_hidden_states():
    hidden, weight = torch.randn(1, 4, 8, requires_grad=True), torch.randn(20, 8)
    action_log_probs(
        hidden, weight, torch.ones(1, 4).long(), torch.tensor([[False, False, True, False]])
    ).sum().backward()
    assert hidden.grad is not None and hidden.grad[0].abs().sum(-1).gt(0).tolist() == [False, True, False, False]


def test_nothing_to_score_and_what_cannot_be_scored():
    hidden, weight, ids = torch.randn(2, 3, 4), torch.randn(5, 4), torch.zeros(2, 3).long()
    assert action_log_probs(hidden, weight, ids, torch.zeros(2, 3).bool()).shape == (0,)
    with pytest.raises(ValueError, match="nothing stands before it"):
        action_log_probs(hidden, weight, ids, torch.ones(2, 3).bool())


def test_no_block_of_logits_is_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch):
    """The memory promise, counted: positions that meet the output matrix, and how many at once."""
    sizes = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w: sizes.append(len(x)) or linear(x, w))
    mask = torch.zeros(2, 40).bool()
    mask[:, 10:30] = True
    action_log_probs(torch.randn(2, 40, 4), torch.randn(9, 4), torch.zeros(2, 40).long(), mask, chunk=16)
    assert sizes == [16, 16, 8]
