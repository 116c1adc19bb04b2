"""``python -m verl.agentopsd.doctor [overrides] [--json]``: everything that can be checked before a run.

Takes the overrides of a run. Exit code 0: no errors (warnings may be there); 1: errors.
"""

from __future__ import annotations

import sys
import warnings

from rich.console import Console

from verl.agentopsd.config import ConfigError
from verl.agentopsd.doctor import report as output
from verl.agentopsd.doctor.examine import Report, examine, refused
from verl.agentopsd.main import compose_config, prepare


def diagnose(overrides: list[str]) -> Report:
    """Composes, validates and examines."""
    warnings.filterwarnings("ignore", message=".*engine is not available")
    try:
        config = compose_config(overrides)
        prepare(config)
    except ConfigError as failure:
        return refused(failure)
    return examine(config, rehearse=True)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--help" in arguments or "-h" in arguments:
        print(__doc__)
        return 0
    flags = [argument for argument in arguments if argument.startswith("--")]
    if unknown := set(flags) - {"--json"}:
        print(f"error: unknown option {sorted(unknown)[0]}; --help lists the options", file=sys.stderr)
        return 1
    report = diagnose([argument for argument in arguments if not argument.startswith("--")])
    if "--json" in flags:
        print(output.to_json(report))
    else:
        output.show(report, Console(soft_wrap=False))
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
