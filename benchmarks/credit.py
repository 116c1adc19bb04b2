"""Credit for one large batch: the vectorised rule against loops of the same rule.

128 trajectories of 50 turns and 16,384 response tokens, 100 of them sampled in each turn; one core. Three sides:

- ours: ``agentopsd_credit``, one pass over the batch, no loop over rows or turns;
- loop: the formulas of the paper, trajectory by trajectory and turn by turn, on the same tensors;
- rows: the layout of the method's first release, one row of 512 tokens per turn (6,400 rows): group statistics from
  a dictionary that is filled and read row by row, then rows collected into trajectories by their keys and walked
  through. Re-implemented here from its description; it measures the layout, not that code.

Each side starts from rewards and gaps. The three give the same advantages (checked before timing; rows of turns get
their group statistics per trajectory here, too).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.harness import machine, parser, ratio, report, spread, table, take_turns
from verl.agentopsd.credit import CreditConfig, agentopsd_credit
from verl.agentopsd.groups import group_advantage, group_success_rate

RULE = CreditConfig()
GROUP = 8


@dataclass(frozen=True)
class Batch:
    """N trajectories; fields as ``agentopsd_credit`` takes them, and the same turns as rows."""

    won: Tensor  # (N,) 0 or 1
    group: Tensor  # (N,) eight episodes each
    gaps: Tensor  # (N,T)
    turn_ids: Tensor  # (N,T)
    row_gaps: Tensor  # (N*K, 512)
    row_mask: Tensor  # (N*K, 512)
    row_keys: list[tuple[str, int]]  # (trajectory, turn) of each row, shuffled as a sampler leaves them


def make_batch(rows: int, turns: int, tokens: int, sampled: int, row_width: int = 512) -> Batch:
    """``tokens`` response tokens per trajectory, in each turn ``sampled`` action tokens and then context."""
    generator = torch.Generator().manual_seed(0)
    length = tokens // turns
    turn_ids = torch.full((rows, tokens), -1)
    own = torch.zeros(tokens, dtype=torch.bool)
    for turn in range(turns):
        own[turn * length : turn * length + sampled] = True
        turn_ids[:, turn * length : turn * length + sampled] = turn
    gaps = 0.3 * torch.randn(rows, tokens, generator=generator) * own
    order = torch.randperm(rows * turns, generator=generator).tolist()
    row_gaps = torch.zeros(rows * turns, row_width)
    row_gaps[:, :sampled] = gaps[:, own].view(rows * turns, sampled)
    mask = torch.zeros(rows * turns, row_width)
    mask[:, :sampled] = 1
    return Batch(
        won=(torch.rand(rows, generator=generator) < 0.4).float(),
        group=torch.arange(rows) // GROUP,
        gaps=gaps,
        turn_ids=turn_ids,
        row_gaps=row_gaps[order],
        row_mask=mask[order],
        row_keys=[(f"trajectory-{index // turns}", index % turns) for index in order],
    )


def ours(batch: Batch) -> Tensor:
    """(N,T)."""
    valid = torch.ones(len(batch.won))
    advantages = group_advantage(batch.won, valid, batch.group)
    rate = group_success_rate(batch.won, valid, batch.group)
    return agentopsd_credit(advantages, batch.gaps, batch.turn_ids, rate, RULE).advantages


def loop(batch: Batch) -> Tensor:
    """(N,T): the paper's formulas as one would write them down."""
    result = torch.zeros_like(batch.gaps)
    base = outcome_advantages(batch.won.tolist(), batch.group.tolist())
    for row in range(len(batch.gaps)):
        ids, gaps = batch.turn_ids[row], batch.gaps[row]
        spans = [ids == turn for turn in range(int(ids.max()) + 1)]
        evidence = [float(gaps[span].double().sum()) for span in spans]
        advantage, rate = base[row]
        for span, weight in zip(spans, weights(evidence, advantage, rate), strict=True):
            result[row][span] = advantage * ((1 - RULE.lam) + RULE.lam * weight)
    return result


