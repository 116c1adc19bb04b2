"""The shipped tiny model: it loads everywhere, speaks the documented template and wins as often as its card says."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.agentopsd.envs.alfworld.games import TASK_TYPES
from verl.agentopsd.envs.base import make_family
from verl.agentopsd.models.play import ChatTokens, PlayConfig, play
from verl.agentopsd.models.tiny import TINY_ALFWORLD, TinyLM
from verl.agentopsd.skills.bank import SkillBank

CHAT = [
    {"role": "system", "content": "You play a household text game. Reply with one command."},
    {"role": "user", "content": "You see a bed 1, and a desk 12.\nYour task is to: put a mug in desk."},
]


@pytest.fixture(scope="module")
def model() -> TinyLM:
    return TinyLM.from_pretrained(TINY_ALFWORLD)


@cache
def shipped_tokens() -> ChatTokens:
    return ChatTokens(TINY_ALFWORLD / "tokenizer.json")


@pytest.fixture(scope="module")
def tokens() -> ChatTokens:
    return shipped_tokens()


@pytest.fixture(scope="module")
def card() -> dict:
    return json.loads((TINY_ALFWORLD / "card.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def family(alfworld_data: Path):
    data = {"name": "alfworld", "data_dir": str(alfworld_data)}
    return make_family({**data, "prompt_style": "compact", "action_format": "plain"})


@pytest.fixture(scope="module")
def bank() -> SkillBank:
    return SkillBank.load("alfworld_tiny", TASK_TYPES)


def test_special_tokens_have_fixed_ids(tokens: ChatTokens) -> None:
    assert (tokens.pad, tokens.role, tokens.end) == (0, {"system": 1, "user": 2, "assistant": 3}, 4)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("go to cabinet 12", ["go to", " cabinet", " 12"]),
        ("take mug 2 from countertop 1", ["take", " mug", " 2", " from", " countertop", " 1"]),
        ("move tomato 3 to toilet 1", ["move", " tomato", " 3", " to", " toilet", " 1"]),
        ("Nothing happens.", ["Nothing happens."]),
        ("You arrive at drawer 1. The drawer 1 is closed.",
         ["You arrive at", " drawer", " 1", ". The", " drawer", " 1", " is closed."]),
    ],
)  # fmt: skip
def test_game_words_are_single_tokens(tokens: ChatTokens, text: str, pieces: list[str]) -> None:
    assert [tokens.decode([i]) for i in tokens.encode(text)] == pieces


@given(st.text(max_size=80).filter(lambda text: "<|" not in text))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_encoding(text: str) -> None:
    tokenizer = shipped_tokens()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_renders_the_documented_ids(tokens: ChatTokens) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY_ALFWORLD)
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|end|>")
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == (
        "<|system|>You play a household text game. Reply with one command.<|end|>"
        "<|user|>You see a bed 1, and a desk 12.\nYour task is to: put a mug in desk.<|end|><|assistant|>"
    )
    for chat in (CHAT, [*CHAT, {"role": "assistant", "content": "go to desk 12"}, {"role": "user", "content": "Ok"}]):
        rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert list(rendered) == tokens.prompt(chat)
    answered = [*CHAT, {"role": "assistant", "content": "go to desk 12"}]
    whole = tokenizer.apply_chat_template(answered, return_dict=False)
    assert list(whole) == tokens.prompt(CHAT) + tokens.answer("go to desk 12")


def test_plain_transformers_gives_the_same_log_probs(model: TinyLM, tokens: ChatTokens, family, bank) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(TINY_ALFWORLD, dtype=torch.float32).eval()
    task = family.tasks("valid_unseen")[0]
    (episode,) = play(model, tokens, family, [task], [bank.text(task.task_type)])
    ids = torch.tensor([episode.ids])
    with torch.no_grad():
        theirs = reference(ids).logits.log_softmax(-1)
        ours = model.logits(model.hidden(ids)).log_softmax(-1)
    chosen = ids[:, 1:, None]
    difference = (theirs[:, :-1].gather(-1, chosen) - ours[:, :-1].gather(-1, chosen)).abs().max().item()
    assert difference < 1e-4
    assert sum(p.numel() for p in reference.parameters()) == sum(p.numel() for p in model.parameters())


def test_sampled_log_probs_are_those_of_a_full_forward_pass(model: TinyLM, tokens: ChatTokens, family) -> None:
    tasks = family.tasks("valid_unseen")[:12]
    generator = torch.Generator().manual_seed(3)
    for episode in play(model, tokens, family, tasks, config=PlayConfig(max_turns=8), generator=generator):
        mask = torch.zeros(1, len(episode.ids), dtype=torch.bool)
        for start, end in episode.spans:
            mask[0, start:end] = True
        with torch.no_grad():
            again = model.log_probs(torch.tensor([episode.ids]), mask)
        torch.testing.assert_close(again, torch.tensor(episode.log_probs), atol=1e-4, rtol=0)


@pytest.mark.parametrize("max_action_tokens", [14, 2])
def test_an_episode_is_prompt_and_turns_in_the_template(
    model: TinyLM, tokens: ChatTokens, family, max_action_tokens: int
) -> None:
    config = PlayConfig(max_turns=3, max_action_tokens=max_action_tokens)
    (episode,) = play(model, tokens, family, family.tasks("valid_unseen")[:1], config=config)
    cut_off = max_action_tokens == 2
    assert all((episode.ids[end - 1] != tokens.end) == cut_off for _, end in episode.spans)
    expected = tokens.prompt(episode.messages)
    assert episode.ids[: episode.prompt_length] == expected
    for (start, end), observation in zip(episode.spans, episode.observations, strict=True):
        assert start == len(expected)
        expected = expected + episode.ids[start:end]
        if (start, end) != episode.spans[-1]:
            expected += [tokens.end] * (episode.ids[end - 1] != tokens.end) + tokens.next_turn(observation)
    assert episode.ids == expected
    assert len(episode.log_probs) == sum(end - start for start, end in episode.spans)
    assert len(episode.commands) == 3 or episode.won


def test_same_seed_same_episodes_whatever_else_is_played(model: TinyLM, tokens: ChatTokens, family) -> None:
    tasks, greedy = family.tasks("valid_unseen")[:10], PlayConfig(temperature=0.0, max_turns=6)
    together = play(model, tokens, family, tasks, config=greedy)
    alone = [play(model, tokens, family, [task], config=greedy)[0] for task in tasks]
    assert [e.commands for e in together] == [e.commands for e in alone]


def test_skill_text_stands_at_the_end_of_the_first_user_message(
    model: TinyLM, tokens: ChatTokens, family, bank
) -> None:
    task, short = family.tasks("valid_unseen")[0], PlayConfig(max_turns=1)
    skill = bank.text(task.task_type)
    (plain,), (taught,) = (play(model, tokens, family, [task], s, short) for s in (None, [skill]))
    plain_text, taught_text = (tokens.decode(e.ids[: e.prompt_length]) for e in (plain, taught))
    tail = "<|end|><|assistant|>"
    assert taught_text == plain_text.removesuffix(tail) + "\n" + skill + tail
    assert "Skill" not in plain_text


def test_wins_more_with_skill_on_a_small_panel(model: TinyLM, tokens: ChatTokens, family, bank) -> None:
    panel, generator = family.tasks("valid_unseen")[::2], torch.Generator().manual_seed(0)
    skills = [bank.text(task.task_type) for task in panel]
    plain, taught = (
        sum(e.won for e in play(model, tokens, family, panel, s, generator=generator)) / len(panel)
        for s in (None, skills)
    )
    assert 0.10 <= plain <= 0.50
    assert taught >= plain + 0.10


def test_card_states_a_start_that_rl_can_improve(card: dict) -> None:
    for mode in card["success"]["valid_unseen"].values():
        plain, taught = (sum(r["won"].values()) / sum(r["played"].values()) for r in (mode["plain"], mode["skill"]))
        assert 0.15 <= plain <= 0.40
        assert taught >= plain + 0.15


def test_card_agrees_with_the_files_beside_it(card: dict, model: TinyLM, tokens: ChatTokens, bank: SkillBank) -> None:
    assert card["model"]["parameters"] == sum(p.numel() for p in model.parameters())
    assert card["model"]["vocab_size"] == tokens.tokenizer.get_vocab_size() == model.config.vocab_size
    assert card["training"]["skills"]["hash"] == bank.hash
    played = {split: sum(modes["greedy"]["plain"]["played"].values()) for split, modes in card["success"].items()}
    assert played == {"valid_seen": 140, "valid_unseen": 134}
    assert card["largest_log_prob_difference"] < 1e-4
    assert 1e6 < (TINY_ALFWORLD / "model.safetensors").stat().st_size < 3e6


def test_card_names_the_recipe_that_the_script_follows(card: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    from tiny_model.cloning import STAGES

    assert card["training"]["stages"] == json.loads(json.dumps([asdict(stage) for stage in STAGES]))


def test_card_text_is_rendered_from_its_numbers(card: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    from tiny_model.card import render

    assert (TINY_ALFWORLD / "README.md").read_text(encoding="utf-8") == render(card)
