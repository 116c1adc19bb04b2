"""An update on the CPU default with 1, 2 and 4 agent-loop workers: what another worker costs, and what it gains.

The workers hold environments and wait for the rollout server; on a machine whose cores the server keeps busy they
can only cost. The runs play the same episodes. Medians over the updates after the first.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.harness import Sample, machine, parser, report, spread, table
from benchmarks.update import answers, run

COUNTS = (1, 2, 4)


def main() -> None:
    made = parser("workers", __doc__)
    made.add_argument("--updates", type=int, default=4, help="per run; the first is left out (default: %(default)s)")
    options = made.parse_args()
    before = machine()
    updates = 2 if options.quick else options.updates
    result, rows, played = {}, [], []
    for count in COUNTS:
        with tempfile.TemporaryDirectory(prefix="agentopsd-workers-") as name:
            metrics = run("grpo", updates, Path(name), [f"actor_rollout_ref.rollout.agent.num_workers={count}"])[1:]
            played.append([answers(Path(name), "grpo", update) for update in range(1, updates + 1)])
        assert played[0] == played[-1], f"{count} workers played other episodes"
        seconds = {key: Sample(tuple(row[key] for row in metrics)) for key in ("timing_s/gen", "timing_s/step")}
        result[str(count)] = seconds
        rows.append([count, spread(seconds["timing_s/gen"]), spread(seconds["timing_s/step"])])
    print(table(["agent-loop workers", "rollout", "whole update"], rows))
    steps = [result[str(count)]["timing_s/step"].median for count in COUNTS]
    print(f"slowest against fastest: {max(steps) / min(steps):.2f}")
    report(options, "workers", before, result)


if __name__ == "__main__":
    main()
