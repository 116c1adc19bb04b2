"""Forks of a process that has imported everything behave like the Python processes that they stand for."""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl.agentopsd.main import compose_config
from verl.agentopsd.platform.forked import preload
from verl.agentopsd.platform.forked.preload import Preloaded, PreloadError

MARK = "this_process_is_a_fork"


ACTOR = "an_actor_s_class"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Preloaded]:
    """A server that has imported a module of the test's, so that a fork can be told from a new process."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / f"{MARK}.py").write_text("print('imported')\n")
    (folder / f"{ACTOR}.py").write_text("import ray\n\n@ray.remote\nclass Actor:\n    pass\n")
    preloaded = Preloaded([MARK, "ray", ACTOR, "numpy", "torch"], {"PYTHONPATH": str(folder)})
    try:
        preloaded.wait(120)
        yield preloaded
    finally:
        preloaded.close()


def python(server: Preloaded, code: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [server.python, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, timeout=60, **options
    )


def test_code_arguments_output_and_exit_code(server: Preloaded, tmp_path: Path):
    code = f"""
    import os, sys
    print({MARK!r} in sys.modules, sys.argv, os.getcwd(), os.environ["COLOUR"], "RAY_RAYLET_PID" in os.environ)
    print(sys.stdin.read(), file=sys.stderr)
    sys.exit(7)
    """
    done = python(
        server, code, "a b", "ä", input="words", cwd=tmp_path, env={"COLOUR": "blå", "PATH": os.environ["PATH"]}
    )
    assert done.returncode == 7
    assert done.stdout == f"True ['-c', 'a b', 'ä'] {tmp_path} blå False\n"
    assert done.stderr == "words\n"


def test_forks_draw_different_ids_of_ray_s(server: Preloaded):
    """Equal ids of two workers' calls end the process that gets both (a check within Ray: ``erased == 1``)."""
    code = """
    import threading
    import ray
    def draw(): print(ray.TaskID.for_fake_task(ray.JobID.from_int(1)).hex(), ray.ObjectRef.from_random().hex())
    draw()
    other = threading.Thread(target=draw); other.start(); other.join()
    """
    drawn = [word for _ in range(3) for word in python(server, code).stdout.split()]
    assert len(drawn) == len(set(drawn)) == 12


def test_a_script_is_main_and_finds_its_neighbours(server: Preloaded, tmp_path: Path):
    (tmp_path / "neighbour.py").write_text("NAME = 'next door'\n")
    script = tmp_path / "script.py"
    script.write_text("import neighbour, sys\nprint(__name__, __file__, neighbour.NAME, sys.argv[1:])\n")
    done = subprocess.run([server.python, "-u", str(script), "x"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"__main__ {script} next door ['x']\n", done.stderr


def test_an_exception_is_printed_and_exit_handlers_run(server: Preloaded):
    done = python(server, "import atexit; atexit.register(print, 'cleaned up'); 1 / 0")
    assert done.returncode == 1 and done.stdout == "cleaned up\n" and "ZeroDivisionError" in done.stderr
    assert python(server, "import sys; sys.exit('one sentence')").stderr == "one sentence\n"


def test_inherited_files_keep_their_numbers(server: Preloaded):
    pipes = [os.pipe() for _ in range(3)]
    numbers = [write for _, write in pipes]
    code = "import os, sys\nfor n in sys.argv[1:]: os.write(int(n), n.encode())"
    assert python(server, code, *map(str, numbers), pass_fds=numbers).returncode == 0
    for read, write in pipes:
        os.close(write)
        assert os.read(read, 100) == str(write).encode()
        assert os.read(read, 100) == b"", "nobody else holds the other end"
        os.close(read)


def test_forks_draw_different_random_numbers(server: Preloaded):
    code = """
    import sys
    assert {"numpy", "torch"} <= set(sys.modules), "the server has imported them"
    import multiprocessing, random, numpy, torch
    print(random.random(), numpy.random.rand(), torch.rand(1).item(), multiprocessing.current_process().authkey.hex())
    """
    first, second = (python(server, code).stdout.split() for _ in range(2))
    assert len(first) == 4 and all(a != b for a, b in zip(first, second, strict=True))


def test_what_a_process_inherits_is_the_launcher_s(server: Preloaded):
    code = """
    import json, os, resource, signal
    blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    score = int(open("/proc/self/oom_score_adj").read())
    print(json.dumps([resource.getrlimit(resource.RLIMIT_NOFILE), os.umask(0), os.nice(0), score, blocked]))
    print(os.getpgid(0) == os.getpid())
    """

    def before() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (333, 444))
        os.umask(0o27)
        os.nice(3)
        Path("/proc/self/oom_score_adj").write_text("500")
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])

    lines = python(server, code, preexec_fn=before).stdout.splitlines()
    assert json.loads(lines[0]) == [[333, 444], 0o27, min(os.nice(0) + 3, 19), 500, [int(signal.SIGUSR1)]]
    assert lines[1] == "True", "a kill of its process group meets nobody else"


