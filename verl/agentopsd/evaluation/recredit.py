"""Recomputes the credit of saved episodes with other settings and shows what would change.

``python -m verl.agentopsd.credit RECORDS.jsonl … --lambda 0.3 --gamma 1`` reads training records, applies the rule to
the saved gaps and base advantages, and compares with the weights that were used. The policy would have gone another way
with other weights: this answers what one update would have weighed, not how a run would have ended.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from verl.agentopsd.credit import CreditConfig, agentopsd_credit
from verl.agentopsd.evaluation.records import EpisodeRecord, RecordError, RecordWriter, Turn, read_records, turn_credits

if TYPE_CHECKING:
    from rich.console import Console

SATURATED = 0.01


class RecreditError(ValueError):
    """Records whose credit cannot be recomputed as asked."""


@dataclass(frozen=True)
class Changed:
    """One turn before and after."""

    episode: EpisodeRecord
    index: int
    before: Turn
    after: Turn


def is_scored(episode: EpisodeRecord) -> bool:
    """The teacher has scored this episode: it has a base advantage and the log-probs of every turn."""
    known = all(turn.teacher_logprob_sum is not None and turn.logprob_sum is not None for turn in episode.turns)
    return bool(episode.advantage) and bool(episode.turns) and known


def recompute(episodes: Sequence[EpisodeRecord], rule: CreditConfig) -> list[EpisodeRecord]:
    """The same episodes with the credit of ``rule``; those that were not scored are returned as they are.

    The rule is applied to the scored episodes of each step together, as in training.

    Raises:
        RecreditError: token granularity, but the gaps of single tokens were not kept.
    """
    result = list(episodes)
    by_step: dict[int, list[int]] = defaultdict(list)
    for i, episode in enumerate(episodes):
        if is_scored(episode):
            by_step[episode.step].append(i)
    for rows in by_step.values():
        for i, episode in zip(rows, _recompute_step([episodes[i] for i in rows], rule), strict=True):
            result[i] = episode
    return result


def _recompute_step(episodes: Sequence[EpisodeRecord], rule: CreditConfig) -> list[EpisodeRecord]:
    gaps = [
        torch.tensor([gap for turn in e.turns for gap in _gaps(e, turn, rule)], dtype=torch.float64) for e in episodes
    ]
    counts = [torch.tensor([len(_gaps(e, turn, rule)) for turn in e.turns]) for e in episodes]
    ids = [torch.repeat_interleave(torch.arange(len(count)), count) for count in counts]
    credit = agentopsd_credit(
        torch.tensor([episode.advantage for episode in episodes], dtype=torch.float64),
        pad_sequence(gaps, batch_first=True),
        pad_sequence(ids, batch_first=True, padding_value=-1),
        torch.tensor([_success_rate(episode, rule) for episode in episodes], dtype=torch.float64),
        rule,
    )
    changed = []
    for row, episode in enumerate(episodes):
        own = credit.turn_mask[row]
        values = {name: getattr(credit, name)[row][own] for name in ("evidence", "belief", "delta", "weights")}
        shaped = credit.advantages[row, : len(ids[row])]
        per_turn = turn_credits(ids[row], torch.zeros_like(gaps[row]), gaps[row], shaped, values)
        turns = [
            replace(turn, e=new.e, B=new.B, dB=new.dB, w=new.w, advantage=new.advantage)
            for turn, new in zip(episode.turns, per_turn, strict=True)
        ]
        changed.append(replace(episode, turns=turns, prior=float(credit.prior[row])))
    return changed


def _gaps(episode: EpisodeRecord, turn: Turn, rule: CreditConfig) -> list[float]:
    """The turn's token gaps; where only their sum was kept, that sum spread evenly, which no rule per turn can tell."""
    if turn.gaps is not None:
        return turn.gaps
    if rule.granularity == "token":
        raise RecreditError(f"{episode.game_id}: the gaps of single tokens were not kept, granularity=token needs them")
    assert turn.teacher_logprob_sum is not None and turn.logprob_sum is not None
    return [(turn.teacher_logprob_sum - turn.logprob_sum) / turn.tokens] * turn.tokens


def _success_rate(episode: EpisodeRecord, rule: CreditConfig) -> float:
    if episode.success_rate is not None:
        return episode.success_rate
    if rule.prior == "group":
        raise RecreditError(f"{episode.game_id}: its group's success rate was not kept; give a number as --prior")
    return 0.0


def changed_turns(before: Sequence[EpisodeRecord], after: Sequence[EpisodeRecord]) -> list[Changed]:
    """The scored turns, those whose weight moved most first."""
    turns = [
        Changed(old, k, a, b)
        for old, new in zip(before, after, strict=True)
        if is_scored(old)
        for k, (a, b) in enumerate(zip(old.turns, new.turns, strict=True))
    ]
    return sorted(turns, key=lambda turn: -abs((turn.after.w or 0.0) - (turn.before.w or 0.0)))