def rows(batch: Batch) -> Tensor:
    """(N*K, 512): a row per turn, collected into trajectories first."""
    evidence = (batch.row_gaps * batch.row_mask).sum(-1)
    scores = torch.stack([batch.won[int(trajectory.split("-")[1])] for trajectory, _ in batch.row_keys])
    of_trajectory: dict[str, list[int]] = defaultdict(list)
    of_group: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for index, (trajectory, _) in enumerate(batch.row_keys):
        of_trajectory[trajectory].append(index)
        of_group[int(trajectory.split("-")[1]) // GROUP][trajectory] = scores[index]
    statistics = {}
    for group, members in of_group.items():
        values = torch.stack(list(members.values()))
        statistics[group] = (values.mean(), values.std(), values.mean().item())
    scale = torch.zeros(len(evidence))
    for index, (trajectory, _) in enumerate(batch.row_keys):
        mean, deviation, _ = statistics[int(trajectory.split("-")[1]) // GROUP]
        scale[index] = (scores[index] - mean) / (deviation + 1e-6)
    for trajectory, rows_of in of_trajectory.items():
        rows_of.sort(key=lambda index: batch.row_keys[index][1])
        rate = statistics[int(trajectory.split("-")[1]) // GROUP][2]
        advantage = scale[rows_of[0]].item()
        values_of = [evidence[index].item() for index in rows_of]
        for index, weight in zip(rows_of, weights(values_of, advantage, rate), strict=True):
            scale[index] = advantage * ((1 - RULE.lam) + RULE.lam * weight)
    return scale[:, None] * batch.row_mask


def outcome_advantages(won: list[float], group: list[int]) -> list[tuple[float, float]]:
    """(A, S/G) of each trajectory, in plain Python."""
    members: dict[int, list[float]] = defaultdict(list)
    for value, name in zip(won, group, strict=True):
        members[name].append(value)
    result = []
    for value, name in zip(won, group, strict=True):
        own = members[name]
        mean = sum(own) / len(own)
        deviation = math.sqrt(sum((one - mean) ** 2 for one in own) / (len(own) - 1))
        result.append(((value - mean) / (deviation + 1e-6), mean))
    return result


def weights(evidence: list[float], advantage: float, success_rate: float) -> list[float]:
    """w_k of one trajectory, in plain Python."""
    prior = min(max(success_rate, RULE.eps), 1 - RULE.eps)
    belief, total, moved = prior, 0.0, []
    for value in evidence:
        total = RULE.gamma * total + value
        after = 1 / (1 + math.exp(-(math.log(prior / (1 - prior)) + total)))
        moved.append(((advantage > 0) - (advantage < 0)) * (after - belief))
        belief = after
    mean = sum(moved) / len(moved)
    deviation = math.sqrt(sum((one - mean) ** 2 for one in moved) / len(moved))
    bound = RULE.bound
    return [min(max(1 + bound * (one - mean) / (deviation + RULE.eps), 1 - bound), 1 + bound) for one in moved]


def assert_equal(batch: Batch) -> None:
    """The sides compute the same numbers."""
    ids, expected = batch.turn_ids, ours(batch)
    torch.testing.assert_close(loop(batch), expected, rtol=1e-4, atol=1e-5)
    by_row, turns = rows(batch), int(ids.max()) + 1
    for index, (trajectory, turn) in enumerate(batch.row_keys[: 10 * turns]):
        row = int(trajectory.split("-")[1])
        own = expected[row][ids[row] == turn]
        torch.testing.assert_close(by_row[index][: len(own)], own, rtol=1e-3, atol=1e-4)


def main() -> None:
    options = parser("credit", __doc__).parse_args()
    before = machine()
    torch.set_num_threads(1)
    shapes = {
        "128 × 50 turns × 16,384 tokens": (128, 50, 16384, 100),
        "CPU default: 64 × 20 turns × 640 tokens": (64, 20, 640, 8),
    }
    result, lines = {}, []
    for title, (count, turns, tokens, sampled) in shapes.items():
        batch = make_batch(count // 4 if options.quick else count, turns, tokens, sampled)
        assert_equal(batch)
        sides = {"ours": lambda b=batch: ours(b), "loop": lambda b=batch: loop(b), "rows": lambda b=batch: rows(b)}
        seconds = take_turns(sides, options.repeats)
        ratios = {name: ratio(seconds[name], seconds["ours"]) for name in ("loop", "rows")}
        result[title] = {"seconds": seconds, "ratio": ratios}
        lines.append([title, *(spread(seconds[name]) for name in sides), *(spread(ratios[name]) for name in ratios)])
    print(table(["batch", "ours", "loop", "rows", "loop / ours", "rows / ours"], lines))
    report(options, "credit", before, result)


if __name__ == "__main__":
    main()
