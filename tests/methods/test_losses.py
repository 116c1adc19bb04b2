"""Five trajectories with made-up log-probs: the exact loss by hand in float64, and its gradient by closed form."""

from __future__ import annotations

import dataclasses
import functools
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
Rows = list[list[tuple[float, float, float, float, float]]]
ROWS: Rows = [
    [(1, 1.0, -0.5, -0.6, -0.2), (1, 1.0, -1.0, -0.9, -2.0), (0, 0.0, -3.0, -3.0, 9.0), (1, 1.0, -0.1, -0.9, -0.3)],
    [(1, -0.7, -0.8, -0.8, -0.8), (0, 0.0, -1.0, -1.5, -7.0)],
    [(0, 0.0, -1.0, -1.0, -1.0), (1, 0.0, -2.0, -2.1, -0.4), (1, 0.0, -0.3, -0.2, -1.5)],
    # A < 0: the lower clip, no clip above 1, the dual clip; for A and for d
    [(1, -1.2, -1.0, -0.5, -1.3), (1, -1.2, -0.5, -1.0, -1.7), (1, -1.2, -0.4, -1.9, -2.6)],
    # A > 0: no clip below 1
    [(1, 0.9, -1.5, -1.0, -0.5)],
]
PROMPTS = [2, 1, 3, 1, 2]
EXACT = {"rel": 0, "abs": 1e-12}
"""All of it is computed in float64."""


