"""The configuration: groups compose, bad values are refused before anything starts, with the key and the remedy."""

import pytest
from omegaconf import OmegaConf

from verl.agentopsd import config as checks
from verl.agentopsd.main import compose_config, config_group, plan

TINY = ["model=tiny", "device=cpu"]


def refuse(*overrides: str) -> str:
    with pytest.raises(checks.ConfigError) as error:
        checks.validate(compose_config([*TINY, *overrides]))
    return str(error.value)


def test_the_defaults_are_the_paper_s():
    config = compose_config(["model=qwen2.5_3b", "device=gpu"])
    rule = checks.credit_config(config)
    assert (rule.lam, rule.gamma, rule.bound, rule.eps) == (0.5, 0.95, 0.2, 1e-4)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.kl_loss_coef) == (0.2, 0.24, 0.01)
    assert (actor.loss_agg_mode, actor.kl_loss_type, actor.use_kl_loss) == ("seq-mean-token-mean", "low_var_kl", True)
    assert (config.data.train_batch_size, rollout.n, config.env.max_turns) == (16, 8, 50)
    assert (config.trainer.total_training_steps, actor.optim.lr, actor.ppo_epochs) == (150, 1e-6, 1)


@pytest.mark.parametrize("method", config_group("method"))
def test_every_method_composes_and_validates(method: str):
    """With every preset and back end: tests/test_presets.py."""
    config = compose_config([*TINY, f"method={method}"])
    checks.validate(config)
    name = checks.method_of(config).name
    assert name in plan(config) and (method.startswith(name) or name == "grpo")


@pytest.mark.parametrize(
    ("method", "rereads"),
    [("grpo", False), ("skill_grpo", False), ("agentopsd_token", True), ("opd", True), ("skill_sd", True)],
)
def test_a_teacher_is_there_when_the_method_reads_one(method: str, rereads: bool):
    assert checks.has_teacher(compose_config([*TINY, f"method={method}"])) == rereads


def test_a_loss_term_of_weight_0_needs_no_teacher():
    assert not checks.has_teacher(compose_config([*TINY, "method=sdar", "agentopsd.distill.coef=0"]))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["agentopsd.teacher.source=model"], "source=model needs agentopsd.teacher.path, the folder of the teacher's"),
        (["agentopsd.teacher.path=/x"], "agentopsd.teacher.path=/x has no effect with agentopsd.teacher.source=self"),
        (["agentopsd.teacher.source=ref"], "source=ref needs the reference policy, which this run does not load"),
        (["agentopsd.teacher.privilege=none"], "compares the student with itself, every gap is 0"),
        (["agentopsd.teacher.privilege=file"], "privilege=file needs agentopsd.teacher.file, a YAML or JSON mapping"),
        (
            ["agentopsd.teacher.file=/x"],
            "agentopsd.teacher.file=/x has no effect with agentopsd.teacher.privilege=skill",
        ),
        (["agentopsd.teacher.n_gpus_per_node=1"], "belongs to agentopsd.teacher.source=model"),
        (["agentopsd.student_skill=true"], "shows both the same skill"),
        (["algorithm.adv_estimator=sdar"], "agentopsd.distill.coef is not set: choose method=sdar"),
        (
            ["method=step_opsd", "agentopsd.shuffle_evidence=true"],
            "is a control of algorithm.adv_estimator=agentopsd, not of step_opsd",
        ),
        (["algorithm.adv_estimator=skill_grpo"], "needs agentopsd.student_skill=true: choose method=skill_grpo"),
        (["method=sdar", "agentopsd.distill.kl=k3"], "agentopsd.distill.kl=k3: must be one of k2, k3+"),
        (["agentopsd.teacher.source=other"], "agentopsd.teacher.source=other: must be one of self, ref, model"),
    ],
)
def test_teachers_that_cannot_work_are_refused(overrides: list[str], message: str):
    assert message in refuse(*overrides)


def test_a_teacher_of_its_own_asks_for_its_gpus():
    own = ["agentopsd.teacher.source=model", "agentopsd.teacher.path=/x", "agentopsd.teacher.n_gpus_per_node=1"]
    config = compose_config([*TINY, *own])
    assert checks.teacher_gpus(config) == 1 and config.ray_kwargs.ray_init.num_gpus == 2
    assert checks.teacher_gpus(compose_config([*TINY, *own, "method=grpo"])) == 0


def test_a_group_given_twice_is_decided_by_the_last():
    assert compose_config([*TINY, "model=qwen2.5_3b"]).data.train_batch_size == 16


