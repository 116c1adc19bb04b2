"""Conversations of 50 turns in every chat format, on a real game: each id once, in order, never changed (I1 to I4)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.workers.rollout.replica import TokenOutput

from verl.agentopsd.envs.base import make_family
from verl.agentopsd.rollout.agent_loop import TextEnvAgentLoop
from verl.agentopsd.rollout.chat import ChatFormat
from verl.agentopsd.rollout.ledger import check_row
from verl.agentopsd.skills.bank import SkillBank
from verl.agentopsd.skills.insert import with_skill
from verl.agentopsd.teacher import scoring_batch

TURNS = 50
COMMANDS = ("look", "inventory", "go to desk 1", "examine desk 1", "fly to the moon", "go to drawer 1")

# name of the tokenizer's fixture, template settings, whether the answers have thoughts
FORMATS = [
    ("qwen25_tokenizer", {}, False),
    ("qwen3_tokenizer", {"enable_thinking": True}, True),
    ("qwen3_tokenizer", {"enable_thinking": False}, False),
    ("llama3_tokenizer", {}, False),
    ("smollm2_tokenizer", {}, False),
    ("tiny_tokenizer", {}, False),
]


@dataclass
class Player:
    """Answers as a model could: with thoughts, cut off in the middle, in tokens that its tokenizer would not choose."""

    tokenizer: Any
    thinks: bool
    end_of_turn: int
    prompts: list[list[int]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        turn = len(self.prompts)
        self.prompts.append(list(prompt_ids))
        text = f"<action>{COMMANDS[turn % len(COMMANDS)]}</action>"
        if self.thinks:
            text = f"<think>\nTurn {turn}: where is it?\n</think>\n\n{text}"
        if turn % 7 == 3:  # one token per character: decoded and encoded again, other ids would come out
            ids = [token for letter in text for token in self.tokenizer(letter, add_special_tokens=False).input_ids]
        else:
            ids = list(self.tokenizer(text, add_special_tokens=False).input_ids)
        if turn % 11 == 5:
            ids = ids[: len(ids) // 2]  # the token limit: no end of turn
        else:
            ids.append(self.end_of_turn)
        self.answers.append(ids)
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="completed")


@pytest.fixture(scope="module")
def game(alfworld_data: Path):
    """A real game, its family with the long prompts of instruction-tuned models, and the section ``env``."""
    env = {
        "name": "alfworld",
        "data_dir": str(alfworld_data),
        "backend": "exact",
        "max_turns": TURNS,
        "max_action_tokens": 512,
        "show_admissible": True,
        "prompt_style": "full",
        "action_format": "tagged",
        "seed": 0,
        "max_concurrent_episodes": 1,
        "episode_timeout": 120,
    }
    family = make_family(env)
    return family.tasks("valid_seen")[0], family, env


def converse(tokenizer: Any, settings: dict[str, Any], thinks: bool, game: Any, run_dir: Path):
    task, _, env = game
    config = OmegaConf.create(
        {
            "env": env,
            "actor_rollout_ref": {
                "rollout": {"prompt_length": 16384, "response_length": 262144, "max_model_len": None, "name": "vllm"}
            },
            "data": {"apply_chat_template_kwargs": settings},
            "run_dir": str(run_dir),
        }
    )
    player = Player(tokenizer, thinks, ChatFormat(tokenizer, settings).end_of_turn_id)
    loop = TextEnvAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=player,
        tokenizer=tokenizer,
        processor=None,
        dataset_cls=None,
        hf_model_type="qwen2",
        data_config=DictConfigWrap(config.data),
    )
    info = {"game_id": task.game_id, "split": task.split, "task_type": task.task_type, "path": task.path, "seed": 0}
    row = {"raw_prompt": [], "uid": "u", "index": 0, "data_source": "alfworld", "session_id": 0, "global_steps": 1}
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
    # the row, and the player with everything it was asked and said
    return asyncio.run(loop.run(sampling, **row, extra_info=info)), player


@pytest.mark.parametrize(("name", "settings", "thinks"), FORMATS)
def test_fifty_turns(name: str, settings: dict, thinks: bool, game, request: pytest.FixtureRequest, tmp_path: Path):
    tokenizer = request.getfixturevalue(name)
    output, player = converse(tokenizer, settings, thinks, game, tmp_path)
    spans = [turn["span"] for turn in output.extra_fields["turns"]]
    assert len(spans) == TURNS

    # I1: what the server was given is what it had been given and said before, plus context; nothing is rewritten
    for before, said, after in zip(player.prompts, player.answers, player.prompts[1:], strict=False):
        assert after[: len(before) + len(said)] == before + said
    whole = output.prompt_ids + output.response_ids
    assert player.prompts[-1] + player.answers[-1] == whole[: len(player.prompts[-1]) + len(player.answers[-1])]
    assert [output.response_ids[start:end] for start, end in spans] == player.answers

    # I2 and I3: the mask is the spans, and the spans are in order and apart
    expected = [0] * len(output.response_ids)
    for start, end in spans:
        expected[start:end] = [1] * (end - start)
    assert output.response_mask == expected
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    row = (output.prompt_ids, output.response_ids, output.response_mask, spans, output.response_logprobs)
    check_row(*row, game_id=output.extra_fields["game_id"])

    # an answer that was cut off is ended by us, as context
    chat = ChatFormat(tokenizer, settings)
    cut_off = [turn for turn in range(TURNS - 1) if turn % 11 == 5]
    assert cut_off and all(output.response_ids[spans[turn][1]] == chat.end_of_turn_id for turn in cut_off)

    # I4: the teacher's row is another prompt and the same response
    task, family, _ = game
    skilled = with_skill(
        output.extra_fields["messages"], SkillBank.load("alfworld", family.task_types).text(task.task_type)
    )
    teacher = torch.tensor(chat.initial_ids(skilled) + output.response_ids)
    assert len(teacher) > len(whole)
    response, mask = torch.tensor(output.response_ids), torch.tensor(output.response_mask)
    scoring_batch([teacher], [response], [mask], temperature=1.0)
    with pytest.raises(AssertionError, match="must end in the student's response"):
        scoring_batch([teacher[:-1]], [response], [mask], temperature=1.0)


def test_earlier_thoughts_stay_although_the_template_strips_them(qwen3_tokenizer, game, tmp_path: Path):
    settings = {"enable_thinking": True}
    output, player = converse(qwen3_tokenizer, settings, True, game, tmp_path)
    text = qwen3_tokenizer.decode(output.prompt_ids + output.response_ids)
    whole_thoughts = [turn for turn in range(TURNS) if turn % 11 != 5]
    assert all(f"Turn {turn}: where is it?" in text for turn in whole_thoughts)
    messages = list(output.extra_fields["messages"])
    for turn in output.extra_fields["turns"][:-1]:
        messages += [{"role": "assistant", "content": turn["text"]}, {"role": "user", "content": turn["observation"]}]
    rendered = qwen3_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **settings)
    assert "where is it?" not in rendered.split("<|im_start|>user")[1], "the test's template strips earlier thoughts"
    assert ChatFormat(qwen3_tokenizer, settings).drops_thoughts
    assert not ChatFormat(qwen3_tokenizer, {"enable_thinking": False}).drops_thoughts


def test_the_empty_thought_is_context_in_all_fifty_turns(qwen3_tokenizer, game, tmp_path: Path):
    output, _ = converse(qwen3_tokenizer, {"enable_thinking": False}, False, game, tmp_path)
    empty = qwen3_tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False).input_ids
    starts = [start for start, _ in (turn["span"] for turn in output.extra_fields["turns"])]
    for start in starts[1:]:
        assert output.response_ids[start - len(empty) : start] == empty
        assert output.response_mask[start - len(empty) : start] == [0] * len(empty)
    assert output.prompt_ids[-len(empty) :] == empty