def nested(rows: list[list[float]], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def column(index: int, rows: Rows = ROWS) -> list[list[float]]:
    return [[float(token[index]) for token in row] for row in rows]


@functools.cache
def actor_of(method: str) -> Any:
    return omega_conf_to_dataclass(
        compose_config(["model=tiny", "device=cpu", f"method={method}"]).actor_rollout_ref.actor
    )


def actor_config(method: str = "grpo", **changes: Any) -> Any:
    return dataclasses.replace(actor_of(method), **changes)


def batch(coef: float | None, rows: Rows = ROWS, **sizes: Any) -> TensorDict:
    tensors: dict[str, Any] = {
        "prompts": nested([[1.0] * length for length in PROMPTS[: len(rows)]], torch.int64),
        "responses": nested([[1.0] * len(row) for row in rows], torch.int64),
        "response_mask": nested(column(0, rows), torch.int64),
        "action_mask": nested(column(0, rows), torch.int64),
        "advantages": nested(column(1, rows)),
        "old_log_probs": nested(column(3, rows)),
        "teacher_log_probs": nested(column(4, rows)),
    }
    settings: dict[str, Any] = {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": len(rows), **sizes}
    if coef is not None:
        settings[COEF] = coef
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=settings)


def model_output(rows: Rows = ROWS) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The engine's output: position t of a row predicts token t + 1, so a response's values stand one to the left."""
    leaves = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in column(2, rows)]
    shifted = [
        torch.cat([torch.zeros(length - 1), leaf, torch.zeros(1)])
        for length, leaf in zip(PROMPTS[: len(rows)], leaves, strict=True)
    ]
    return {"log_probs": torch.nested.as_nested_tensor(shifted, layout=torch.jagged)}, leaves


def one_token(
    new: float, old: float, teacher: float, A: float = 0.0, method: str | None = None, **constants: Any
) -> tuple[float, float]:
    """The package's loss of a single action token and its derivative by log π_θ: the policy loss of A, plus the
    method's term with weight 1."""
    rows: Rows = [[(1, A, new, old, teacher)]]
    output, (leaf,) = model_output(rows)
    if method is None:
        loss, _ = ppo_loss(actor_config(), output, batch(None, rows))
    else:
        distill = DistillConfig(coef=1.0, **constants)
        loss, _ = distilled_loss(actor_config(), output, batch(1.0, rows), method=method, distill=distill)
    loss.backward()
    return loss.item(), leaf.grad.item()


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


TOKENS, CONSTANT = 11, 7
WEIGHTS = {
    # of each action token in the loss: (trajectories, action tokens of its own)
    "seq-mean-token-mean": lambda rows, own: 1 / rows / own,
    "seq-mean-token-sum-norm": lambda rows, own: 1 / rows / CONSTANT,  # Dr. GRPO
    "token-mean": lambda rows, own: 1 / TOKENS,
}


def by_hand(name: str, coef: float, mode: str = "seq-mean-token-mean") -> tuple[float, list[list[float]]]:
    """Loss and gradient: by default the mean over trajectories of the mean over each one's action tokens."""
    loss, slopes = 0.0, []
    for row in ROWS:
        weight = WEIGHTS[mode](len(ROWS), sum(token[0] for token in row))
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
@pytest.mark.parametrize("mode", WEIGHTS)
def test_loss_and_gradient_are_those_by_hand(name: str, coef: float, mode: str):
    assert sum(token[0] for row in ROWS for token in row) == TOKENS - 1, "a token of another micro-batch counts too"
    actor = actor_config(loss_agg_mode=mode, loss_scale_factor=CONSTANT)
    (output, leaves), data = model_output(), batch(coef, batch_num_tokens=TOKENS)
    loss, metrics = distilled_loss(actor, output, data, method=name, distill=DistillConfig(coef=coef))
    loss.backward()
    expected, slopes = by_hand(name, coef, mode)
    assert loss.item() == pytest.approx(expected, **EXACT)
    for leaf, slope in zip(leaves, slopes, strict=True):
        assert leaf.grad.tolist() == pytest.approx(slope, **EXACT)
    without, _ = by_hand(name, 0.0, mode)
    assert coef * metrics["distill_loss"].values[0] == pytest.approx(expected - without, **EXACT)


@pytest.mark.parametrize(
    ("size", "log_ratio", "value", "slope"),
    [
        # L_clip of one token and its derivative by log π_θ; low .2, high .24, dual 3
        pytest.param(0.4, 0.1, -0.4 * math.exp(0.1), -0.4 * math.exp(0.1), id="not-clipped"),
        pytest.param(0.6, 0.8, -0.744, 0.0, id="upper-clip"),  # -.6 · 1.24
        pytest.param(0.5, -0.5, -0.5 * math.exp(-0.5), -0.5 * math.exp(-0.5), id="positive-is-not-clipped-below"),
        pytest.param(-0.8, -0.5, 0.64, 0.0, id="lower-clip"),  # .8 · .8
        pytest.param(-0.7, 0.5, 0.7 * math.exp(0.5), 0.7 * math.exp(0.5), id="negative-is-not-clipped-above"),
        pytest.param(-0.7, 1.5, 2.1, 0.0, id="dual-clip"),  # .7 · 3
    ],
)
def test_every_side_of_the_clip(size: float, log_ratio: float, value: float, slope: float):
    """The policy loss with A, and OPD's with d, are the same function."""
    new, old = -1.0 + log_ratio, -1.0
    assert one_token(new, old, -9.0, A=size) == pytest.approx((value, slope), **EXACT)
    assert one_token(new, old, old + size, method="opd") == pytest.approx((value, slope), **EXACT)


def test_dr_grpo_weighs_every_token_alike():
    """Three tokens of A = 1 and one of A = -.5, nothing clipped, constant 10: (-3 + .5) / 2 / 10."""
    rows: Rows = [[(1, 1.0, -1.0, -1.0, 0.0)] * 3, [(1, -0.5, -2.0, -2.0, 0.0), (0, 0.0, -1.0, -1.0, 0.0)]]
    actor = actor_config("dr_grpo", loss_scale_factor=10)
    output, leaves = model_output(rows)
    loss, _ = ppo_loss(actor, output, batch(None, rows))
    loss.backward()
    assert loss.item() == pytest.approx(-0.125, **EXACT)
    assert [leaf.grad.tolist() for leaf in leaves] == [
        pytest.approx([-0.05] * 3, **EXACT),
        pytest.approx([0.025, 0.0], **EXACT),
    ]
    # each row in a micro-batch of its own, of another width: the same sum
    alone = [ppo_loss(actor, model_output([row])[0], batch(None, [row], global_batch_size=2))[0].item() for row in rows]
    assert alone == pytest.approx([-0.15, 0.025], **EXACT)


def test_dr_grpo_divides_by_the_longest_response_and_has_no_kl():
    """On the shipped model's preset: 1536 tokens."""
    actor = actor_of("dr_grpo")
    assert (actor.loss_agg_mode, actor.use_kl_loss) == ("seq-mean-token-sum-norm", False)
    loss, metrics = ppo_loss(actor, model_output()[0], batch(None))
    by_token = [clipped(A, new, old)[0] for row in ROWS for action, A, new, old, _ in row if action]
    assert loss.item() == pytest.approx(sum(by_token) / 5 / 1536, **EXACT)
    assert "kl_loss" not in metrics


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


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("d", [1.0, -1.0, 0.3])
def test_the_direction_of_each_gradient(name: str, d: float):
    """At π_θ = π_old, by log π_θ: OPD's and the KLs' is -d, the reverse KL's, which raises what the teacher likes and
    lowers what it dislikes; SDAR's is -σ(β d), which raises it and hardly moves what the teacher dislikes."""
    _, slope = one_token(-1.0, -1.0, -1.0 + d, method=name)
    by_gate = {1.0: -0.9933071490757153, -1.0: -0.0066928509242848554, 0.3: -0.8175744761936437}
    assert slope == pytest.approx(by_gate[d] if name == "sdar" else -d, **EXACT)


def test_the_constants_of_the_terms_are_read():
    """π_θ = .5, π_T = .25: u = -log 2, and the gate of d = -log 2 at β = 1 is 1/3."""
    new, teacher, u = math.log(0.5), math.log(0.25), -math.log(2)
    assert one_token(new, new, teacher, method="sdar", beta=1.0) == pytest.approx((u / 3, -1 / 3), **EXACT)
    assert one_token(new, new, teacher, method="grpo_opsd", kl="k2") == pytest.approx((u * u / 2, -u), **EXACT)
    k3 = 0.5 - u - 1
    assert one_token(new, new, teacher, method="grpo_opsd", kl="k3+") == pytest.approx((k3, -u), **EXACT)


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
    assert loss.item() == pytest.approx(by_hand("opd", 1.0)[0], **EXACT)
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
    weights = [1 / 5 / sum(token[0] for token in row) for row in ROWS]
    expected = sum(
        weight * term("opd", new, old, teacher)[0]
        for row, weight in zip(ROWS, weights, strict=True)
        for action, _, new, old, teacher in row
        if action
    )
    assert loss.item() == pytest.approx(expected, **EXACT)