def overview(turns: Sequence[Changed]) -> list[tuple[str, str, str]]:
    """Rows of ``(what, before, after)`` over all scored turns."""
    rows: list[tuple[str, str, str]] = []

    def add(what: str, name: str, measure: Any, form: str = ".3f") -> None:
        cells = []
        for side in ("before", "after"):
            values = np.array([value for turn in turns if (value := getattr(getattr(turn, side), name)) is not None])
            cells.append(format(measure(values), form) if len(values) else "–")
        rows.append((what, cells[0], cells[1]))

    add("evidence, mean", "e", np.mean, "+.3f")
    add("evidence, mean size", "e", lambda e: np.abs(e).mean())
    add("belief, mean", "B", np.mean)
    add("beliefs saturated", "B", lambda B: ((B < SATURATED) | (B > 1 - SATURATED)).mean(), ".1%")
    add("ΔB, mean size", "dB", lambda dB: np.abs(dB).mean())
    add("weight, least", "w", np.min)
    add("weight, greatest", "w", np.max)
    add("weight, mean distance from 1", "w", lambda w: np.abs(w - 1).mean())
    return rows


def agreement(turns: Sequence[Changed]) -> dict[str, float]:
    """How far the weights agree: their correlation, their largest distance, and the share that changed sides of 1."""
    pairs = np.array([(t.before.w, t.after.w) for t in turns if t.before.w is not None and t.after.w is not None])
    if not len(pairs):
        return {}
    (a, b), flipped = pairs.T, np.sign(pairs[:, 0] - 1) * np.sign(pairs[:, 1] - 1) < 0
    spread = a.std() * b.std()
    correlation = float(((a - a.mean()) * (b - b.mean())).mean() / spread) if spread > 0 else float(np.allclose(a, b))
    return {"correlation": correlation, "distance": float(np.abs(a - b).max()), "flipped": float(flipped.mean())}


def main(argv: Sequence[str] | None = None, console: Console | None = None) -> int:
    args = _parser().parse_args(argv)
    from rich.console import Console

    out = console or Console()
    if console is None and not out.is_terminal:
        out = Console(width=132)
    try:
        rule = CreditConfig(**{field.name: getattr(args, field.name) for field in fields(CreditConfig)})
        before = [episode for path in args.records for episode in read_records(path)]
        after = recompute(before, rule)
        turns = changed_turns(before, after)
        if not turns:
            raise RecreditError(
                f"none of {len(before)} episodes was scored by a teacher: give rollout records of an AgentOPSD run"
            )
        if args.out:
            with RecordWriter(args.out, overwrite=args.overwrite) as writer:
                for episode in after:
                    writer.write(episode)
    except (RecreditError, RecordError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _print(before, turns, rule, args.top, out)
    return 0


def _print(
    before: Sequence[EpisodeRecord], turns: Sequence[Changed], rule: CreditConfig, top: int, out: Console
) -> None:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    scored = sum(map(is_scored, before))
    title = f"{len(turns)} turns of {scored} scored episodes ({len(before) - scored} had no advantage)"
    table = Table(
        "", "recorded", "recomputed", title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    for row in overview(turns):
        table.add_row(*row)
    out.print(table)
    if agreed := agreement(turns):
        out.print(
            f"Weights: correlation {agreed['correlation']:.3f}, largest change {agreed['distance']:.3g}; "
            f"{agreed['flipped']:.1%} of the turns change sides (favoured or not).",
            highlight=False,
        )
    if top <= 0:
        return
    table = Table(title="largest changes", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column, justify in (("step", "right"), ("game", "left"), ("turn", "right"), ("command", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for column in ("e", "w recorded", "w recomputed"):
        table.add_column(column, justify="right")
    for turn in turns[:top]:
        w = "–" if turn.before.w is None else f"{turn.before.w:.3f}"
        table.add_row(
            str(turn.episode.step),
            escape(f"{'/'.join(turn.episode.game_id.split('/')[1:2]) or turn.episode.game_id} #{turn.episode.sample}"),
            str(turn.index + 1),
            escape(turn.before.command[:40]),
            f"{turn.after.e:+.3f}",
            w,
            f"{turn.after.w:.3f}",
        )
    out.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m verl.agentopsd.credit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = {field.name: field.default for field in fields(CreditConfig) if field.default is not MISSING}
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORDS.jsonl", help="rollout records of a run")
    parser.add_argument("--lambda", dest="lam", type=float, default=default["lam"], help=f"({default['lam']})")
    for name in ("gamma", "bound", "eps"):
        parser.add_argument(f"--{name}", type=float, default=default[name], help=f"({default[name]})")
    for name in ("granularity", "direction", "evidence"):
        parser.add_argument(f"--{name}", default=default[name], help=f"({default[name]})")
    parser.add_argument("--prior", type=_prior, default=default["prior"], help="group or a number (group)")
    parser.add_argument(
        "--no-recursion", dest="recursion", action="store_false", help="rank turns by their own evidence"
    )
    parser.add_argument("--top", type=int, default=10, help="how many of the most changed turns to show (10)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the records with the new credit")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing --out")
    parser.set_defaults(warmdown_steps=0)
    return parser


def _prior(text: str) -> str | float:
    return text if text == "group" else float(text)


if __name__ == "__main__":
    sys.exit(main())
