"""What playing without a barrier saves, counted on real episodes instead of timed: decoding steps and tokens read.

In a lock-step loop all environments wait for the longest answer of a turn, so a batch costs the sum over turns of that
turn's longest answer; without a barrier it costs the longest episode alone. Where finished environments go on
generating, their tokens come on top. Reading: every turn's request contains everything before it; a prefix cache keeps
whole blocks of 32 tokens. On a GPU a decoding step of a batch costs about the same whatever its size, so the ratio of
steps bounds the ratio of wall times; on a CPU, where a step's cost grows with the batch, the tokens count instead.

Episodes: 64 of the tiny model, played here; answers as long as they were (a command) or with a long tail
(``--tail``: reasoning of log-normal length, median 60 tokens, cut at 512).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.harness import machine, parser, report, table
from verl.agentopsd.envs.base import make_family
from verl.agentopsd.models.play import ChatTokens, play
from verl.agentopsd.models.tiny import TINY_ALFWORLD, TinyLM

BLOCK = 32


@dataclass(frozen=True)
class Counts:
    """One batch. ``answers[e][k]``: tokens sampled in turn k of episode e; ``shown``: observation tokens after it."""

    prompts: Sequence[int]
    answers: Sequence[Sequence[int]]
    shown: Sequence[Sequence[int]]

    def free_steps(self) -> int:
        """Decoding steps when nobody waits: the longest episode."""
        return max(sum(turns) for turns in self.answers)

    def lock_steps(self) -> int:
        """Decoding steps when everybody waits for the longest answer of each turn."""
        last = max(map(len, self.answers))
        return sum(max(turns[k] for turns in self.answers if k < len(turns)) for k in range(last))

    def sampled(self) -> int:
        return sum(map(sum, self.answers))

    def sampled_without_stop(self) -> int:
        """Tokens when ended environments generate until the last one ends, each as long as it usually does."""
        last = max(map(len, self.answers))
        return sum(sum(turns) + (last - len(turns)) * sum(turns) // len(turns) for turns in self.answers)

    def read(self) -> tuple[int, int]:
        """Tokens of all requests, and how many of them a prefix cache of whole blocks has already."""
        requested = cached = 0
        for prompt, answers, shown in zip(self.prompts, self.answers, self.shown, strict=True):
            length, known = prompt, 0
            for answer, context in zip(answers, [*shown, 0], strict=False):
                requested += length
                cached += known // BLOCK * BLOCK
                known = length + answer
                length += answer + context
        return requested, cached


def tiny_episodes(games: int, group: int) -> Counts:
    """Token counts of episodes that the shipped model plays."""
    torch.set_num_threads(1)
    family = make_family({"name": "alfworld", "prompt_style": "compact", "action_format": "plain"})
    model, tokens = TinyLM.from_pretrained(TINY_ALFWORLD), ChatTokens(TINY_ALFWORLD / "tokenizer.json")
    tasks = [task for task in random.Random(0).sample(family.tasks("train"), games) for _ in range(group)]
    episodes = play(model, tokens, family, tasks, generator=torch.Generator().manual_seed(0))
    answers = [[end - start for start, end in one.spans] for one in episodes]
    shown = [
        [after[0] - before[1] for before, after in zip(one.spans, one.spans[1:], strict=False)] for one in episodes
    ]
    return Counts([one.prompt_length for one in episodes], answers, shown)


def with_tail(counts: Counts, seed: int = 0) -> Counts:
    """The same episodes with reasoning of log-normal length in front of every command."""
    rng = random.Random(seed)
    answers = [
        [tokens + min(512, round(math.exp(rng.gauss(math.log(60), 0.8)))) for tokens in turns]
        for turns in counts.answers
    ]
    return Counts(counts.prompts, answers, counts.shown)


def main() -> None:
    options = parser("rollout_steps", __doc__).parse_args()
    before = machine()
    short = tiny_episodes(*((2, 4) if options.quick else (8, 8)))
    rows, result = [], {}
    for name, counts in {"commands alone": short, "with reasoning, long tail": with_tail(short)}.items():
        requested, cached = counts.read()
        found = {
            "lock_steps": counts.lock_steps(),
            "free_steps": counts.free_steps(),
            "step_ratio": counts.lock_steps() / counts.free_steps(),
            "sampled": counts.sampled(),
            "sampled_without_stop": counts.sampled_without_stop(),
            "requested": requested,
            "prefix_hit_rate": cached / requested,
            "read_ratio": requested / (requested - cached),
        }
        result[name] = found
        rows.append(
            [
                name,
                found["lock_steps"],
                found["free_steps"],
                f"{found['step_ratio']:.2f} ×",
                f"{found['sampled_without_stop'] / found['sampled']:.2f} ×",
                f"{found['prefix_hit_rate']:.1%}",
                f"{found['read_ratio']:.1f} ×",
            ]
        )
    header = [
        "answers",
        "lock-step steps",
        "free steps",
        "fewer steps",
        "tokens saved by stopping",
        "hit rate",
        "read less",
    ]
    print(table(header, rows))
    report(options, "rollout_steps", before, {"cases": result})


if __name__ == "__main__":
    main()
