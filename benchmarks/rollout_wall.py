"""Wall time of a rollout without a barrier against one in lock-step: the same episodes through vLLM's engine.

Counts of tokens (prompt, every answer, every observation) are those of real episodes, as in ``rollout_steps``, with
short answers and with a long tail of reasoning. Both sides give vLLM requests of the same lengths: without a
barrier an episode asks for its next turn as soon as it has an answer; in lock-step all episodes of a turn have to be
answered before any asks again, and ended ones ask no more. vLLM runs in this process, with a prefix cache; Ray, the
agent loop and the games themselves are left out, so that the difference is the barrier's alone.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

from benchmarks.harness import Sample, machine, number, parser, ratio, report, spread, table
from benchmarks.rollout_steps import Counts, tiny_episodes, with_tail
from verl.agentopsd.config import TINY_MODEL
from verl.agentopsd.platform.environment import activate_cpu

KV_CACHE_BYTES = 2 * 2**30
LONGEST = 16_384


class Player:
    """Plays token counts: random ids in place of prompts and observations, answers of the wanted length."""

    def __init__(self) -> None:
        """Starts vLLM on the shipped model, with room for more positions than it was trained on."""
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        activate_cpu()
        from vllm import EngineArgs, LLMEngine

        settings = {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": True, "max_num_seqs": 128}
        positions = {"max_position_embeddings": LONGEST}
        self.engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(TINY_MODEL),
                max_model_len=LONGEST,
                hf_overrides=positions,
                kv_cache_memory_bytes=KV_CACHE_BYTES,
                enable_chunked_prefill=False,
                max_num_batched_tokens=LONGEST,
                disable_log_stats=True,
                **settings,
            )
        )
        self.words = self.engine.model_config.get_vocab_size()
        self.requests = 0

    def ask(self, ids: list[int], tokens: int) -> str:
        """Wants ``tokens`` more after ``ids``; returns the request's id."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.requests += 1
        name = str(self.requests)
        wanted = SamplingParams(
            max_tokens=tokens,
            min_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.engine.add_request(name, {"prompt_token_ids": ids}, wanted)
        return name

    def play(self, counts: Counts, lock_step: bool, seed: int) -> dict[str, float]:
        """Seconds and engine steps of one batch."""
        self.engine.reset_prefix_cache()
        drawn = random.Random(seed)
        texts = [self._words(drawn, prompt) for prompt in counts.prompts]
        turn, asking, waiting = [0] * len(texts), {}, list(range(len(texts)))
        steps, started = 0, time.perf_counter()
        while waiting or asking:
            if not lock_step or not asking:
                for one in waiting:
                    asking[self.ask(texts[one], counts.answers[one][turn[one]])] = one
                waiting = []
            steps += 1
            for output in self.engine.step():
                if not output.finished:
                    continue
                one = asking.pop(output.request_id)
                texts[one] += list(output.outputs[0].token_ids)
                if turn[one] < len(counts.shown[one]):
                    texts[one] += self._words(drawn, counts.shown[one][turn[one]])
                turn[one] += 1
                if turn[one] < len(counts.answers[one]):
                    waiting.append(one)
        return {"seconds": time.perf_counter() - started, "steps": steps}

    def _words(self, drawn: random.Random, count: int) -> list[int]:
        return [drawn.randrange(10, self.words) for _ in range(count)]


def main() -> None:
    options = parser("rollout_wall", __doc__, repeats=3).parse_args()
    before = machine()
    short = tiny_episodes(*((2, 4) if options.quick else (8, 8)))
    cases = {"commands alone": short, "with reasoning, long tail": with_tail(short)}
    rows, result = [], {}
    player = Player()
    for name, counts in cases.items():
        player.play(counts, lock_step=False, seed=0)  # first use of kernels and buffers
        found: dict[str, list[dict[str, Any]]] = {"free": [], "lock_step": []}
        for seed in range(1, 1 + (1 if options.quick else options.repeats)):
            for side in found:
                found[side].append(player.play(counts, lock_step=side == "lock_step", seed=seed))
        seconds = {side: Sample(tuple(run["seconds"] for run in runs)) for side, runs in found.items()}
        steps = {side: runs[0]["steps"] for side, runs in found.items()}
        slower = ratio(seconds["lock_step"], seconds["free"])
        result[name] = {"seconds": seconds, "steps": steps, "ratio": slower, "sampled": counts.sampled()}
        rows.append(
            [
                name,
                spread(seconds["lock_step"]),
                spread(seconds["free"]),
                spread(slower),
                number(steps["lock_step"] / steps["free"]) + " ×",
            ]
        )
    print(table(["answers", "lock-step", "no barrier", "wall time", "engine steps"], rows))
    report(options, "rollout_wall", before, {"cases": result})


if __name__ == "__main__":
    main()
