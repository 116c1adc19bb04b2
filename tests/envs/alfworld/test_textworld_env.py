"""The worker processes of the TextWorld backend: time limits, crashes, recycling, and nothing left behind.

Most tests run a stand-in worker that speaks the same protocol, because starting the real one takes seconds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from verl.agentopsd.envs.alfworld import textworld_env
from verl.agentopsd.envs.alfworld.textworld_env import TextWorldEnv, WorkerPool
from verl.agentopsd.envs.base import EnvironmentFault, TextEnv, make_family

STAND_IN = """
    import json, os, sys, time
    print('{"ready": true}', flush=True)
    counters = {}
    for line in sys.stdin:
        request = json.loads(line)
        session, command = request["session"], request.get("command", "")
        if request["op"] == "close":
            counters.pop(session, None)
            print("{}", flush=True)
            continue
        if request["op"] == "open":
            counters[session] = 0
        if command == "hang":
            time.sleep(60)
        if command == "crash":
            os._exit(3)
        if command == "fail":
            print('{"error": "ValueError: no such thing"}', flush=True)
            continue
        counters[session] += command == "add"
        answer = {"text": f"{counters[session]}", "admissible": ["add", "hang"], "won": counters[session] == 5}
        print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Makes new workers run the stand-in: an "add" counts up, five win."""
    file = tmp_path / "worker.py"
    file.write_text(textwrap.dedent(STAND_IN))
    monkeypatch.setattr(textworld_env, "_WORKER_FILE", file)
    monkeypatch.setattr(textworld_env, "_check_installed", lambda: None)


@pytest.fixture
def make_pool(stand_in):
    pools = []

    def make(**settings) -> WorkerPool:
        pools.append(WorkerPool(**{"workers": 1, "reset_timeout": 20, "step_timeout": 20, **settings}))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def gone(pid: int) -> bool:
    """The process has ended, or is only waiting to be collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_an_episode_on_a_worker(make_pool):
    env = TextWorldEnv("game", make_pool())
    assert isinstance(env, TextEnv)
    first = env.reset()
    assert (first.text, first.admissible, first.valid, first.won) == ("0", ("add", "hang"), True, False)
    assert [env.step("add").text for _ in range(4)] == ["1", "2", "3", "4"]
    assert not env.step("fly").valid
    last = env.step(" add ")
    assert last.valid  # the engine strips commands before it looks them up
    assert env.step("add").won and env.reset().text == "0"


def test_stepping_before_reset_is_a_mistake_of_the_caller(make_pool):
    with pytest.raises(RuntimeError, match=r"step\(\) before reset\(\)"):
        TextWorldEnv("game", make_pool()).step("look")


def test_episodes_share_the_workers_and_not_their_state(make_pool):
    pool = make_pool(workers=2)
    envs = [TextWorldEnv("game", pool) for _ in range(6)]
    for env in envs:
        env.reset()
    assert len(pool.pids) == 2
    for times, env in enumerate(envs):
        for _ in range(times):
            env.step("add")
    assert [env.step("count").text for env in envs] == ["0", "1", "2", "3", "4", "5"]


def test_a_hanging_step_is_a_fault_within_the_limit_and_its_worker_is_replaced(make_pool):
    pool = make_pool(step_timeout=0.5)
    env, neighbour = TextWorldEnv("some/game.tw-pddl", pool), TextWorldEnv("other", pool)
    env.reset(), neighbour.reset()
    neighbour.step("add"), neighbour.step("add")
    (pid,) = pool.pids
    started = time.monotonic()
    with pytest.raises(
        EnvironmentFault, match="some/game.tw-pddl.*'hang'.*no answer within 0.5 s; the worker was killed"
    ):
        env.step("hang")
    assert time.monotonic() - started < 5
    assert gone(pid)
    pool.step_timeout = 20
    assert neighbour.step("add").text == "3"  # replayed on the new worker
    assert pool.pids and pool.pids != [pid]


def test_a_crash_is_a_fault_and_the_episode_can_be_reset(make_pool):
    env = TextWorldEnv("game", make_pool())
    env.reset()
    with pytest.raises(EnvironmentFault, match=r"the worker died \(exit code 3\)"):
        env.step("crash")
    assert env.reset().text == "0" and env.step("add").text == "1"


def test_an_error_of_the_engine_is_a_fault_that_spares_the_worker(make_pool):
    pool = make_pool()
    env = TextWorldEnv("game", pool)
    env.reset()
    before = pool.pids
    with pytest.raises(EnvironmentFault, match="'fail' failed: ValueError: no such thing"):
        env.step("fail")
    assert env.step("add").text == "1" and pool.pids == before


def test_a_worker_killed_from_outside_costs_no_episode(make_pool):
    pool = make_pool()
    env = TextWorldEnv("game", pool)
    env.reset(), env.step("add")
    (pid,) = pool.pids
    os.kill(pid, signal.SIGKILL)
    while not gone(pid):
        time.sleep(0.01)
    assert env.step("add").text == "2"


def test_workers_are_replaced_after_a_number_of_episodes_but_finish_theirs(make_pool):
    pool = make_pool(episodes_per_worker=2)
    first, second, third = (TextWorldEnv("game", pool) for _ in range(3))
    first.reset(), second.reset()
    (old,) = pool.pids
    third.reset()
    assert len(pool.pids) == 2
    assert second.step("add").text == "1"
    first.close(), second.close()
    assert gone(old) and len(pool.pids) == 1
    assert third.step("add").text == "1"


