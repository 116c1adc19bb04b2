"""Three trajectories with made-up log-probs: the exact loss by hand in float64, and its gradient by closed form."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.losses import ppo_loss

from verl.agentopsd.main import compose_config
from verl.agentopsd.methods import METHODS
from verl.agentopsd.methods.base import DistillConfig
from verl.agentopsd.methods.loss import COEF, distilled_loss

LOSSES = sorted(name for name, method in METHODS.items() if method.loss_term is not None)
LOW, HIGH, DUAL = 0.2, 0.24, 3.0

# per trajectory and response token: (action?, A, log π_θ, log π_old, log π_T)
ROWS = [
    [(1, 1.0, -0.5, -0.6, -0.2), (1, 1.0, -1.0, -0.9, -2.0), (0, 0.0, -3.0, -3.0, 9.0), (1, 1.0, -0.1, -0.9, -0.3)],
    [(1, -0.7, -0.8, -0.8, -0.8), (0, 0.0, -1.0, -1.5, -7.0)],
    [(0, 0.0, -1.0, -1.0, -1.0), (1, 0.0, -2.0, -2.1, -0.4), (1, 0.0, -0.3, -0.2, -1.5)],
]
PROMPTS = [2, 1, 3]


def nested(rows: list[list[float]], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def column(index: int) -> list[list[float]]:
    return [[float(token[index]) for token in row] for row in ROWS]


def actor_config(**changes: Any) -> Any:
    config = compose_config(["model=tiny", "device=cpu", "method=grpo"])
    return dataclasses.replace(omega_conf_to_dataclass(config.actor_rollout_ref.actor), **changes)


def batch(coef: float | None) -> TensorDict:
    tensors: dict[str, Any] = {
        "prompts": nested([[1.0] * length for length in PROMPTS], torch.int64),
        "responses": nested([[1.0] * len(row) for row in ROWS], torch.int64),
        "response_mask": nested(column(0), torch.int64),
        "action_mask": nested(column(0), torch.int64),
        "advantages": nested(column(1)),
        "old_log_probs": nested(column(3)),
        "teacher_log_probs": nested(column(4)),
    }
    settings: dict[str, Any] = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": len(ROWS)}
    if coef is not None:
        settings[COEF] = coef
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=settings)


def model_output() -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The engine's output: position t of a row predicts token t + 1, so a response's values stand one to the left."""
    leaves = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in column(2)]
    rows = [
        torch.cat([torch.zeros(length - 1), leaf, torch.zeros(1)]) for length, leaf in zip(PROMPTS, leaves, strict=True)
    ]
    return {"log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, leaves


def clipped(A: float, new: float, old: float) -> tuple[float, float]:
    """The clipped loss of one token and its derivative by log π_θ."""
    ratio = math.exp(new - old)
    plain, cut = -A * ratio, -A * min(max(ratio, 1 - LOW), 1 + HIGH)
    value, slope = (plain, plain) if plain >= cut else (cut, 0.0)
    if A < 0 and value > -A * DUAL:
        value, slope = -A * DUAL, 0.0
    return value, slope


def term(name: str, new: float, old: float, teacher: float) -> tuple[float, float]:
    """A method's term on one action token and its derivative by log π_θ."""
    d = teacher - old
    if name == "opd":
        return clipped(d, new, old)
    if name == "sdar":
        gate = 1 / (1 + math.exp(-5.0 * d))
        return gate * (teacher - new), -gate
    u = teacher - new
    k3 = math.exp(u) - u - 1
    if name == "grpo_opsd":  # value of k3, gradient of k2
        return k3, -u
    assert name == "skill_sd"
    ratio = math.exp(new - old)
    return ratio * k3, ratio * k3 + ratio * (1 - math.exp(u))


def by_hand(name: str, coef: float) -> tuple[float, list[list[float]]]:
    """Loss and gradient: the mean over trajectories of the mean over each one's action tokens."""
    loss, slopes = 0.0, []
    for row in ROWS:
        weight = 1 / len(ROWS) / sum(token[0] for token in row)
        slope = []
        for action, A, new, old, teacher in row:
            value, derivative = 0.0, 0.0
            if action:
                (pg, pg_slope), (extra, extra_slope) = clipped(A, new, old), term(name, new, old, teacher)
                value, derivative = pg + coef * extra, pg_slope + coef * extra_slope
            loss += weight * value
            slope.append(weight * derivative)
        slopes.append(slope)
    return loss, slopes


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("coef", [1.0, 0.03])
def test_loss_and_gradient_are_those_by_hand(name: str, coef: float):
    output, leaves = model_output()
    loss, metrics = distilled_loss(actor_config(), output, batch(coef), method=name, distill=DistillConfig(coef=coef))
    loss.backward()
    expected, slopes = by_hand(name, coef)
    assert loss.item() == pytest.approx(expected, abs=1e-7)
    for leaf, slope in zip(leaves, slopes, strict=True):
        assert leaf.grad.tolist() == pytest.approx(slope, abs=1e-7)
    without, _ = by_hand(name, 0.0)
    assert coef * metrics["distill_loss"].values[0] == pytest.approx(expected - without, abs=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_off_the_action_mask_nothing_counts_and_the_teacher_has_no_gradient(name: str):
    """Also for a row whose A is 0: distillation still trains it."""
    data, (output, leaves) = batch(1.0), model_output()
    teacher = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in column(4)]
    data["teacher_log_probs"] = torch.nested.as_nested_tensor(teacher, layout=torch.jagged)
    loss, _ = distilled_loss(actor_config(), output, data, method=name, distill=DistillConfig(coef=1.0))
    loss.backward()
    assert all(one.grad is None or not one.grad.any() for one in teacher)
    for leaf, mask in zip(leaves, column(0), strict=True):
        assert not leaf.grad[torch.tensor(mask) == 0].any()
    assert leaves[2].grad.any()


@pytest.mark.parametrize("name", LOSSES)
def test_a_weight_of_0_is_verl_s_loss_bit_for_bit(name: str):
    (output, leaves), (other, others) = model_output(), model_output()
    loss, metrics = distilled_loss(actor_config(), output, batch(0.0), method=name, distill=DistillConfig())
    reference, _ = ppo_loss(actor_config(), other, batch(None))
    loss.backward()
    reference.backward()
    assert loss.item() == reference.item() and "distill_loss" not in metrics
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(leaves, others, strict=True))