def test_overrides_reach_the_credit_rule():
    rule = checks.credit_config(
        compose_config([*TINY, "agentopsd.lambda=0.3", "agentopsd.gamma=1.0", "agentopsd.bound=0.5"])
    )
    assert (rule.lam, rule.gamma, rule.bound) == (0.3, 1.0, 0.5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("agentopsd.bound=3", "agentopsd.bound=3: must be a number, at least 0 and less than 1"),
        ("agentopsd.bound=nan", "agentopsd.bound=nan: must be a number, at least 0 and less than 1"),
        ("agentopsd.lambda=-0.1", "agentopsd.lambda=-0.1: must be a number, at least 0 and at most 1"),
        ("agentopsd.gamma=high", "agentopsd.gamma=high: must be a number"),
        ("agentopsd.eps=0", "agentopsd.eps=0: must be a number, greater than 0 and less than 0.5"),
        ("agentopsd.granularity=turns", "must be one of turn, token; did you mean turn?"),
        ("agentopsd.prior=1", "agentopsd.prior=1: must be a number, greater than 0 and less than 1"),
        ("agentopsd.recursion=2", "agentopsd.recursion=2: must be true or false"),
        ("agentopsd.teacher.source=nobody", "agentopsd.teacher.source=nobody: must be one of"),
        ("algorithm.adv_estimator=agentops", "did you mean agentopsd?"),
        ("env.max_turns=0", "env.max_turns=0: must be a whole number, at least 1"),
        ("env.max_turns=2.5", "env.max_turns=2.5: must be a whole number"),
        ("env.invalid_action_penalty=-0.1", "env.invalid_action_penalty=-0.1: must be a number, at least 0"),
        ("env.invalid_action_penalty=inf", "env.invalid_action_penalty=inf: must be a number, at least 0 and finite"),
        ("env.success_reward=inf", "env.success_reward=inf: must be a number, greater than 0 and finite"),
        ("env.episode_timeout=inf", "env.episode_timeout=inf: must be a number, greater than 0 and finite"),
        ("agentopsd.distill.coef=inf", "agentopsd.distill.coef=inf: must be a number, at least 0 and finite"),
        ("agentopsd.distill.pg_coef=inf", "agentopsd.distill.pg_coef=inf: must be a number, at least 0 and finite"),
        ("agentopsd.distill.beta=inf", "agentopsd.distill.beta=inf: must be a number, greater than 0 and finite"),
        ("agentopsd.lambda=???", "agentopsd.lambda=???: has no value yet: give one"),
        ("limits.save=???", "limits.save=???: has no value yet: give one"),
        ("agentopsd.lambda='${typo}'", "agentopsd.lambda=${typo}: cannot be read (Interpolation key 'typo' not found)"),
        ("limits.save='${nothing:1}'", "limits.save=${nothing:1}: cannot be read (Unsupported interpolation type noth"),
        ("agentopsd.gamma='${agentopsd.gamma}'", "agentopsd.gamma=${agentopsd.gamma}: cannot be read (Recursive"),
        ("algorithm.adv_estimator='${a.b}'", "algorithm.adv_estimator=${a.b}: cannot be read (Interpolation key 'a.b'"),
        ("+agentopsd.lamda=0.3", "agentopsd.lamda: unknown key, nothing reads it; did you mean agentopsd.lambda?"),
        ("+agentopsd.distill.coeff=1", "agentopsd.distill.coeff: unknown key, nothing reads it; did you mean agentops"),
        ("+limits.rollouts=9", "limits.rollouts: unknown key, nothing reads it; did you mean limits.rollout?"),
        (
            "+hardware.gpu_per_node=9",
            "hardware.gpu_per_node: unknown key, nothing reads it; did you mean hardware.gpus",
        ),
        ("+env.max_turn=9", "env.max_turn: unknown key, nothing reads it; did you mean env.max_turns?"),
        ("+env.generated.trian=9", "env.generated.trian: unknown key, nothing reads it; did you mean env.generated.tr"),
        ("+data.sampling.zzz=9", "data.sampling.zzz: unknown key, nothing reads it; leave it out (known here: strateg"),
        ("agentopsd.distill=null", "agentopsd.distill=None: must be a section with the keys coef, warmdown_steps"),
        ("env.max_turns_schedule=[[3,10]]", "the first stage must start at 0 finished updates"),
        ("data.sampling.strategy=hard", "data.sampling.strategy=hard: must be one of shuffle, difficulty"),
        ("data.sampling.low=0.95", "data.sampling.low=0.95 must be below data.sampling.high=0.95"),
        ("data.sampling.hard_share=0.8", "hard_share + easy_share + explore_share is 1.1, more than a whole update"),
        ("data.sampling.window=0", "data.sampling.window=0: must be a whole number, at least 1"),
        ("agentopsd.action_logits=0", "agentopsd.action_logits=0: must be true or false"),
        ("agentopsd.student_skill=1", "agentopsd.student_skill=1: must be true or false"),
        ("hardware.forked_workers=often", "hardware.forked_workers=often: must be true or false"),
        ("agentopsd.student_skill=true", "agentopsd.student_skill=true with"),
        ("env.backend=exactly", "env.backend=exactly: must be one of exact, textworld; did you mean exact?"),
        ("actor_rollout_ref.rollout.n=1", "a group of one has no advantage"),
        ("data.train_batch_size=9", "data.train_batch_size=9 is not a multiple of"),
        ("env.max_action_tokens=4000", "not even one answer fits"),
        ("actor_rollout_ref.rollout.max_model_len=100", "384 + data.max_response_length 1536 = 1920: raise it to 1920"),
    ],
)
def test_bad_values_are_refused_with_key_and_remedy(override: str, message: str):
    assert message in refuse(override)


