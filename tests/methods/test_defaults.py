"""What every ``method=`` sets: the published constants, and nothing beside them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from verl.agentopsd.config import credit_config, distill_config, has_teacher, method_of
from verl.agentopsd.main import compose_config, config_group

UPDATES = 150
NAME, FULL = "algorithm.adv_estimator", "trainer.experiment_name"

# what a run of method=grpo has in the keys that methods set: the constants of AgentOPSD (arXiv 2608.05987) are there
# for every method, only the estimator is another
BASE = {
    NAME: "grpo",
    FULL: "alfworld_grpo",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "agentopsd.lambda": 0.5,
    "agentopsd.gamma": 0.95,
    "agentopsd.bound": 0.2,
    "agentopsd.eps": 1e-4,
    "agentopsd.granularity": "turn",
    "agentopsd.recursion": True,
    "agentopsd.prior": "group",
    "agentopsd.direction": "signed",
    "agentopsd.evidence": "raw",
    "agentopsd.shuffle_evidence": False,
    "agentopsd.warmdown_steps": 0,
    "agentopsd.base_estimator": "grpo",
    "agentopsd.student_skill": False,
    "agentopsd.distill.coef": None,
    "agentopsd.distill.warmdown_steps": 0,
    "agentopsd.distill.pg_coef": 1.0,
    "agentopsd.distill.beta": 5.0,
    "agentopsd.distill.kl": "k3+",
    "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
    "actor_rollout_ref.actor.loss_scale_factor": None,
    "actor_rollout_ref.actor.use_kl_loss": True,
    "actor_rollout_ref.actor.kl_loss_coef": 0.01,
}

# method: its estimator, and what its file changes of the above
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "rloo": ("grpo", {"agentopsd.base_estimator": "rloo"}),
    "dr_grpo": (
        "grpo",
        {
            "algorithm.norm_adv_by_std_in_grpo": False,
            "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm",
            "actor_rollout_ref.actor.loss_scale_factor": 12288,  # data.max_response_length
            "actor_rollout_ref.actor.use_kl_loss": False,
        },
    ),
    "skill_grpo": ("skill_grpo", {"agentopsd.student_skill": True}),
    "agentopsd": ("agentopsd", {}),
    "agentopsd_token": ("agentopsd", {"agentopsd.granularity": "token"}),
    "agentopsd_no_recursion": ("agentopsd", {"agentopsd.recursion": False}),
    "agentopsd_magnitude": ("agentopsd", {"agentopsd.direction": "magnitude"}),
    "agentopsd_prior_half": ("agentopsd", {"agentopsd.prior": 0.5}),
    "agentopsd_shuffled": ("agentopsd", {"agentopsd.shuffle_evidence": True}),
    "step_opsd": ("step_opsd", {}),
    "rlsd": ("rlsd", {"agentopsd.warmdown_steps": UPDATES}),
    "opd": ("opd", {"agentopsd.distill.coef": 1.0}),
    "sdar": ("sdar", {"agentopsd.distill.coef": 0.01}),
    "grpo_opsd": ("grpo_opsd", {"agentopsd.distill.coef": 0.01}),
    "skill_sd": ("skill_sd", {"agentopsd.distill.coef": 0.001, "agentopsd.distill.warmdown_steps": UPDATES}),
}


@functools.cache
def composed(method: str, *overrides: str) -> DictConfig:
    return compose_config(["model=qwen2.5_3b", "device=gpu", "run_dir=here", f"method={method}", *overrides])


def flat(section: Any, prefix: str = "") -> dict[str, Any]:
    """Every value by its dotted key."""
    if not isinstance(section, dict) or not section:
        return {prefix: section}
    parts = [flat(part, f"{prefix}.{name}" if prefix else str(name)) for name, part in section.items()]
    return {key: value for part in parts for key, value in part.items()}


def values(config: DictConfig, keys: Iterable[str]) -> dict[str, Any]:
    return {key: OmegaConf.select(config, key) for key in keys}


def test_every_method_is_in_the_table():
    assert set(CHANGES) == set(config_group("method"))


def test_the_constants_that_all_methods_share():
    assert values(composed("grpo"), BASE) == BASE


@pytest.mark.parametrize("method", CHANGES)
def test_a_method_changes_its_constants_and_nothing_else(method: str):
    """As written in the files: what follows from a changed key by a reference is no change of its own."""
    estimator, changes = CHANGES[method]
    config, grpo = composed(method), composed("grpo")
    assert values(config, BASE) == {**BASE, NAME: estimator, FULL: f"alfworld_{method}", **changes}
    written, plain = (flat(OmegaConf.to_container(one, resolve=False)) for one in (config, grpo))
    assert written.keys() == plain.keys()
    assert {key for key in written if written[key] != plain[key]} - {NAME, FULL} == set(changes)


@pytest.mark.parametrize("method", ["agentopsd", "rlsd", "step_opsd"])
def test_the_credit_rule_gets_the_published_constants(method: str):
    rule = credit_config(composed(method))
    assert (rule.lam, rule.gamma, rule.bound, rule.eps) == (0.5, 0.95, 0.2, 1e-4)
    assert (rule.granularity, rule.recursion, rule.prior) == ("turn", True, "group")
    assert (rule.direction, rule.evidence) == ("signed", "raw")


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("agentopsd_token", {"granularity": "token"}),
        ("agentopsd_no_recursion", {"recursion": False}),
        ("agentopsd_magnitude", {"direction": "magnitude"}),
        ("agentopsd_prior_half", {"prior": 0.5}),
        ("agentopsd_shuffled", {}),  # the order is the trainer's: the rule is the same
    ],
)
def test_an_ablation_changes_one_constant_of_the_rule(method: str, changes: dict[str, Any]):
    plain, ablated = vars(credit_config(composed("agentopsd"))), vars(credit_config(composed(method)))
    assert {key: ablated[key] for key in ablated if ablated[key] != plain[key]} == changes


def test_rlsd_goes_from_one_half_to_0_over_the_run():
    """Also over a run of another length."""
    for overrides, updates in ([], UPDATES), (["trainer.total_training_steps=40"], 40):
        rule = credit_config(composed("rlsd", *overrides))
        at = [rule.lambda_at(finished) for finished in (0, updates // 2, updates, updates + 1)]
        assert at == pytest.approx([0.5, 0.25, 0.0, 0.0], abs=1e-12)
    assert credit_config(composed("agentopsd")).lambda_at(UPDATES) == 0.5, "no other method's falls"


@pytest.mark.parametrize(
    ("method", "first", "half", "last"),
    [("opd", 1.0, 1.0, 1.0), ("sdar", 0.01, 0.01, 0.01), ("grpo_opsd", 0.01, 0.01, 0.01), ("skill_sd", 1e-3, 5e-4, 0)],
)
def test_the_weight_of_the_loss_term_over_the_run(method: str, first: float, half: float, last: float):
    for overrides, updates in ([], UPDATES), (["trainer.total_training_steps=40"], 40):
        distill = distill_config(composed(method, *overrides))
        at = [distill.coef_at(finished) for finished in (0, updates // 2, updates)]
        assert at == pytest.approx([first, half, last], abs=1e-15)
        assert (distill.pg_coef, distill.beta, distill.kl) == (1.0, 5.0, "k3+")


def test_dr_grpo_divides_by_the_length_of_a_response():
    actor = composed("dr_grpo", "data.max_response_length=4096").actor_rollout_ref.actor
    assert actor.loss_scale_factor == 4096


def test_no_other_group_sets_what_a_method_sets():
    """The other groups are composed after the method: a key that both set would be theirs."""
    by_method = {key for name in config_group("method") for key in keys_of("method", name)} - {"defaults"}
    assert by_method >= {key for _, changes in CHANGES.values() for key in changes}
    both = {
        (name, key, value)
        for group in ("env", "model", "device", "backend", "rollout_engine")
        for name in config_group(group)
        for key, value in keys_of(group, name).items()
        if key in by_method
    }
    no_kl = ("actor_rollout_ref.actor.use_kl_loss", False)  # as Dr. GRPO sets it
    assert both == {("tiny", *no_kl), ("smollm2_135m", *no_kl)}


def keys_of(group: str, name: str) -> dict[str, Any]:
    """What a file of a group sets, by dotted key of the whole configuration."""
    text = files("agentopsd_config").joinpath(group, f"{name}.yaml").read_text(encoding="utf-8")
    package = text.split("\n", 1)[0].removeprefix("# @package ")
    return flat(OmegaConf.to_container(OmegaConf.create(text)), "" if package == "_global_" else package)


def test_who_reads_a_teacher():
    without = {method for method in CHANGES if not has_teacher(composed(method))}
    assert without == {"grpo", "rloo", "dr_grpo", "skill_grpo"}
    assert method_of(composed("skill_grpo")).student_skill
