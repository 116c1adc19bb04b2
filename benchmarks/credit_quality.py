"""Does the credit single out the turns that did something? ``python benchmarks/credit_quality.py RUN_DIR``.

For the won episodes of a run's training records: how often a turn that moved the task on (took, moved, cleaned, heated,
cooled or used something) has a larger weight than a turn that did not (not understood, seen before, or only looking).
0.5 is chance. Recomputed from the recorded gaps for every way of taking evidence, so that one run compares them all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from scipy.stats import mannwhitneyu

from verl.agentopsd.credit import CreditConfig, agentopsd_credit
from verl.agentopsd.evaluation.records import EpisodeRecord, read_records

ACTING = ("take", "move", "clean", "heat", "cool", "use")
LOOKING = ("look", "inventory", "help", "examine")
RULES = {
    "raw (default)": CreditConfig(),
    "clip": CreditConfig(evidence="clip"),
    "centered": CreditConfig(evidence="centered"),
    "token_mean": CreditConfig(evidence="token_mean"),
    "no recursion": CreditConfig(recursion=False),
}


def won_episodes(run_dir: Path) -> Iterator[EpisodeRecord]:
    """Training episodes that were won and scored."""
    for path in sorted((run_dir / "rollouts").glob("*.jsonl")):
        yield from (record for record in read_records(path).episodes if record.won and record.advantage)


def labels(record: EpisodeRecord) -> list[str]:
    """``acting``, ``idle`` or ``exploring`` for every turn."""
    seen: set[tuple[str, str]] = set()
    result = []
    for turn in record.turns:
        verb = turn.command.split(" ", 1)[0]
        repeated = (turn.command, turn.observation) in seen
        seen.add((turn.command, turn.observation))
        idle = not turn.valid or repeated or verb in LOOKING
        result.append("idle" if idle else "acting" if verb in ACTING else "exploring")
    return result


def weights(record: EpisodeRecord, rule: CreditConfig) -> list[float]:
    """w of every turn, from the recorded gaps."""
    gaps = [gap for turn in record.turns for gap in turn.gaps or []]
    turns = [index for index, turn in enumerate(record.turns) for _ in turn.gaps or []]
    credit = agentopsd_credit(
        torch.tensor([record.advantage], dtype=torch.float64),
        torch.tensor([gaps], dtype=torch.float64),
        torch.tensor([turns]),
        torch.tensor([record.success_rate]),
        rule,
    )
    return credit.weights[0].tolist()


def auc(better: list[float], worse: list[float]) -> float:
    """P(better > worse) + P(equal) / 2."""
    return float(mannwhitneyu(better, worse).statistic) / (len(better) * len(worse))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    episodes = list(won_episodes(parser.parse_args().run_dir))
    kinds = [kind for record in episodes for kind in labels(record)]
    evidence = [turn.e or 0.0 for record in episodes for turn in record.turns]

    def pick(values: list[float], kind: str) -> list[float]:
        return [value for value, own in zip(values, kinds, strict=True) if own == kind]

    print(
        f"{len(episodes)} won episodes: " + ", ".join(f"{kinds.count(k)} {k}" for k in ("acting", "idle", "exploring"))
    )
    print(f"{'evidence e itself':20s} AUC {auc(pick(evidence, 'acting'), pick(evidence, 'idle')):.3f}")
    for name, rule in RULES.items():
        w = [value for record in episodes for value in weights(record, rule)]
        acting, idle = pick(w, "acting"), pick(w, "idle")
        means = f"mean w acting {sum(acting) / len(acting):.3f}, idle {sum(idle) / len(idle):.3f}"
        print(f"w, {name:17s} AUC {auc(acting, idle):.3f}   {means}")


if __name__ == "__main__":
    main()