def test_a_pipe_that_the_fork_closes_is_closed(server: Preloaded):
    read, write = os.pipe()
    code = f"import os, sys; os.close({write}); sys.stdin.read()"
    process = subprocess.Popen([server.python, "-c", code], stdin=subprocess.PIPE, pass_fds=[write])
    os.close(write)
    assert os.read(read, 1) == b"", "the launcher holds it no longer"
    assert process.poll() is None and process.stdin is not None
    process.stdin.close()
    assert process.wait(30) == 0
    os.close(read)


def test_a_module_runs_and_no_arguments_are_an_error(server: Preloaded, tmp_path: Path):
    (tmp_path / "played.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    done = subprocess.run(
        [server.python, "-m", "played", "x"], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout == "__main__ ['x']\n", done.stderr
    assert subprocess.run([server.python], capture_output=True, timeout=60).returncode == 2


def test_a_bad_or_silent_client_harms_nobody(server: Preloaded):
    """It is given up after a few seconds; the files that came with a bad request are closed."""
    address = str(server.python.parent / "socket")
    read, write = os.pipe()
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as bad:
        silent.connect(address)
        bad.connect(address)
        socket.send_fds(bad, [(3).to_bytes(4, "big") + b"{{{"], [write])
        os.close(write)
        assert python(server, "print('served')").stdout == "served\n"
        assert os.read(read, 1) == b""
    os.close(read)


def test_forks_leave_no_descriptor_in_the_server(server: Preloaded):
    files = Path(f"/proc/{server.process.pid}/fd")
    python(server, "pass")
    before = len(list(files.iterdir()))
    for _ in range(20):
        python(server, "pass")
    deadline = time.monotonic() + 10  # a launcher ends a moment before the server has closed what belonged to it
    while len(list(files.iterdir())) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(list(files.iterdir())) <= before


@pytest.mark.parametrize("module", ["ray._raylet", "setproctitle"])
def test_a_fork_can_set_its_title(server: Preloaded, module: str):
    """Processes are found by it: stacks of a stalled run, kills in tests, ps."""
    launcher, fork = running(
        server, f"import {module} as m\nm.setproctitle('Player::one')\nprint(1, flush=True)\n{WAIT}"
    )
    assert launcher.stdout is not None and launcher.stdout.readline() == "1\n"
    assert fork.name() == "Player::one" and fork.cmdline()[0] == "Player::one"
    launcher.kill()
    launcher.wait(30)


def test_multiprocessing_in_a_fork_forks_as_well(server: Preloaded, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import multiprocessing, sys\n"
        f"def work(pipe): pipe.send({MARK!r} in sys.modules)\n"
        f"if __name__ == '__main__':\n"
        f"    context = multiprocessing.get_context('spawn')\n"
        f"    ours, theirs = context.Pipe()\n"
        f"    child = context.Process(target=work, args=(theirs,))\n"
        f"    child.start(); print(ours.recv()); child.join(); print(child.exitcode)\n"
    )
    done = subprocess.run([server.python, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n0\n", done.stderr


def running(server: Preloaded, code: str) -> tuple[subprocess.Popen[str], psutil.Process]:
    """The launcher and its fork, which prints its id first."""
    text = "import os, signal, sys, time\nprint(os.getpid(), flush=True)\n" + textwrap.dedent(code)
    launcher = subprocess.Popen([server.python, "-c", text], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    return launcher, psutil.Process(int(launcher.stdout.readline()))


WAIT = "time.sleep(600)"


def test_sigterm_reaches_the_fork_and_its_answer_comes_back(server: Preloaded):
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\nprint('set', flush=True)\n" + WAIT
    launcher, fork = running(server, code)
    assert launcher.stdout is not None and launcher.stdout.readline() == "set\n"
    launcher.terminate()
    assert launcher.wait(30) == 5 and not fork.is_running()


def test_a_killed_launcher_takes_its_fork_along(server: Preloaded):
    launcher, fork = running(server, WAIT)
    launcher.kill()
    launcher.wait(30)
    fork.wait(30)


def test_a_killed_fork_ends_its_launcher(server: Preloaded):
    launcher, fork = running(server, WAIT)
    fork.kill()
    assert launcher.wait(30) == -signal.SIGKILL, "like the process that it stands for"


def test_the_terminals_ctrl_c_is_not_for_forks(server: Preloaded):
    _, fork = running(server, WAIT)
    assert os.getsid(fork.pid) == os.getsid(server.process.pid) != os.getsid(0)
    fork.kill()


def test_another_ray_job_than_the_one_it_was_made_for_is_an_error(server: Preloaded):
    done = python(server, "print('never')", env={**os.environ, "RAY_JOB_ID": "02000000"})
    assert done.returncode == 1 and done.stdout == ""
    assert "made for Ray's job 01000000, not for 02000000" in done.stderr


def test_everything_ends_with_the_process_that_started_it(tmp_path: Path):
    """Killed, it can tidy nothing up itself."""
    code = f"""
    import subprocess, sys, time
    from verl.agentopsd.platform.forked.preload import Preloaded
    server = Preloaded(["json"])
    server.wait(120)
    fork = subprocess.Popen([server.python, "-c", "import os, time; print(os.getpid(), flush=True); {WAIT}"])
    print(server.process.pid, server.python.parent, flush=True)
    time.sleep(600)
    """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    lines = sorted([owner.stdout.readline().split(), owner.stdout.readline().split()], key=len)
    processes, folder = [psutil.Process(int(line[0])) for line in lines], Path(lines[1][1])
    assert folder.is_dir()
    owner.kill()
    owner.wait(30)
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    deadline = time.monotonic() + 30
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
            "2 threads run",
        ),
        ("raise ImportError('no such luck')", "ImportError: no such luck"),
        ("import ray; ray.ObjectRef.from_random()", "has drawn one of Ray's random ids"),
    ],
)
def test_a_server_that_cannot_serve_says_why(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "spoilt.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    preloaded = Preloaded(["spoilt"])
    with pytest.raises(PreloadError, match=rf"has ended: .*{message}.*hardware\.forked_workers=false"):
        preloaded.wait(120)
    preloaded.close()


def test_a_server_that_is_late_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    preloaded = Preloaded(["json"])
    with pytest.raises(PreloadError, match="is not ready after 0 s"):
        preloaded.wait(0.01)
    preloaded.close()
    assert not preloaded.python.exists()


@pytest.mark.parametrize("folder", ["with space", "long" * 30])
def test_a_folder_that_does_not_do_is_one_sentence(
    folder: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    temporary = tmp_path_factory.mktemp("t") / folder  # a socket's path has at most 107 characters
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    if folder.startswith("long"):
        with pytest.raises(PreloadError, match=r"AF_UNIX path too long\): set TMPDIR.*forked_workers=false"):
            Preloaded(["json"])
        assert list(temporary.iterdir()) == []
        return
    preloaded = Preloaded(["json"])
    try:
        preloaded.wait(120)
        done = subprocess.run(["bash", "-c", f"exec {shlex.quote(str(preloaded.python))} -c 'print(1)'"], timeout=60)
        assert done.returncode == 0
    finally:
        preloaded.close()


TINY = ["model=tiny", "device=cpu"]


@pytest.mark.parametrize(
    ("overrides", "address", "expected"),
    [
        ([], "", True),
        (["hardware.forked_workers=false"], "", False),
        ([], "10.0.0.1:6379", False),
        (["+ray_kwargs.ray_init.runtime_env.pip=[numpy]"], "", False),
        (["+ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH=/x"], "", False),
        (["+ray_kwargs.ray_init.runtime_env.env_vars.COLOUR=red"], "", True),
        (["device=gpu"], "", False),
    ],
)
def test_where_workers_are_forks(overrides: list[str], address: str, expected: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert preload.forks(compose_config([*TINY, *overrides])) is expected


def test_there_is_one_server_within_the_body_and_none_after(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(preload, "MODULES", ("json",))
    made = []
    monkeypatch.setattr(preload, "Preloaded", lambda variables: made.append(variables) or Closing())
    own = "+ray_kwargs.ray_init.runtime_env.env_vars.COLOUR=red"
    config = compose_config([*TINY, own])
    with preload.preloading(config, {"HF_HUB_OFFLINE": "1"}):
        server = preload.current()
        assert isinstance(server, Closing)
        with preload.preloading(config, {}):
            assert preload.current() is server
        assert preload.current() is server and not server.closed
    assert made == [{"HF_HUB_OFFLINE": "1", "COLOUR": "red"}]
    assert preload.current() is None and server.closed


class Closing:
    closed = False

    def close(self) -> None:
        self.closed = True
