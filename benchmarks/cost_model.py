"""What the model of tokens and FLOPs (``verl.agentopsd.doctor.cost``) predicts, against two measured updates.

- One published run: 424 s rollout, 179 s old log-probs, 260 s teacher, 175 s reference, 774 s update. Its hardware and
  row lengths are not published, so what is compared is what they do not change: every stage in units of the old
  log-probs, one forward pass. Rows of one turn (about 800 tokens, a skill of about 350) on eight GPUs are assumed.
- The CPU default, from a run's metrics (``--metrics FILE``; default: the figures of the README).

The stage shares that the model predicts for the GPU presets follow.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from benchmarks.harness import machine, number, parser, report, table
from verl.agentopsd.config import TINY_MODEL
from verl.agentopsd.doctor.cost import StageSeconds, Workload, stage_seconds
from verl.agentopsd.doctor.gpus import DEVICES
from verl.agentopsd.doctor.shapes import shape_of

STAGES = ("rollout", "old_log_probs", "teacher", "reference", "update")
PUBLISHED = StageSeconds(rollout=424, old_log_probs=179, teacher=260, reference=175, update=774)
README_CPU = StageSeconds(rollout=9.4, old_log_probs=1.6, teacher=1.4, reference=0.0, update=4.4)
METRICS = {
    "rollout": "timing_s/gen",
    "old_log_probs": "timing_s/old_log_prob",
    "teacher": "teacher/seconds",
    "reference": "timing_s/ref",
    "update": "timing_s/update_actor",
}
ROW_PER_TURN = Workload(
    episodes=128 * 30,
    prompt_tokens=600,
    response_tokens=200,
    sampled_tokens=200,
    longest_sampled_tokens=50 * 200,
    skill_tokens=350,
    scored_share=1.0,
    reference=True,
)
ROW_PER_TRAJECTORY = Workload(
    episodes=128,
    prompt_tokens=700,
    response_tokens=30 * 250,
    sampled_tokens=30 * 120,
    longest_sampled_tokens=50 * 200,
    skill_tokens=350,
    scored_share=0.7,
    reference=True,
)
CPU_DEFAULT = Workload(
    episodes=64,
    prompt_tokens=130,
    response_tokens=450,
    sampled_tokens=200,
    longest_sampled_tokens=30 * 14,
    skill_tokens=44,
    scored_share=0.8,
    gradient_checkpointing=False,
)


def measured(path: Path) -> StageSeconds:
    """Medians of a run's stages, its first update left out."""
    rows = [json.loads(line)["data"] for line in path.read_text().splitlines()]
    rows = [row for row in rows if "timing_s/update_actor" in row][1:]
    return StageSeconds(
        **{stage: statistics.median(row.get(name, 0.0) for row in rows) for stage, name in METRICS.items()}
    )


def in_forwards(seconds: StageSeconds) -> dict[str, float]:
    """Every stage in units of one forward pass over the batch."""
    return {stage: getattr(seconds, stage) / seconds.old_log_probs for stage in STAGES}


def main() -> None:
    made = parser("cost_model", __doc__)
    made.add_argument("--metrics", type=Path, help="metrics.jsonl of a CPU run")
    options = made.parse_args()
    before = machine()
    tiny = shape_of(str(TINY_MODEL))
    qwen = shape_of("Qwen/Qwen2.5-3B-Instruct")
    seconds = {
        "published, measured": PUBLISHED,
        "row per turn, 8 × A100, model": stage_seconds(qwen, ROW_PER_TURN, DEVICES["A100-80GB"], 8),
        "row per trajectory, 8 × A100, model": stage_seconds(qwen, ROW_PER_TRAJECTORY, DEVICES["A100-80GB"], 8),
        "CPU default, measured": measured(options.metrics) if options.metrics else README_CPU,
        "CPU default, model": stage_seconds(tiny, CPU_DEFAULT, DEVICES["cpu"], 1),
    }
    forwards = {name: in_forwards(found) for name, found in seconds.items()}
    print("in units of one forward pass over the batch (old log-probs)")
    print(table(["update", *STAGES], [[name, *(number(v) for v in row.values())] for name, row in forwards.items()]))
    shares = {name: {stage: getattr(found, stage) / found.total for stage in STAGES} for name, found in seconds.items()}
    print("\nshare of the update")
    print(table(["update", *STAGES], [[name, *(f"{v:.0%}" for v in row.values())] for name, row in shares.items()]))
    report(options, "cost_model", before, {"forwards": forwards, "shares": shares})


if __name__ == "__main__":
    main()
