"""docs/cluster.md: every command in it is run here, dry, or by the tests that are named here."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl.agentopsd.doctor import __main__ as doctor
from verl.agentopsd.doctor import resources, versions
from verl.agentopsd.main import config_group
from verl.agentopsd.main import main as run

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^ *```bash\n(.*?)^ *```", TEXT, re.DOTALL | re.MULTILINE)
LINES = [line.strip() for block in BLOCKS for line in re.sub(r"\\\n *", "", block).splitlines()]
COMMANDS = list(dict.fromkeys(line for line in LINES if line))

ELSEWHERE = {
    # command: the test that executes it
    "bash scripts/install.sh": "test_scripts.py",
    "source .venv/bin/activate": "test_scripts.py",
    "python scripts/get_alfworld_data.py": "envs/alfworld/test_get_data.py",
    "ray get-auth-token": "e2e/test_cluster.py",
    "ray start": "e2e/test_cluster.py",
    "ray status": "e2e/test_cluster.py",
    "bash examples/ray_submit.sh": "e2e/test_cluster.py",
    "sbatch": "test_examples.py",
    # no Docker where the tests run: test_examples.py looks at what the image copies and installs
    "docker": "test_examples.py",
}


def test_the_page_has_commands():
    assert len(COMMANDS) > 20


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, alfworld_data: Path, tmp_path: Path):
    """A machine without GPUs and without a cluster; variables that the page sets."""
    monkeypatch.setenv("ALFWORLD_DATA", str(alfworld_data))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(resources, "gpus", lambda: [])
    monkeypatch.setattr(resources, "_network", lambda nodes: resources.ok("network", "not looked at"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("command", [line for line in COMMANDS if "verl.agentopsd.doctor" in line])
def test_the_doctors_commands(command: str, here, capsys):
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "verl.agentopsd.doctor"]
    assert doctor.main(words[3:]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [line for line in COMMANDS if "alfworld_agentopsd.sh" in line and "docker" not in line]
)
def test_the_examples_commands(command: str, here, capsys, tmp_path: Path, monkeypatch):
    """As on a GPU node, up to the start: the script's own part is tested in test_examples.py."""
    words = [word for word in shlex.split(command)[2:] if word != "--dry-run" and not word.startswith("run_dir=")]
    if not any(word.startswith("model=") for word in words):
        words.append("model=qwen2.5_3b")
    assert run(["--dry-run", "device=gpu", f"run_dir={tmp_path}", *words]) == 0, capsys.readouterr().err
    assert "seconds per update" in capsys.readouterr().out


@pytest.mark.parametrize("command", [line for line in COMMANDS if "ray_submit.sh" in line])
def test_the_jobs_commands(command: str, capsys):
    from verl.agentopsd import submit

    overrides = [word for word in shlex.split(command)[2:] if word != "--dry-run"]
    assert submit.main(["--root", str(ROOT), "--address", "http://x", "--dry-run", "1", "--", *overrides]) == 0
    assert "verl.agentopsd.main" in capsys.readouterr().out


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith(("ray ", "hf "))])
def test_options_of_other_programs_exist(command: str):
    words = shlex.split(command)
    program = Path(sys.executable).parent / words[0]
    help_text = subprocess.run(
        [program, words[1], "--help"], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    for word in words[2:]:
        if word.startswith("--"):
            assert word.split("=")[0] in help_text, word


def test_every_other_command_is_executed_by_a_named_test():
    here = ("python -m verl.agentopsd.doctor", "bash examples/alfworld_agentopsd.sh", "hf ", "export ")
    for command in COMMANDS:
        if command.startswith(here):
            continue
        known = [test for start, test in ELSEWHERE.items() if command.startswith(start)]
        assert known, f"nothing executes {command!r}"
        assert (ROOT / "tests" / known[0]).is_file()


def test_a_container_keeps_the_run_and_the_models_on_the_host():
    (command,) = [line for line in COMMANDS if line.startswith("docker run")]
    words = shlex.split(command)
    mounted = {words[at + 1].split(":")[1] for at, word in enumerate(words) if word == "-v"}
    assert "/root/.cache/huggingface" in mounted, "where the image's user keeps what the Hub gave"
    assert words[words.index("-e") + 1].removeprefix("ALFWORLD_DATA=") in mounted
    (run_dir,) = [word.removeprefix("run_dir=") for word in words if word.startswith("run_dir=")]
    assert str(Path(run_dir).parent) in mounted


def test_shell_lines_are_shell():
    bash = shutil.which("bash")
    assert bash
    for block in BLOCKS:
        subprocess.run([bash, "-n"], input=block, text=True, check=True)


def test_the_table_of_presets_and_versions_is_the_code_s():
    for preset in config_group("model"):
        assert f"| `{preset}` |" in TEXT, preset
    for device in versions.TESTED.values():
        for expected in device.values():
            assert expected in TEXT
