"""Compares evaluations of two or more models on the same games, with statistics.

Every argument is a finished evaluation's file of episode records, ``FILE`` or ``NAME=FILE``; several files of one name
are training seeds of one model. The first model is the baseline.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verl.agentopsd.evaluation.comparison import CompareError, Comparison, Difference, Scope, Score, compare
from verl.agentopsd.evaluation.records import RecordError

if TYPE_CHECKING:
    from rich.console import Console

GATE_FAILED, REFUSED = 1, 2
Table = tuple[str, list[str], list[list[str]]]
"""Title, header and rows; the first column is text, the others numbers."""


def named_files(arguments: Sequence[str]) -> list[tuple[str, Path]]:
    """``(name, file)`` of ``NAME=FILE`` or ``FILE``; a file without a name is called by its stem if that is unique.

    A training run's validation files are numbered by step: ``000020.jsonl`` is called ``step 20``.
    """
    split: list[tuple[str, Path]] = []
    for argument in arguments:
        name, equals, file = argument.partition("=")
        if not equals or Path(argument).exists():
            name, file = "", argument
        elif not name or not file:
            raise CompareError(f"{argument!r} is neither a file nor NAME=FILE")
        split.append((name, Path(file)))
    stems = Counter(path.stem for name, path in split if not name)
    stems.update({name for name, _ in split if name})
    used: Counter[str] = Counter()
    named = []
    for name, path in split:
        if not name:
            stem = f"step {int(path.stem)}" if path.stem.isdecimal() else path.stem
            name = stem if stems[path.stem] == 1 else str(path)
            used[name] += 1
            name = name if used[name] == 1 else f"{name} ({used[name]})"  # the same file twice
        named.append((name, path))
    return named


def tables(result: Comparison) -> list[Table]:
    """One table per later model against the baseline, and one of how all of them played."""
    base, *others = result.models
    shown: list[Table] = []
    for i, other in enumerate(others):
        seeds = max(base.seeds, other.seeds) > 1
        header = ["", "n", base.name, other.name, "difference", "seeds" if seeds else "McNemar p", "n to see it"]
        rows = [
            [
                scope.name,
                str(scope.n),
                _score(scope.scores[0]),
                _score(scope.scores[i + 1]),
                _difference(scope.differences[i]),
                f"{base.seeds} / {other.seeds}" if seeds else _mcnemar(scope.differences[i]),
                _detectable(scope.differences[i]),
            ]
            for scope in result.scopes
        ]
        shown.append(
            (f"{other.name} against {base.name}, success in % [{result.confidence:.0%} interval]", header, rows)
        )
    header = ["model", "turns", "invalid / game", "truncated", "loops", "recovery", "action tokens"]
    rows = [
        [
            model.name,
            _number(model.behaviour["turns_mean"], ".1f"),
            _number(model.behaviour["invalid_mean"], ".2f"),
            _number(model.behaviour["truncated"], ".1%"),
            _number(model.behaviour["loops"], ".1%"),
            _number(model.behaviour["recovery"], ".1%"),
            _number(model.behaviour["action_tokens_mean"], ".0f"),
        ]
        for model in result.models
    ]
    shown.append(("how they played", header, rows))
    return shown


def verdict(scope: Scope, i: int, name: str, base: str) -> str:
    """What the interval of the difference says, in words."""
    d = scope.differences[i].difference
    interval = f"{100 * d.low:+.1f} to {100 * d.high:+.1f}"
    points = f"{100 * abs(d.value):.1f} points ({interval})"
    if d.low > 0:
        return f"{name} is better than {base} by {points}."
    if d.high < 0:
        return f"{name} is worse than {base} by {points}."
    return f"No difference between {name} and {base} is shown: {100 * d.value:+.1f} points ({interval})."


def legend(result: Comparison) -> list[str]:
    """How to read the tables, and what to be careful about."""
    single = all(model.seeds == 1 for model in result.models)
    how = (
        "Success with Wilson's interval; difference with a bootstrap interval over games; McNemar's exact p and in "
        "brackets the games that only the one or only the other won."
        if single
        else "Success as mean ± sd over seeds; intervals from a bootstrap over seeds and games."
    )
    return [
        f"Panel {result.panel} ({result.panel_hash}), {result.scopes[0].n} games. {how}",
        "n to see it: games per model at which a difference of this size shows with 80 % power. Rows are not corrected "
        "for their number: judge by the first one.",
        *(f"Note: {note}." for note in result.notes),
    ]


def markdown(result: Comparison) -> str:
    """The whole report as Markdown."""
    base, *others = result.models
    lines = [verdict(result.scopes[0], i, other.name, base.name) + "\n" for i, other in enumerate(others)]
    for title, header, rows in tables(result):
        lines.append(f"### {title}\n")
        lines.append("| " + " | ".join(header) + " |")
        lines.append("|---|" + "---:|" * (len(header) - 1))
        lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows] + [""]
    return "\n".join(lines + legend(result)) + "\n"


def figure(result: Comparison, path: Path) -> Path:
    """Success per split with intervals, and invalid actions per game, as a PNG."""
    from verl.agentopsd.evaluation.plots import INK, PALETTE, headline, new_figure, rate_axis, save

    scopes = [scope for scope in result.scopes if scope.kind in ("all", "split")]
    figure, (left, right) = new_figure(8.6, 3.9, 2, width_ratios=[2.2, 1])
    step = 0.7 / len(result.models)
    for i, model in enumerate(result.models):
        shift = (i - (len(result.models) - 1) / 2) * step
        color = PALETTE[i % len(PALETTE)]
        at = [x + shift for x in range(len(scopes))]
        success = [scope.scores[i].success for scope in scopes]
        spread = [[s.value - s.low for s in success], [s.high - s.value for s in success]]
        values = [s.value for s in success]
        left.bar(at, values, width=step * 0.86, color=color, alpha=0.85, label=model.name)
        left.errorbar(at, values, yerr=spread, fmt="none", ecolor=INK, elinewidth=1.2, capsize=3)
        for x, s in zip(at, success, strict=True):
            left.annotate(
                f"{s.value:.0%}",
                (x, s.high),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
                color=INK,
            )
        invalid = model.behaviour["invalid_mean"] or 0.0
        right.bar([shift], [invalid], width=step * 0.86, color=color, alpha=0.85)
        right.annotate(
            f"{invalid:.1f}",
            (shift, invalid),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            color=INK,
        )
    margin = 0.5 + max(0, 3 - len(scopes)) / 2  # few bars stay narrow
    left.set_xlim(-margin, len(scopes) - 1 + margin)
    left.set_xticks(range(len(scopes)), [f"{scope.name}\nn = {scope.n}" for scope in scopes])
    rate_axis(left)
    right.set_xticks([])
    right.set_ylim(0, max(1e-6, *(m.behaviour["invalid_mean"] or 0.0 for m in result.models)) * 1.25)
    right.set_xlim(-0.6, 0.6)
    headline(left, "Success", f"panel {result.panel}, {result.confidence:.0%} interval")
    headline(right, "Invalid actions", "per game")
    figure.legend(
        *left.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    return save(figure, path)


def gate(result: Comparison, tolerance: float) -> list[str]:
    """What to say of each model that is worse than the baseline by more than ``tolerance`` (one-sided)."""
    failed = []
    for i, (model, upper) in enumerate(zip(result.models[1:], result.upper, strict=True)):
        if upper < -tolerance:
            d = result.scopes[0].differences[i].difference.value
            failed.append(
                f"{model.name} is worse than {result.models[0].name} by {-100 * d:.1f} points, "
                f"with {result.confidence:.0%} confidence by more than {-100 * upper:.1f}; allowed: {100 * tolerance:g}"
            )
    return failed


def main(argv: Sequence[str] | None = None, console: Console | None = None) -> int:
    args = _parser().parse_args(argv)
    from rich.console import Console

    out = console or Console()
    if console is None and not out.is_terminal:
        out = Console(width=140)
    try:
        result = compare(named_files(args.files), confidence=args.confidence, resamples=args.resamples)
    except (CompareError, RecordError) as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED
    failed = [] if args.gate is None else gate(result, args.gate)
    report = {**result.to_dict(), "gate": None}
    if args.gate is not None:
        report["gate"] = {"tolerance": args.gate, "passed": not failed, "failures": failed}
    try:
        if args.json:
            args.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if args.markdown:
            args.markdown.write_text(markdown(result), encoding="utf-8")
        if args.figure:
            figure(result, args.figure)
    except OSError as error:
        print(f"error: cannot write {error.filename}: {error.strerror}", file=sys.stderr)
        return REFUSED
    _print(result, out)
    if args.gate is not None:
        passed = (
            f"gate passed: no loss of more than {100 * args.gate:g} points is shown ({args.confidence:.0%} confidence)"
        )
        out.print("\n".join(f"gate failed: {text}" for text in failed) or passed, highlight=False)
    return GATE_FAILED if failed else 0


def _print(result: Comparison, out: Console) -> None:
    from rich import box
    from rich.table import Table as RichTable

    base, *others = result.models
    for title, header, rows in tables(result):
        table = RichTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for i, column in enumerate(header):
            table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
        for i, row in enumerate(rows):
            table.add_row(*row, style="bold" if i == 0 and title != "how they played" else None)
        out.print(table)
    for line in legend(result):
        out.print(line, style="dim", highlight=False)
    for i, other in enumerate(others):
        out.print(verdict(result.scopes[0], i, other.name, base.name), style="bold", highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verl.agentopsd.compare", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="[NAME=]FILE", help="records of an evaluation, JSON lines")
    parser.add_argument("--confidence", type=_fraction, default=0.95, help="of all intervals and the gate (0.95)")
    parser.add_argument("--resamples", type=int, default=10_000, help="bootstrap resamples (10000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables as Markdown")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="write a PNG: success per split, invalid actions")
    parser.add_argument(
        "--gate",
        type=_tolerance,
        metavar="TOL",
        help="exit with 1 if a model is worse than the first by more than TOL (0.05 = 5 points) with this confidence",
    )
    return parser


def _fraction(text: str) -> float:
    value = float(text)
    if not 0.5 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.5 and 1")
    return value


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1 (0.05 allows 5 points)")
    return value


def _score(score: Score) -> str:
    s = score.success
    sd = "" if score.sd is None else f" ± {100 * score.sd:.1f}"
    return f"{100 * s.value:.1f}{sd} [{100 * s.low:.1f}, {100 * s.high:.1f}]"


def _difference(difference: Difference) -> str:
    d = difference.difference
    return f"{100 * d.value:+.1f} [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"


def _mcnemar(difference: Difference) -> str:
    m = difference.mcnemar
    return "–" if m is None else f"{m.p:.3g} ({m.only_a}:{m.only_b})"


def _detectable(difference: Difference) -> str:
    return "–" if difference.detectable is None else f"{difference.detectable:,.0f}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


if __name__ == "__main__":
    sys.exit(main())
