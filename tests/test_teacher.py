"""The teacher reads the same response ids behind another prompt, and nothing else differs (I4, I5, I8)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl.agentopsd.config import ConfigError, TeacherConfig
from verl.agentopsd.episodes import Episode
from verl.agentopsd.privilege import Hindsight, Nothing, Skill
from verl.agentopsd.rollout.chat import ChatFormat
from verl.agentopsd.skills.bank import MissingSkill, SkillBank
from verl.agentopsd.teacher import TeacherPolicy, scoring_batch
from verl.agentopsd.teacher_model import require_same_vocabulary

WORDS = "play the game look at mug skill open take go to a b c d e f".split()


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    special = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate(special + WORDS + ["\n"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
    )
    fast.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return ChatFormat(fast, {})


def episode(key: str, response: list[int], task_type: str = "find") -> Episode:
    mask = torch.tensor([index % 2 == 0 for index in range(len(response))])
    zeros = torch.zeros(len(response))
    facts = {
        "game_id": f"train/{key}",
        "task_type": task_type,
        "messages": [{"role": "system", "content": "play the game"}, {"role": "user", "content": "look at mug"}],
        "turns": [],
        "won": True,
        "env_error": "",
    }
    return Episode(f"{key}_0_0", torch.tensor([1, 2]), torch.tensor(response), mask, zeros, zeros, 1.0, facts)


class Engine:
    """The log-prob of a token is its position in the row, so that every slice can be told apart."""

    def __init__(self) -> None:
        self.calls: list[TensorDict] = []

    def __call__(self, batch: TensorDict) -> TensorDict:
        self.calls.append(batch)
        rows = batch["input_ids"].unbind()
        # the engine's row t predicts token t + 1
        values = [torch.arange(len(row)).float() + 1 for row in rows]
        return TensorDict(
            {"log_probs": torch.nested.as_nested_tensor(values, layout=torch.jagged)}, batch_size=[len(rows)]
        )


def teacher(chat: ChatFormat, engine: Engine, **settings) -> TeacherPolicy:
    bank = SkillBank("test", "open", {"find": "take a", "clean": "go to b c d"})
    options = {"max_length": 64, "row_multiple": 1, "privilege": Skill(bank), **settings}
    config = TeacherConfig(skill_position="user", **options.pop("config", {}))
    return TeacherPolicy(config, chat, compute_log_prob=engine, temperature=0.7, **options)


def test_rows_end_in_the_student_s_response_and_start_with_the_skill(chat):
    engine = Engine()
    policy = teacher(chat, engine)
    one = episode("g", [7, 8, 9, 10])
    scores = policy.log_probs([one])
    (row,) = engine.calls[0]["input_ids"].unbind()
    expected = chat.initial_ids(
        [
            {"role": "system", "content": "play the game"},
            {"role": "user", "content": "look at mug\nopen\ntake a"},
        ]
    )
    assert row.tolist() == expected + [7, 8, 9, 10]
    # and asks for the action tokens alone
    (mask,) = engine.calls[0]["loss_mask"].unbind()
    assert mask.tolist() == [0] * len(expected) + [1, 0, 1, 0]
    # token at position p of the row has the value p
    assert scores[0].tolist() == [len(expected) + t for t in range(4)]
    assert policy.tokens == len(expected) + 4


def test_scores_come_back_in_the_order_asked_whatever_the_lengths(chat):
    engine = Engine()
    rows = [episode("long", [7] * 9), episode("short", [8]), episode("middle", [9] * 5, "clean")]
    scores = teacher(chat, engine).log_probs(rows)
    assert [len(score) for score in scores] == [9, 1, 5]
    single = [teacher(chat, Engine()).log_probs([row])[0] for row in rows]
    assert all(torch.equal(left, right) for left, right in zip(scores, single, strict=True))
    lengths = [len(row) for row in engine.calls[0]["input_ids"].unbind()]
    assert lengths == sorted(lengths)


def test_rows_are_padded_to_what_the_engine_can_split(chat):
    engine = Engine()
    scores = teacher(chat, engine, row_multiple=4).log_probs([episode(name, [7, 8]) for name in "abcde"])
    assert len(engine.calls[0]["input_ids"].unbind()) == 8
    assert len(scores) == 5


def test_nothing_to_score_costs_nothing(chat):
    engine = Engine()
    policy = teacher(chat, engine)
    assert policy.log_probs([]) == [] and engine.calls == [] and policy.tokens == 0


def test_every_call_gets_a_fresh_batch_with_the_sampling_temperature(chat):
    engine = Engine()
    policy = teacher(chat, engine)
    policy.log_probs([episode("a", [7])])
    # what a worker adds to its batch must not reach the next call
    engine.calls[0].set_non_tensor("no_lora_adapter", True)
    policy.log_probs([episode("a", [7])])
    assert set(engine.calls[1].keys()) == {
        "input_ids",
        "position_ids",
        "loss_mask",
        "temperature",
        "calculate_entropy",
        "compute_loss",
    }
    assert engine.calls[1]["temperature"] == 0.7
    assert engine.calls[1]["calculate_entropy"] is False and engine.calls[1]["compute_loss"] is False


def test_a_row_that_does_not_fit_is_refused_with_the_arithmetic(chat):
    with pytest.raises(ConfigError, match=r"train/g: teacher prompt \d+ \+ response 60 = \d+ tokens.*may have 64"):
        teacher(chat, Engine()).log_probs([episode("g", [7] * 60)])


def test_a_game_without_a_skill_is_an_error(chat):
    with pytest.raises(MissingSkill, match="no skill for task type 'heat'"):
        teacher(chat, Engine()).log_probs([episode("g", [7], "heat")])


def test_a_row_must_end_in_its_response():
    with pytest.raises(AssertionError, match="must end in the student's response"):
        scoring_batch([torch.tensor([1, 2, 3])], [torch.tensor([2, 4])], [torch.ones(2)], 1.0)


def test_other_weights_without_text_read_the_student_s_own_prompt(chat):
    engine = Engine()
    one = episode("g", [7, 8])
    policy = teacher(chat, engine, privilege=Nothing(), config={"source": "ref", "privilege": "none"})
    assert policy.log_probs([one])[0].tolist() == [2, 3]
    (row,) = engine.calls[0]["input_ids"].unbind()
    assert row.tolist() == [*one.prompt_ids.tolist(), 7, 8]


def won(key: str, actions: list[str], wins: bool = True) -> Episode:
    made = episode("g", [7, 8])
    facts = {**made.facts, "turns": [{"command": one, "valid": True} for one in actions], "won": wins}
    return dataclasses.replace(made, key=key, facts=facts, old_log_probs=torch.tensor([-1.0, -2.0]))


def test_an_episode_without_hindsight_is_not_asked_again(chat):
    """The student itself behind its own prompt: the answer is known, the gap is exactly 0 and it is counted."""
    engine = Engine()
    rows = [won("g_0_0", ["look"]), won("g_1_0", ["go"], wins=False), won("h_0_0", ["look"])]
    policy = teacher(chat, engine, privilege=Hindsight(), config={"privilege": "hindsight"})
    scores = policy.log_probs(rows, among=rows)
    assert policy.without_text == ["g_0_0", "h_0_0"]
    assert scores[0].tolist() == scores[2].tolist() == [-1.0, -2.0]
    assert len(engine.calls) == 1 and len(engine.calls[0]["input_ids"].unbind()) == 1
    assert scores[1].tolist() != [-1.0, -2.0]


def test_hindsight_that_does_not_fit_is_left_out_whole(chat):
    rows = [won("g_0_0", ["look"] * 40), won("g_1_0", ["go"], wins=False)]
    policy = teacher(chat, Engine(), privilege=Hindsight(), config={"privilege": "hindsight"})
    assert policy.log_probs(rows, among=rows)[1].tolist() == [-1.0, -2.0]
    assert policy.without_text == ["g_0_0", "g_1_0"] and policy.tokens == 0


def test_vocabularies_are_compared_token_by_token(chat):
    words = Tokenizer(models.WordLevel({"play": 0, "b": 99}, unk_token="play"))
    other = PreTrainedTokenizerFast(tokenizer_object=words)
    require_same_vocabulary(chat.tokenizer, chat.tokenizer, "same")
    with pytest.raises(ConfigError, match=r"path=/t has another vocabulary.*\d+ of \d+ tokens differ.*student id"):
        require_same_vocabulary(chat.tokenizer, other, "/t")


def test_the_student_s_skill_stays_in_the_prompt_that_the_teacher_reads(chat):
    """What the two readings differ in is the privileged text alone (I4)."""
    engine = Engine()
    one, plain = episode("g", [7, 8]), episode("h", [7, 8])
    one.facts.update(skill="go to b", skill_position="system")
    played = [{"command": "take a", "valid": True}]
    won = dataclasses.replace(one, key="g_1_0", facts=one.facts | {"won": True, "turns": played})
    policy = teacher(chat, engine, privilege=Hindsight(), config={"privilege": "hindsight"})
    text = Hindsight().texts([one], [one, won])[0]
    assert text is not None
    ids = policy.prompt_ids(one, text).tolist()
    system, user = {"role": "system", "content": "play the game\n\ngo to b"}, "look at mug"
    assert ids == chat.initial_ids([system, {"role": "user", "content": f"{user}\n{text}"}])
    # another episode of the same game that was shown other words has a prompt of its own
    assert policy.prompt_ids(
        dataclasses.replace(one, facts=plain.facts | {"game_id": one.facts["game_id"]}), text
    ).tolist() == (
        chat.initial_ids(
            [{"role": "system", "content": "play the game"}, {"role": "user", "content": f"{user}\n{text}"}]
        )
    )
