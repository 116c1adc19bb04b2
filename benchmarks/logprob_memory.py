"""Peak memory of log-probs at Qwen's vocabulary (151,936): full logits, verl's fused linear, action positions alone.

A small-width model (hidden size 64) so that the logits, not the layers, fill the memory; forward only, CPU, float32.
A quarter of the tokens is sampled by the policy, as in an episode. Every side runs in a fresh process, whose peak
resident size less the one before the log-probs is compared; the numbers agree to 1e-4 (checked).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Sample, in_process, machine, parser, peak_memory_mib, ratio, report, spread, table

VOCABULARY, WIDTH, SHARE = 151_936, 64, 4
SIDES = {"full logits": "full", "verl's fused linear (all positions)": "fused", "action positions, chunked": "ours"}


def inputs(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden (N,T,H), weight (V,H), ids (N,T), mask (N,T)."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, length, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator) * WIDTH**-0.5
    ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
    mask = (torch.arange(length) % SHARE == SHARE - 1).expand(rows, length)
    return hidden, weight, ids, mask


def full(hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """As verl's engine does without fused kernels: logits of every position, then their log-probs."""
    from verl.utils.torch_functional import logprobs_from_logits

    logits = torch.nn.functional.linear(hidden, weight)
    scored = logprobs_from_logits(logits[:, :-1], ids[:, 1:])
    return scored[mask[:, 1:]]


def fused(hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """``use_fused_kernels=true`` with the torch back end: every position, in chunks, with the entropy."""
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    scored, _ = FusedLinearForPPO()(hidden[:, :-1], weight, ids[:, 1:], 1.0)
    return scored.view(mask[:, 1:].shape)[mask[:, 1:]]


def ours(hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    from benchmarks.action_logprobs import action_log_probs

    return action_log_probs(hidden, weight, ids, mask)


def measure(side: str, rows: int, length: int) -> dict[str, Any]:
    """One side in this process."""
    torch.set_num_threads(1)
    given = inputs(rows, length)
    globals()[side](*inputs(1, SHARE))  # imports and first-use buffers are not the log-probs'
    before, started = peak_memory_mib(), time.perf_counter()
    with torch.no_grad():
        scored = globals()[side](*given)
    seconds = time.perf_counter() - started
    return {"mib": peak_memory_mib() - before, "seconds": seconds, "sum": float(scored.double().sum())}


def main() -> None:
    options = parser("logprob_memory", __doc__, repeats=3).parse_args()
    before = machine()
    rows, length = (1, 256) if options.quick else (2, 512)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in SIDES}
    for _ in range(1 if options.quick else options.repeats):
        for name, side in SIDES.items():
            runs[name].append(in_process("benchmarks.logprob_memory:measure", side, rows, length))
    sums = [run["sum"] for found in runs.values() for run in found]
    assert max(sums) - min(sums) < 1e-4 * rows * length / SHARE, sums
    memory = {name: Sample(tuple(run["mib"] for run in found), "MiB") for name, found in runs.items()}
    seconds = {name: Sample(tuple(run["seconds"] for run in found)) for name, found in runs.items()}
    least = memory["action positions, chunked"]
    lines = [[name, spread(memory[name]), spread(ratio(memory[name], least)), spread(seconds[name])] for name in SIDES]
    print(f"{rows} × {length} tokens, vocabulary {VOCABULARY}, 1 in {SHARE} sampled")
    print(table(["log-probs", "peak memory", "against the last", "time"], lines))
    result = {"rows": rows, "length": length, "memory": memory, "seconds": seconds}
    report(options, "logprob_memory", before, result)


if __name__ == "__main__":
    main()