@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_that_lost_the_weight_is_an_error(name: str):
    with pytest.raises(KeyError, match=f"no distill_coef: without it {name} would train as GRPO"):
        distilled_loss(actor_config(), model_output()[0], batch(None), method=name, distill=DistillConfig())


def test_the_direction_of_each_gradient():
    """Where the teacher likes a token better (d > 0), each method raises its probability; where it likes it less, OPD
    and the KL lower it, SDAR hardly moves."""
    for name in LOSSES:
        for d in (1.0, -1.0):
            _, slope = term(name, -1.0, -1.0, -1.0 + d)
            if name == "sdar":
                assert slope == pytest.approx(-0.9933 if d > 0 else -0.0067, abs=1e-4)
            else:
                assert (slope < 0) == (d > 0)


def test_rows_that_were_not_reread_are_left_out_of_the_term():
    data, (output, leaves) = batch(1.0), model_output()
    masks = column(0)
    masks[0] = [0.0] * len(masks[0])
    data["action_mask"] = nested(masks, torch.int64)
    data["advantages"] = nested([[0.0] * len(row) for row in ROWS])
    loss, _ = distilled_loss(actor_config(), output, data, method="sdar", distill=DistillConfig(coef=1.0))
    loss.backward()
    assert not leaves[0].grad.any() and leaves[1].grad.any()


def test_without_an_action_mask_the_response_mask_is_taken_and_said(caplog: pytest.LogCaptureFixture):
    data, (output, _) = batch(1.0), model_output()
    del data["action_mask"]
    loss, _ = distilled_loss(actor_config(), output, data, method="opd", distill=DistillConfig(coef=1.0))
    assert loss.item() == pytest.approx(by_hand("opd", 1.0)[0], abs=1e-7)
    assert "no action_mask: the distillation term is taken on response_mask" in caplog.text


def test_the_weight_decays_linearly():
    config = DistillConfig(coef=0.001, warmdown_steps=4)
    assert [config.coef_at(step) for step in range(6)] == pytest.approx([0.001, 0.00075, 0.0005, 0.00025, 0, 0])
    assert DistillConfig(coef=0.5).coef_at(1000) == 0.5


def test_pure_distillation_is_the_term_alone():
    """``pg_coef`` scales the advantages, in which the clipped loss is homogeneous."""
    data, (output, _) = batch(1.0), model_output()
    data["advantages"] = data["advantages"] * 0.0
    loss, _ = distilled_loss(actor_config(), output, data, method="opd", distill=DistillConfig(coef=1.0, pg_coef=0.0))
    weights = [1 / 3 / sum(token[0] for token in row) for row in ROWS]
    expected = sum(
        weight * term("opd", new, old, teacher)[0]
        for row, weight in zip(ROWS, weights, strict=True)
        for action, _, new, old, teacher in row
        if action
    )
    assert loss.item() == pytest.approx(expected, abs=1e-7)