MINI, MICRO = "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
LOG_PROB_MICRO = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        # the tiny preset: 8 games of 8 episodes an update, 4 games a mini-batch
        (
            ["trainer.n_gpus_per_node=3"],
            "a mini-batch has 4 games × rollout.n 8 = 32 rows, which 3 data-parallel ranks cannot share evenly: "
            f"change {MINI}",
        ),
        ([f"{MICRO}=5"], f"{MICRO}=5 does not divide the 32 rows of a rank: choose a divisor of 32"),
        # two ranks: 16 rows of a mini-batch each, 32 of the update
        (
            ["trainer.n_gpus_per_node=2", f"{MICRO}=32", f"{LOG_PROB_MICRO}=64"],
            f"{MICRO}=32 does not divide the 16 rows of a rank: choose a divisor of 16\n"
            f"{LOG_PROB_MICRO}=64 does not divide the 32 rows of a rank: choose a divisor of 32",
        ),
    ],
)
def test_rows_that_do_not_come_out_even_are_refused(overrides: list[str], message: str):
    assert refuse(*overrides) == message


def test_rows_that_come_out_even_pass():
    checks.validate(compose_config([*TINY, "trainer.n_gpus_per_node=2", f"{MICRO}=16", f"{LOG_PROB_MICRO}=32"]))
    dynamic = ["actor_rollout_ref.actor.use_dynamic_bsz=true", f"{MICRO}=5"]
    checks.validate(compose_config([*TINY, *dynamic]))  # tokens are counted there, not rows


def test_what_refers_to_an_unreadable_key_is_not_named_as_well():
    assert refuse("env.seed='${typo}'").count("\n") == 0
    assert refuse("env.seed=???", "agentopsd.bound=3").count("\n") == 0


def test_an_environment_that_is_not_shipped_may_have_keys_of_its_own():
    checks.validate(compose_config([*TINY, "env.name=guess", "+env.highest=20"]))


def test_all_problems_are_reported_at_once():
    assert len(refuse("agentopsd.bound=3", "env.max_turns=0").splitlines()) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("agentopsd.bonud=1", "did you mean agentopsd.bound?"),
        ("agentopsd.teacher.skils=x", "did you mean agentopsd.teacher.skills?"),
        ("env.max_turn=3", "did you mean env.max_turns?"),
        ("model=tinny", "model=tinny: unknown choice; known: "),
        ("agentopsd.bound", "write KEY=VALUE"),
    ],
)
def test_unknown_overrides_come_with_a_suggestion(override: str, message: str):
    with pytest.raises(checks.ConfigError) as error:
        compose_config([*TINY, override])
    assert message in str(error.value)


def test_known_keys_lists_sections_and_leaves():
    assert checks.known_keys(OmegaConf.to_container(OmegaConf.create({"a": {"b": 1}, "c": 2}))) == ["a", "a.b", "c"]


def test_sampling_by_difficulty_needs_a_dataloader_that_does_not_run_ahead():
    message = refuse("data.sampling.strategy=difficulty", "data.dataloader_num_workers=2")
    assert "data.dataloader_num_workers=2 would draw games before the outcomes of the last update" in message


def test_a_student_with_a_skill_goes_with_grpo():
    checks.validate(compose_config([*TINY, "method=grpo", "agentopsd.student_skill=true"]))


def test_the_sampling_section_reaches_the_sampler():
    config = compose_config([*TINY, "data.sampling.strategy=difficulty", "data.sampling.rest=2"])
    assert checks.sampling_config(config) == checks.SamplingConfig("difficulty", rest=2)
