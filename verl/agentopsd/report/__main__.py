"""Writes a run's credit report: ``python -m verl.agentopsd.report RUN_DIR``.

One self-contained HTML file with the training curves, the warnings about the run and every recorded episode, turn by
turn. It needs no server and no network.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl.agentopsd.evaluation.run_metrics import RunError
from verl.agentopsd.report.page import write_report


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verl.agentopsd.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, help="directory of a run: metrics.jsonl, rollouts/, validation/")
    parser.add_argument("--out", type=Path, help="the HTML file; RUN_DIR/report.html if not given")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a file that is not a report; an earlier report, derived from its run, is always replaced",
    )
    parser.add_argument("--no-token-gaps", action="store_true", help="leave out single tokens: a smaller file")
    args = parser.parse_args(argv)
    try:
        written = write_report(args.run_dir, args.out, overwrite=args.overwrite, token_gaps=not args.no_token_gaps)
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for note in written.notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"{written.path}: {written.episodes} episodes, {written.bytes / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
