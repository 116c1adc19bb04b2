"""Runs every benchmark of this folder and writes what docs/performance.md quotes.

``--quick`` sees whether they run, and writes to a temporary folder; ``--full`` (the default) takes about half an hour
on a quiet machine. Those that start Ray and vLLM run only with ``--stack``, and take an hour more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

from benchmarks.harness import RESULTS, ROOT

ALONE = (
    "credit",
    "engine",
    "loading",
    "tokens_forwarded",
    "logprob_memory",
    "rollout_steps",
    "growth",
    "cost_model",
)
STACK = ("rollout_wall", "startup", "update --plain", "rollout_tokens", "workers")
"""``teacher_share --run RUN`` is not among them: it reads a run that was made before."""


def main() -> int:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = made.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true")
    size.add_argument("--full", action="store_true")
    made.add_argument("--stack", action="store_true", help="also those that start Ray and vLLM")
    options = made.parse_args()
    failed = []
    for name in (*ALONE, *(STACK if options.stack else ())):
        print(f"\n== {name}", flush=True)
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", *f"benchmarks.{name}".split(), *(["--quick"] if options.quick else [])], cwd=ROOT
        )
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
        if done.returncode:
            failed.append(name)
    results = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    busy = [name for name, result in results.items() if result["machine"]["busy"]]
    if busy:
        print(f"\nmeasured while the machine was busy, to be repeated: {', '.join(busy)}")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
