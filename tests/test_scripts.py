"""The scripts refuse bad input with one clear sentence, and do cheaply what was done before."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINUX_TOOLS = "awk bash cat cp cut df dirname du env flock grep ls mkdir rm sed sha256sum sleep tail touch uname"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the installer reads, without the rest of the repository."""
    target = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", target / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "requirements", target / "requirements")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, target / name)
    return target


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH folder with the ordinary tools only: no python, no compiler, no nvidia-smi. Fakes are added to it."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in LINUX_TOOLS.split():
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    return folder


def fake(folder: Path, name: str, script: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(f"#!{shutil.which('bash')}\n{script}\n")
    (folder / name).chmod(0o755)


def environment(tools: Path, **extra: str) -> dict[str, str]:
    return {"PATH": str(tools), "HOME": str(tools.parent), **extra}


def install(checkout: Path, tools: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(checkout / "scripts" / "install.sh"), *arguments],
        env=environment(tools, **extra), capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def one_error(done: subprocess.CompletedProcess[str]) -> str:
    """The error message of a refused call, after checking that it is one sentence and came without a trace."""
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if " error: " in line]
    assert len(errors) == 1 and "line " not in errors[0], done.stderr
    return errors[0]


# A python that pretends: version from the file name, `-m venv` makes a stub environment, `-m pip` logs its arguments.
STUB = r"""
case "$*" in
  *"sys.exit(not (3, 11)"*) exit %(unfit)d ;;
  -V) echo "Python %(version)s" ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip install"*)
    echo "$*" >> "$STUB_LOG"
    [[ "$*" != *"${STUB_FAIL:-never}"* ]] || { echo "${STUB_SAYS:-}"; exit 1; }
    [[ "$*" != *"${STUB_HANG:-never}"* ]] || sleep 60 ;;
  *) exit 0 ;;
esac
"""


def stub_python(tools: Path, name: str = "python3.11", version: str = "3.11.9", fit: bool = True) -> None:
    fake(tools, name, STUB % {"version": version, "unfit": 0 if fit else 1})


def pip_calls(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("script", ["install.sh", "test.sh"])
def test_help_names_every_option(script: str) -> None:
    done = subprocess.run(["bash", ROOT / "scripts" / script, "--help"], capture_output=True, text=True, check=True)
    offered = {
        word
        for line in (ROOT / "scripts" / script).read_text().splitlines()
        if line.strip().startswith("--") and ")" in line and "$" not in line
        for word in line.split(")")[0].replace("|", " ").split()
    }
    assert offered and all(option in done.stdout for option in offered)


def test_unknown_option(checkout: Path, tools: Path) -> None:
    message = one_error(install(checkout, tools, "--bogus"))
    assert "'--bogus'" in message and "--help" in message


def test_flash_attn_without_gpu(checkout: Path, tools: Path) -> None:
    assert "--gpu" in one_error(install(checkout, tools, "--cpu", "--flash-attn"))


def test_no_fitting_python(checkout: Path, tools: Path) -> None:
    stub_python(tools, "python3", "3.9.2", fit=False)
    message = one_error(install(checkout, tools))
    assert "Python 3.11 or 3.12" in message and "Python 3.9.2" in message and "apt-get install python3.11" in message


def test_named_python_does_not_fit(checkout: Path, tools: Path) -> None:
    stub_python(tools, "python3.13", "3.13.0", fit=False)
    assert "Python 3.13.0" in one_error(install(checkout, tools, AGENTOPSD_PYTHON="python3.13"))
    assert "does not exist" in one_error(install(checkout, tools, AGENTOPSD_PYTHON="python9"))


def test_no_space(checkout: Path, tools: Path, tmp_path: Path) -> None:
    stub_python(tools)
    fake(tools, "df", 'echo "Filesystem 1024-blocks Used Available Capacity Mounted"; echo "/dev/x 9 9 1024000 99% /"')
    message = one_error(install(checkout, tools, STUB_LOG=str(tmp_path / "pip.log")))
    assert "4999 MB" in message and "1000 MB are free" in message and "AGENTOPSD_VENV" in message
    assert not pip_calls(tmp_path / "pip.log")


def test_folder_that_is_no_environment(checkout: Path, tools: Path, tmp_path: Path) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "draft.tex").write_text("")
    message = one_error(install(checkout, tools, AGENTOPSD_VENV=str(tmp_path / "papers")))
    assert "not a virtual environment" in message and "AGENTOPSD_VENV" in message
    assert [path.name for path in (tmp_path / "papers").iterdir()] == ["draft.tex"]


