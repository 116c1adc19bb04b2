"""Peak memory of log-probs at Qwen's vocabulary (151,936): verl's engine, its fused linear, and this package's engine.

A small-width model (hidden size 64) so that the logits, not the layers, fill the memory; forward only, CPU, float32,
rows packed. verl's engine has this package's chunks of 1,024 tokens for the log-probs themselves, without which it goes
token by token (``platform/packed_logprobs.py``). A quarter of the tokens is sampled by the policy, as in an episode.
Every side runs in a fresh process, whose peak resident size less the one before the log-probs is compared; the numbers
agree to 1e-4 (checked).
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Sample, in_process, machine, parser, peak_memory_mib, ratio, report, spread, table

VOCABULARY, WIDTH, SHARE = 151_936, 64, 4
UPSTREAM, FUSED, OURS = "verl's engine", "verl's fused linear", "logits of sampled tokens alone"
SIDES = {UPSTREAM: "upstream", FUSED: "fused", OURS: "ours"}


class TokenModel(nn.Module):
    """An embedding and an output layer: all that is left of a model when its layers cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding.from_pretrained(torch.randn(VOCABULARY, WIDTH, generator=generator))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight.data = torch.randn(VOCABULARY, WIDTH, generator=generator) * WIDTH**-0.5

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, **unused: Any) -> Any:
        return SimpleNamespace(logits=self.head(self.embed(input_ids)))


def inputs(rows: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
    """Ids (L,) and masks (L,) of each row."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(VOCABULARY, (length,), generator=generator) for _ in range(rows)]
    return ids, [(torch.arange(length) % SHARE == SHARE - 1).long()] * rows


def log_probs(side: str, model: TokenModel, ids: list[Tensor], masks: list[Tensor]) -> Tensor:
    """(A,) at the sampled tokens."""
    from benchmarks import bare_engine as bare
    from verl.agentopsd.platform.action_logits import predicting

    batch = bare.micro_batch(ids, masks, temperature=1.0, use_remove_padding=True)
    at = predicting(batch["loss_mask"], batch["input_ids"])
    if side == "fused":  # ``use_fused_kernels=true`` with the torch back end: every position, in chunks
        from verl.utils.experimental.torch_functional import FusedLinearForPPO

        packed = torch.cat(ids)
        scored, _ = FusedLinearForPPO()(model.embed(packed)[None], model.head.weight, packed.roll(-1)[None], 1.0)
        return scored.view(-1)[at]
    engine = bare.bare_engine(bare.OURS if side == "ours" else bare.UPSTREAM, model)
    found = engine.forward_step(batch, None, forward_only=True)[1]["model_output"]["log_probs"]
    return found.values()[at]


def measure(side: str, rows: int, length: int) -> dict[str, Any]:
    """One side in this process."""
    torch.set_num_threads(1)
    model, given = TokenModel(), inputs(rows, length)
    with torch.no_grad():
        log_probs(side, model, *inputs(1, SHARE))  # imports and first-use buffers are not the log-probs'
        before, started = peak_memory_mib(), time.perf_counter()
        scored = log_probs(side, model, *given)
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
    lines = [
        [name, spread(memory[name]), spread(ratio(memory[name], memory[OURS])), spread(seconds[name])] for name in SIDES
    ]
    print(f"{rows} × {length} tokens, vocabulary {VOCABULARY}, 1 in {SHARE} sampled")
    print(table(["log-probs", "peak memory", "against the last", "time"], lines))
    result = {"rows": rows, "length": length, "memory": memory, "seconds": seconds}
    report(options, "logprob_memory", before, result)


if __name__ == "__main__":
    main()
