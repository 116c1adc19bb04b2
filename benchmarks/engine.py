"""ALFWorld's engine: the exact one in Python against the real one (TextWorld), in this process and in worker processes.

The same commands, drawn at random from what is admissible, go to both; their answers are compared word for word. The
exact one is measured with 1, 8, 64 and 512 games open at once. The real one needs two seconds to open a game: 64 are
opened in the first round alone (``--once``), 512 only when asked for (``--once 64 512``, 20 minutes more), and not in
worker processes.
In this process the time is processor time, with worker processes the wall clock's: they agree on a quiet machine.
Memory is what a process grew by, divided by the open games.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

from benchmarks.harness import Sample, in_process, machine, number, parser, report, table
from verl.agentopsd.envs.alfworld.engine import ExactEnv
from verl.agentopsd.envs.alfworld.family import resolve_data_dir
from verl.agentopsd.envs.alfworld.games import discover, load_game

MOST_IN_WORKERS = 64

Script = tuple[str, list[str], list[str]]
"""Game file, commands, answers of the exact engine (the first is the opening)."""


def scripts(count: int, steps: int, seed: int = 0) -> list[Script]:
    """Random admissible play of ``count`` valid_unseen games; games repeat when there are more."""
    tasks = discover(resolve_data_dir({}), "valid_unseen", check_counts=False)
    rng = random.Random(seed)
    result = []
    for index in range(count):
        task = tasks[index % len(tasks)]
        env = ExactEnv(load_game(task.path))
        observation = env.reset()
        commands, answers = [], [observation.text]
        for _ in range(steps):
            commands.append(rng.choice(list(observation.admissible)))
            observation = env.step(commands[-1])
            answers.append(observation.text)
            if observation.done:
                break
        result.append((task.path, commands, answers))
    return result


def resident_kib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def exact(count: int, steps: int) -> dict[str, float]:
    """Opens ``count`` games, then plays them a step each in turn."""
    plan = scripts(count, steps)
    for path in {path for path, _, _ in plan}:
        load_game(path)  # parsing a game file is measured by benchmarks.loading
    before, started = resident_kib(), time.process_time()
    envs = [ExactEnv(load_game(path)) for path, _, _ in plan]
    openings = [env.reset().text for env in envs]
    opened = time.process_time()
    answers = [[opening] for opening in openings]
    done = 0
    for step in range(steps):
        for env, (_, commands, _), said in zip(envs, plan, answers, strict=True):
            if step < len(commands):
                said.append(env.step(commands[step]).text)
                done += 1
    finished = time.process_time()
    assert answers == [expected for _, _, expected in plan]
    return {
        "resets_per_s": count / (opened - started),
        "steps_per_s": done / (finished - opened),
        "kib_per_env": (resident_kib() - before) / count,
    }


def real_in_process(count: int, steps: int) -> dict[str, float]:
    """The same with TextWorld's own environment in this process."""
    from verl.agentopsd.envs.alfworld.textworld_worker import Engine

    plan = scripts(count, steps)
    stdout, sys.stdout = sys.stdout, open(os.devnull, "w")
    engine = Engine()
    before, started = resident_kib(), time.process_time()
    answers = [
        [engine.answer({"op": "open", "session": index, "path": path})["text"]]
        for index, (path, _, _) in enumerate(plan)
    ]
    opened = time.process_time()
    done = 0
    for step in range(steps):
        for index, (_, commands, _) in enumerate(plan):
            if step < len(commands):
                request = {"op": "step", "session": index, "command": commands[step]}
                answers[index].append(engine.answer(request)["text"])
                done += 1
    finished = time.process_time()
    sys.stdout = stdout
    assert answers == [expected for _, _, expected in plan], "the engines differ"
    return {
        "resets_per_s": count / (opened - started),
        "steps_per_s": done / (finished - opened),
        "kib_per_env": (resident_kib() - before) / count,
    }


def real_in_workers(count: int, steps: int, workers: int) -> dict[str, float]:
    """The same through the product's pool of worker processes; a thread per game."""
    from concurrent.futures import ThreadPoolExecutor

    import psutil

    from verl.agentopsd.envs.alfworld.textworld_env import TextWorldEnv, WorkerPool

    plan = scripts(count, steps)
    pool = WorkerPool(workers, reset_timeout=600, step_timeout=600)
    envs = [TextWorldEnv(path, pool) for path, _, _ in plan]
    with ThreadPoolExecutor(count) as threads:
        started = time.perf_counter()
        answers = [[opening.text] for opening in threads.map(lambda env: env.reset(), envs)]
        opened = time.perf_counter()
        memory = sum(psutil.Process(pid).memory_info().rss for pid in pool.pids) / 1024
        played = time.perf_counter()
        for said in threads.map(play, envs, [commands for _, commands, _ in plan], answers):
            assert said
        finished = time.perf_counter()
    pool.close()
    assert answers == [expected for _, _, expected in plan], "the engines differ"
    done = sum(len(commands) for _, commands, _ in plan)
    return {
        "resets_per_s": count / (opened - started),
        "steps_per_s": done / (finished - played),
        "kib_per_env": memory / count,
    }


def play(env: Any, commands: list[str], said: list[str]) -> bool:
    said += [env.step(command).text for command in commands]
    return True


def main() -> None:
    made = parser("engine", __doc__, repeats=3)
    made.add_argument("--real", type=int, nargs="*", default=[1, 8], help="games at once of the real engine")
    made.add_argument("--once", type=int, nargs="*", default=[64], help="the same, in the first round alone")
    made.add_argument("--steps", type=int, default=10, help="steps per game (default: %(default)s)")
    options = made.parse_args()
    before = machine()
    steps = 5 if options.quick else options.steps
    runs: dict[str, list[dict[str, float]]] = {}
    for number_of_round in range(1 if options.quick else options.repeats):
        for count in (1, 8, 64, 512):
            one = in_process("benchmarks.engine:exact", count, steps)
            runs.setdefault(f"exact, {count}", []).append(one)
        real = options.real[:1] if options.quick else [*options.real, *(() if number_of_round else options.once)]
        for count in real:
            runs.setdefault(f"TextWorld in process, {count}", []).append(
                in_process("benchmarks.engine:real_in_process", count, steps)
            )
            if count <= MOST_IN_WORKERS:
                runs.setdefault(f"TextWorld in 2 processes, {count}", []).append(
                    in_process("benchmarks.engine:real_in_workers", count, steps, 2)
                )
    measured = {
        name: {key: Sample(tuple(run[key] for run in found), key) for key in found[0]} for name, found in runs.items()
    }
    reference = measured.get("TextWorld in process, 1")
    rows = []
    for name, values in measured.items():
        cells = [number(values[key].median) for key in ("resets_per_s", "steps_per_s", "kib_per_env")]
        against = [
            f"{number(values[key].median / reference[key].median)} ×" if reference else ""
            for key in ("resets_per_s", "steps_per_s")
        ]
        rows.append([name, *cells, *against])
    header = ["engine, games at once", "resets/s", "steps/s", "KiB/game", "resets against real", "steps against real"]
    print(table(header, rows))
    report(options, "engine", before, {"steps": steps, "measured": measured})


if __name__ == "__main__":
    main()