@pytest.mark.parametrize(
    ("says", "remedy"),
    [
        ("OSError: [Errno 28] No space left on device", "free some space"),
        ("NewConnectionError: Name or service not known", "check the network"),
        ("ERROR: No matching distribution found for ray==2.60.0", "pip config list"),
        ("something new", "read the log"),
    ],
)
def test_failed_pip_names_the_remedy_and_the_log(says: str, remedy: str, checkout: Path, tools: Path, tmp_path) -> None:
    stub_python(tools)
    log = tmp_path / "pip.log"
    done = install(checkout, tools, STUB_LOG=str(log), STUB_FAIL="cpu.lock", STUB_SAYS=says)
    message = one_error(done)
    assert remedy in message and str(checkout / ".venv" / ".agentopsd" / "install.log") in message
    assert says in done.stderr
    assert not (checkout / ".venv" / ".agentopsd" / "set").exists()


def test_second_call_does_nothing(checkout: Path, tools: Path, tmp_path: Path) -> None:
    stub_python(tools)
    log = tmp_path / "pip.log"
    assert install(checkout, tools, STUB_LOG=str(log)).returncode == 0
    first = pip_calls(log)
    assert any("cpu.lock" in call for call in first) and all("--no-deps" in call for call in first)

    begun = time.monotonic()
    again = install(checkout, tools, "--print-python", STUB_LOG=str(log))
    assert time.monotonic() - begun < 2
    assert again.stdout == f"{checkout / '.venv' / 'bin' / 'python'}\n" and again.stderr == ""
    assert pip_calls(log) == first


def test_new_lock_and_new_option_install_only_their_part(checkout: Path, tools: Path, tmp_path: Path) -> None:
    stub_python(tools)
    log = tmp_path / "pip.log"
    assert install(checkout, tools, STUB_LOG=str(log)).returncode == 0
    log.unlink()
    assert install(checkout, tools, "--dev", STUB_LOG=str(log)).returncode == 0
    assert [call.split("-r ")[-1] for call in pip_calls(log)] == [str(checkout / "requirements" / "test.txt")]

    log.unlink()
    with (checkout / "requirements" / "cpu.lock").open("a") as lock:
        lock.write("zzz==1.0\n")
    assert install(checkout, tools, "--dev", STUB_LOG=str(log)).returncode == 0
    assert any("cpu.lock" in call for call in pip_calls(log)) and not any("test.txt" in call for call in pip_calls(log))


def test_engine_needs_a_compiler(checkout: Path, tools: Path, tmp_path: Path) -> None:
    stub_python(tools)
    message = one_error(install(checkout, tools, "--textworld", STUB_LOG=str(tmp_path / "pip.log")))
    assert "g++" in message and "apt-get install" in message and "env.backend=exact" in message


def test_a_node_without_a_gpu_uses_the_gpu_set_that_it_finds(checkout: Path, tools: Path, tmp_path: Path) -> None:
    stub_python(tools)
    log = tmp_path / "pip.log"
    assert install(checkout, tools, "--gpu", STUB_LOG=str(log)).returncode == 0
    log.unlink()
    assert install(checkout, tools, STUB_LOG=str(log)).returncode == 0
    assert pip_calls(log) == []
    message = one_error(install(checkout, tools, "--cpu", STUB_LOG=str(log)))
    assert "holds the gpu set" in message


def test_other_set_in_the_environment(checkout: Path, tools: Path, tmp_path: Path) -> None:
    stub_python(tools)
    assert install(checkout, tools, "--cpu", STUB_LOG=str(tmp_path / "pip.log")).returncode == 0
    message = one_error(install(checkout, tools, "--gpu", STUB_LOG=str(tmp_path / "pip.log")))
    assert "holds the cpu set" in message and "--cpu" in message and "AGENTOPSD_VENV" in message