def test_closing_the_pool_ends_its_processes_even_in_the_middle_of_a_step(make_pool):
    pool = make_pool()
    env = TextWorldEnv("game", pool)
    env.reset()
    pids, faults = pool.pids, []

    def hang() -> None:
        with pytest.raises(EnvironmentFault) as fault:
            env.step("hang")
        faults.append(fault.value)

    thread = threading.Thread(target=hang)
    thread.start()
    time.sleep(0.2)
    pool.close()
    thread.join(timeout=10)
    assert len(faults) == 1 and all(gone(pid) for pid in pids)
    with pytest.raises(EnvironmentFault, match="pool is closed"):
        env.reset()
    env.close(), env.close()


def test_steps_from_many_threads_do_not_mix(make_pool):
    pool = make_pool(workers=2)
    results = {}

    def play(number: int) -> None:
        env = TextWorldEnv("game", pool)
        env.reset()
        results[number] = [env.step("add").text for _ in range(50)]
        env.close()

    threads = [threading.Thread(target=play, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == {number: [str(count) for count in range(1, 51)] for number in range(8)}


def test_no_worker_outlives_its_parent(stand_in, tmp_path):
    script = textwrap.dedent(
        f"""
        import os, signal
        from pathlib import Path
        from verl.agentopsd.envs.alfworld import textworld_env as t
        t._WORKER_FILE, t._check_installed = Path({str(tmp_path / "worker.py")!r}), lambda: None
        pool = t.WorkerPool(2)
        envs = [t.TextWorldEnv("game", pool) for _ in range(2)]
        [env.reset() for env in envs]
        print(*pool.pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    pids = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120).stdout.split()
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while not all(gone(int(pid)) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(gone(int(pid)) for pid in pids)


HANGING = """
    import importlib.util, time
    spec = importlib.util.spec_from_file_location("worker", {file!r})
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)

    class Engine:
        def answer(self, request):
            if request["op"] == "step":
                print("hanging", flush=True)
                time.sleep(60)
            return {{"text": "", "admissible": [], "won": False}}

    worker.Engine = Engine
    worker.main()
"""


def test_a_worker_that_hangs_ends_itself_when_its_parent_was_killed(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(textwrap.dedent(HANGING).format(file=str(textworld_env._WORKER_FILE)))
    script = textwrap.dedent(
        f"""
        import os, signal, threading
        from pathlib import Path
        from verl.agentopsd.envs.alfworld import textworld_env as t
        t._WORKER_FILE, t._check_installed, t.OWN_END = Path({str(worker)!r}), lambda: None, 0.5
        pool = t.WorkerPool(1, step_timeout=3)
        env = t.TextWorldEnv("game", pool)
        env.reset()
        print(*pool.pids, flush=True)
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        env.step("hang")
        """
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=120)
    (pid,) = map(int, done.stdout.split())
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        assert gone(pid)
    finally:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_missing_engine_is_one_sentence_with_the_remedy(monkeypatch):
    monkeypatch.setattr(textworld_env, "_REQUIRED_MODULES", ("textworld", "no_such_engine"))
    with pytest.raises(RuntimeError, match=r"needs no_such_engine: .*install.sh --textworld.*env.backend=exact"):
        WorkerPool()


def test_no_workers_are_refused(stand_in):
    with pytest.raises(ValueError, match="env.workers=0"):
        WorkerPool(workers=0)


@pytest.mark.parity
def test_the_real_engine_as_a_backend(alfworld_data):
    config = {
        "name": "alfworld",
        "data_dir": str(alfworld_data),
        "workers": 1,
        "reset_timeout": 120,
        "step_timeout": 60,
    }
    exact, real = (make_family({**config, "backend": backend}) for backend in ("exact", "textworld"))
    task = min(exact.tasks("valid_seen"), key=lambda task: Path(task.path).stat().st_size)
    mine, theirs = exact.make(task), real.make(task)
    assert mine.reset() == theirs.reset()
    for command in ("help", "fly away", mine.game.walkthrough[0]):
        assert mine.step(command) == theirs.step(command)
    theirs.close()


@pytest.mark.parity
def test_the_real_engine_reports_a_broken_game_and_goes_on(alfworld_data, tmp_path, small_game_data):
    pool = WorkerPool(workers=1, reset_timeout=120)
    broken, sound = tmp_path / "broken.tw-pddl", tmp_path / "sound.tw-pddl"
    broken.write_text(json.dumps({**small_game_data(), "pddl_problem": "(define (problem x) (:domain alfred"}))
    sound.write_text(json.dumps(small_game_data()))
    try:
        with pytest.raises(EnvironmentFault, match="broken.tw-pddl"):
            TextWorldEnv(str(broken), pool).reset()
        (pid,) = pool.pids
        assert "kettle in the sink" in TextWorldEnv(str(sound), pool).reset().text
        assert pool.pids == [pid]
    finally:
        pool.close()


def test_a_worker_that_holds_too_much_memory_is_replaced_but_finishes_its_episodes(make_pool):
    pool = make_pool(memory_mb=0)
    first = TextWorldEnv("game", pool)
    first.reset()
    (old,) = pool.pids
    second = TextWorldEnv("game", pool)
    second.reset()
    assert len(pool.pids) == 2
    assert first.step("add").text == "1"
    first.close()
    assert gone(old)
    assert second.step("add").text == "1"
