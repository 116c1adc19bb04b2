"""Sampled tokens per second of a rollout: this package's, and ``transformers.generate`` in lock-step by hand.

Ours: ``python -m verl.agentopsd.main`` on the CPU default (64 episodes at once), tokens over the rollout's seconds of
every update after the first; vLLM says of every request how many of its tokens its prefix cache had. By hand: the same
model in transformers on all cores, 64 games in one left-padded batch, ``generate`` for one turn of all games, their
answers appended, the whole text given again for the next turn; finished games leave the batch. Both sample at
temperature 1, stop at the end of a turn, and play the same games.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Sample, machine, parser, ratio, report, spread, table
from verl.agentopsd.envs.alfworld.family import resolve_data_dir
from verl.agentopsd.evaluation.records import read_records

GAMES, SAMPLES, TURNS, ANSWER = 8, 8, 30, 14


def ours(updates: int) -> tuple[list[float], list[float]]:
    """Tokens per second of each update but the first, and the share of prompt tokens found in the prefix cache.

    Raises:
        RuntimeError: the run failed; with the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="agentopsd-rollout-") as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "verl.agentopsd.main", f"run_dir={run_dir}", "algorithm.adv_estimator=grpo"]
        command += [f"trainer.total_training_steps={updates + 1}", "trainer.val_before_train=false"]
        command += ["trainer.test_freq=-1", "trainer.save_freq=-1", f"env.max_turns={TURNS}"]
        command += [f"data.train_batch_size={GAMES}", f"actor_rollout_ref.rollout.n={SAMPLES}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-3000:])
        rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        metrics = {row["step"]: row["data"] for row in rows if "timing_s/step" in row["data"]}
        episodes = {step: read_records(run_dir / "rollouts" / f"{step:06d}.jsonl").episodes for step in metrics}
        sampled = {step: sum(episode.action_tokens for episode in played) for step, played in episodes.items()}
        speeds = [sampled[step] / one["timing_s/gen"] for step, one in sorted(metrics.items())]
        hits = [one["rollout/prefix_cache_hit_frac"] for _, one in sorted(metrics.items())]
        return speeds[1:], hits[1:]


def by_hand(batches: int) -> list[float]:
    """Tokens per second of each batch of 64 games."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from verl.agentopsd.config import TINY_MODEL
    from verl.agentopsd.envs.base import make_family
    from verl.agentopsd.evaluation.panel import spread as spread_tasks

    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    tokenizer.padding_side = "left"
    config = {"name": "alfworld", "data_dir": str(resolve_data_dir({})), "prompt_style": "compact"}
    family = make_family({**config, "action_format": "plain"})
    games = spread_tasks(family.tasks("train"), GAMES * batches)
    speeds = []
    for batch in range(batches):
        started, sampled = time.perf_counter(), 0
        playing = []
        for task in games[batch::batches]:
            for _ in range(SAMPLES):
                env = family.make(task)
                playing.append((env, list(family.opening(task, env.reset()))))
        for _ in range(TURNS):
            texts = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for _, m in playing]
            inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
            with torch.no_grad():
                answers = model.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    **{"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": ANSWER},
                    **{"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id},
                )[:, inputs["input_ids"].shape[1] :]
            going = []
            for (env, messages), answer in zip(playing, answers.tolist(), strict=True):
                ids = answer[: answer.index(tokenizer.eos_token_id) + 1] if tokenizer.eos_token_id in answer else answer
                sampled += len(ids)
                command = tokenizer.decode(ids, skip_special_tokens=True).strip()
                seen = env.step(command)
                messages += [{"role": "assistant", "content": command}, {"role": "user", "content": seen.text}]
                if not seen.done:
                    going.append((env, messages))
            playing = going
            if not playing:
                break
        speeds.append(sampled / (time.perf_counter() - started))
    return speeds


def main() -> None:
    made = parser("rollout_tokens", __doc__, repeats=4)
    options = made.parse_args()
    before = machine()
    repeats = 1 if options.quick else options.repeats
    fast, hits = ours(repeats)
    slow = by_hand(repeats)
    result: dict[str, Any] = {
        "ours": Sample(tuple(fast), "tokens/s"),
        "by_hand": Sample(tuple(slow), "tokens/s"),
        "ratio": ratio(Sample(tuple(fast)), Sample(tuple(slow))),
        "prefix_cache_hits": Sample(tuple(hits), ""),
    }
    rows = [["this package", spread(result["ours"])], ["transformers.generate", spread(result["by_hand"])]]
    print(table(["64 episodes at once", "sampled tokens per second"], rows))
    print(f"ratio: {spread(result['ratio'])}")
    print(f"prompt tokens found in vLLM's prefix cache: {spread(result['prefix_cache_hits'])}")
    report(options, "rollout_tokens", before, result)


if __name__ == "__main__":
    main()