def test_gpu_is_detected(checkout: Path, tools: Path, tmp_path: Path) -> None:
    stub_python(tools)
    fake(tools, "nvidia-smi", 'echo "GPU 0: NVIDIA H200 (UUID: GPU-0)"')
    fake(tools, "df", 'echo "Filesystem 1024-blocks Used Available Capacity Mounted"; echo "/dev/x 9 9 99999999 9% /"')
    log = tmp_path / "pip.log"
    assert install(checkout, tools, STUB_LOG=str(log)).returncode == 0
    assert any("gpu.lock" in call for call in pip_calls(log)) and not any("cpu.lock" in call for call in pip_calls(log))


def test_killed_install_is_taken_up_again(checkout: Path, tools: Path, tmp_path: Path) -> None:
    """kill -9 in the middle: no stamp, the running pip keeps the lock, and the next call goes on."""
    stub_python(tools)
    log = tmp_path / "pip.log"
    command = ["bash", str(checkout / "scripts" / "install.sh")]
    hanging = subprocess.Popen(
        command, env=environment(tools, STUB_LOG=str(log), STUB_HANG="cpu.lock"), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while not any("cpu.lock" in call for call in pip_calls(log)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    hanging.kill()
    hanging.wait()
    state = checkout / ".venv" / ".agentopsd"
    assert (state / "unfinished").exists() and not (state / "set").exists()

    waiting = subprocess.Popen(command, env=environment(tools, STUB_LOG=str(log)), stderr=subprocess.PIPE, text=True)
    assert waiting.stderr is not None and "waiting" in waiting.stderr.readline()
    before = pip_calls(log)
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(timeout=2)
    assert pip_calls(log) == before
    kill_holders(state / "lock", spare=waiting.pid)
    _, messages = waiting.communicate(timeout=60)
    assert waiting.returncode == 0 and "interrupted; going on" in messages
    assert (state / "set").exists() and not (state / "unfinished").exists()


def kill_holders(lock: Path, spare: int) -> None:
    """Kills the processes that a killed installer left behind with ``lock`` open; spares one and its children."""
    killed = 0
    for entry in Path("/proc").iterdir():
        try:
            if str(lock) not in [os.readlink(fd) for fd in (entry / "fd").iterdir()]:
                continue
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, ValueError):
            continue
        if spare not in (int(entry.name), parent):
            os.kill(int(entry.name), signal.SIGKILL)
            killed += 1
    assert killed


def test_interrupt_stops_pip_and_says_so(checkout: Path, tools: Path, tmp_path: Path) -> None:
    stub_python(tools)
    log = tmp_path / "pip.log"
    running = subprocess.Popen(
        ["bash", str(checkout / "scripts" / "install.sh")],
        env=environment(tools, STUB_LOG=str(log), STUB_HANG="cpu.lock"), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not any("cpu.lock" in call for call in pip_calls(log)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    _, messages = running.communicate(timeout=20)
    assert running.returncode == 130 and "call it again" in messages


def test_incomplete_packages_are_dropped(tmp_path: Path) -> None:
    """A package whose INSTALLER is missing was cut off while being unpacked; it must not count as installed."""
    site = tmp_path / "site"
    for name, complete in (("good-1.0.dist-info", True), ("cut-1.0.dist-info", False), ("~ug-1.0.dist-info", True)):
        (site / name).mkdir(parents=True)
        (site / name / "METADATA").write_text("")
        if complete:
            (site / name / "INSTALLER").write_text("pip")
    script = (ROOT / "scripts" / "install.sh").read_text()
    body = script.split("repair() {")[1].split("<<'PY'\n")[1].split("\nPY\n")[0]
    body = body.replace("sysconfig.get_path(kind)", repr(str(site)))
    subprocess.run([sys.executable, "-c", body], check=True, capture_output=True)
    assert [path.name for path in site.iterdir()] == ["good-1.0.dist-info"]


def test_shell_scripts_are_clean() -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"  # the pinned one; another version has other opinions
    patterns = ("scripts/*.sh", "examples/*.sh", "examples/*.sbatch", ".ci/run")
    scripts = [path for pattern in patterns for path in ROOT.glob(pattern)]
    done = subprocess.run([shellcheck, "-x", *map(str, scripts)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
