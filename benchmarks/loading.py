"""From nothing to the first observation of ALFWorld's training games: finding 3,553 games and opening one.

Sides, each in a fresh process, the imports not counted: ours without and with its cached list of games, and ALFWorld's
own ``AlfredTWEnv`` (which decodes two JSON files per game) with its ``init_env(1)`` and ``reset()``.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Sample, in_process, machine, parser, ratio, report, spread, table

FIRST, CACHED, UPSTREAM = "ours, first time", "ours, cached list", "AlfredTWEnv"


def ours(split: str) -> dict[str, float]:
    """Seconds for the list and for the first observation after it."""
    from verl.agentopsd.envs.alfworld.engine import ExactEnv
    from verl.agentopsd.envs.alfworld.family import resolve_data_dir
    from verl.agentopsd.envs.alfworld.games import discover, load_game

    started = time.perf_counter()
    tasks = discover(resolve_data_dir({}), split)
    listed = time.perf_counter()
    text = ExactEnv(load_game(tasks[0].path)).reset().text
    finished = time.perf_counter()
    assert "Your task is to" in text
    return {"games": len(tasks), "list": listed - started, "reset": finished - listed}


def upstream(split: str) -> dict[str, float]:
    """The same with ALFWorld's environment."""
    from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv

    from verl.agentopsd.envs.alfworld.family import resolve_data_dir
    from verl.agentopsd.envs.alfworld.games import games_root

    config = {
        "env": {
            "goal_desc_human_anns_prob": 0,
            "task_types": [1, 2, 3, 4, 5, 6],
            "domain_randomization": False,
            "expert_type": "handcoded",
        },
        "dataset": {"data_path": str(games_root(resolve_data_dir({})) / split), "num_train_games": 0},
        "general": {"training_method": "dqn"},
        "rl": {"training": {"max_nb_steps_per_episode": 50}},
    }
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        started = time.perf_counter()
        family = AlfredTWEnv(config, train_eval="train")
        listed = time.perf_counter()
        env = family.init_env(batch_size=1)
        texts, _ = env.reset()
        finished = time.perf_counter()
    env.close()
    assert "Your task is to" in texts[0]
    return {"games": len(family.game_files), "list": listed - started, "reset": finished - listed}


def main() -> None:
    options = parser("loading", __doc__, repeats=3).parse_args()
    before = machine()
    split = "valid_unseen" if options.quick else "train"
    runs: dict[str, list[dict[str, float]]] = {FIRST: [], CACHED: [], UPSTREAM: []}
    for _ in range(1 if options.quick else options.repeats):
        with tempfile.TemporaryDirectory() as folder:
            environment = {"XDG_CACHE_HOME": folder}
            in_process("benchmarks.loading:ours", split, environment=environment)  # the disk's cache is warm for all
            next(Path(folder).rglob("*.json")).unlink()
            runs[FIRST].append(in_process("benchmarks.loading:ours", split, environment=environment))
            runs[CACHED].append(in_process("benchmarks.loading:ours", split, environment=environment))
        runs[UPSTREAM].append(in_process("benchmarks.loading:upstream", split))
    assert len({run["games"] for found in runs.values() for run in found}) == 1
    seconds = {
        name: {key: Sample(tuple(run[key] for run in found)) for key in ("list", "reset")}
        | {"both": Sample(tuple(run["list"] + run["reset"] for run in found))}
        for name, found in runs.items()
    }
    rows = []
    for name, values in seconds.items():
        faster = [spread(ratio(seconds[UPSTREAM][key], values[key])) for key in ("list", "both")]
        rows.append([name, *(spread(values[key]) for key in ("list", "reset")), *faster])
    print(table([f"{split}: {int(runs[FIRST][0]['games'])} games", "list", "first reset", "list ×", "both ×"], rows))
    report(options, "loading", before, {"split": split, "seconds": seconds})


if __name__ == "__main__":
    sys.exit(main())
