"""The package sits inside an unmodified verl, however it is installed, and its pure parts need no more than torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
UPSTREAM_INIT = 'ORIGIN = "upstream"\n'


def run_python(*arguments: str, python: str | Path = sys.executable, cwd: Path | None = None) -> str:
    """Stdout of ``python -I arguments``; its stderr becomes the test's failure message."""
    done = subprocess.run([str(python), "-I", *arguments], capture_output=True, text=True, cwd=cwd, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what packaging reads, so that building leaves nothing behind in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    for name in tracked:
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


def build(source: Path, hook: str, out: Path) -> Path:
    """Runs a PEP 517 hook of setuptools in ``source``; returns the wheel."""
    out.mkdir(parents=True, exist_ok=True)
    code = f"import setuptools.build_meta as backend; print(backend.{hook}({str(out)!r}))"
    return out / run_python("-c", code, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, "build_wheel", tmp_path_factory.mktemp("wheel"))


def environment_with_upstream(folder: Path, wheel: Path) -> Path:
    """An environment that holds a stand-in for upstream's ``verl`` package and ``wheel``; returns its python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run_python("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", python=python))
    (site / "verl" / "utils").mkdir(parents=True)
    (site / "verl" / "__init__.py").write_text(UPSTREAM_INIT)
    (site / "verl" / "utils" / "__init__.py").write_text("")
    pip = ["-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    run_python(*pip)
    return python


PROBE = textwrap.dedent(
    """
    import importlib.metadata, importlib.resources, json, verl, verl.utils, verl.agentopsd, verl.agentopsd.envs.base
    import agentopsd_config
    plugin, = importlib.metadata.entry_points(group="verl.plugins", name="agentopsd")
    print(json.dumps({
        "verl": verl.__file__, "origin": verl.ORIGIN, "ours": verl.agentopsd.__file__, "plugin": plugin.value,
        "config": importlib.resources.files("agentopsd_config").joinpath("agentopsd_trainer.yaml").is_file(),
    }))
    """
)


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_installed_beside_upstream(hook: str, source: Path, tmp_path: Path) -> None:
    python = environment_with_upstream(tmp_path / "env", build(source, hook, tmp_path / "wheel"))
    found = json.loads(run_python("-c", PROBE, python=python, cwd=tmp_path))
    home = source if hook == "build_editable" else tmp_path / "env"
    assert found["origin"] == "upstream" and Path(found["verl"]).is_relative_to(tmp_path / "env")
    assert Path(found["ours"]).is_relative_to(home)
    assert found["plugin"] == "verl.agentopsd.plugin"
    assert found["config"]


def test_this_environment_keeps_upstream_in_charge() -> None:
    import verl

    import verl.agentopsd

    assert Path(verl.__file__).parent != ROOT / "verl"
    assert hasattr(verl, "DataProto")
    assert Path(verl.agentopsd.__file__).parent == ROOT / "verl" / "agentopsd"


def test_no_init_in_our_verl_folder() -> None:
    assert not (ROOT / "verl" / "__init__.py").exists()


def test_wheel_holds_every_data_file_and_no_tests(source: Path, wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = {
        str(path.relative_to(source))
        for top in ("verl", "agentopsd_config")
        for path in (source / top).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == tracked


def test_uninstalled_checkout_is_found_through_conftest(tmp_path: Path) -> None:
    """conftest adds the checkout's folder to the path of an upstream that does not know us."""
    (tmp_path / "site" / "verl").mkdir(parents=True)
    (tmp_path / "site" / "verl" / "__init__.py").write_text(UPSTREAM_INIT)
    code = textwrap.dedent(
        f"""
        import sys
        sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
        sys.path.insert(0, {str(tmp_path / "site")!r})
        import importlib.util
        assert importlib.util.find_spec("verl.agentopsd") is None
        spec = importlib.util.spec_from_file_location("conftest", {str(ROOT / "tests" / "conftest.py")!r})
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        import verl, verl.agentopsd
        print(verl.__file__, verl.agentopsd.__file__, sep="\\n")
        """
    )
    upstream, ours = run_python("-c", code).splitlines()
    assert Path(upstream) == tmp_path / "site" / "verl" / "__init__.py"
    assert Path(ours) == ROOT / "verl" / "agentopsd" / "__init__.py"


TORCH_ONLY = textwrap.dedent(
    """
    import importlib.machinery, sys
    from pathlib import Path

    ALLOWED = set(
        "torch torchgen functorch numpy sympy mpmath networkx jinja2 markupsafe fsspec filelock typing_extensions "
        "packaging setuptools pkg_resources _distutils_hack triton optree yaml psutil".split()
    )

    class TorchOnly:
        '''As if only torch were installed: verl is our folder alone, everything else is missing.'''

        def find_spec(self, name, path=None, target=None):
            top = name.split(".")[0]
            if name == "verl":
                spec = importlib.machinery.ModuleSpec("verl", None, is_package=True)
                spec.submodule_search_locations = [ROOT + "/verl"]
                return spec
            if top != "verl" and top not in sys.stdlib_module_names and top not in ALLOWED and not top.startswith("_"):
                raise ModuleNotFoundError(f"{name} is not installed", name=name)

    sys.meta_path.insert(0, TorchOnly())
    """
)


@pytest.mark.parametrize("module", ["verl.agentopsd.credit", "verl.agentopsd.metrics", "verl.agentopsd.envs.base"])
def test_pure_module_needs_torch_only(module: str) -> None:
    code = f"ROOT = {str(ROOT)!r}\n{TORCH_ONLY}\nimport {module}\nprint('verl.protocol' in sys.modules)"
    assert run_python("-c", code) == "False"


def test_torch_only_probe_does_forbid() -> None:
    with pytest.raises(AssertionError, match="ray is not installed"):
        run_python("-c", f"ROOT = {str(ROOT)!r}\n{TORCH_ONLY}\nimport ray")


def pins(name: str) -> dict[str, list[str]]:
    """Versions pinned for each package of a lock, by normalised name."""
    found: dict[str, list[str]] = {}
    for line in (ROOT / "requirements" / name).read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^;\s]+)(; .+)?", line)
            assert match, f"{name}: not an exact pin: {line!r}"
            found.setdefault(re.sub(r"[-_.]+", "-", match[1]).lower(), []).append(match[2])
    return found


@pytest.mark.parametrize("name", ["cpu.lock", "gpu.lock", "test.txt", "textworld.lock"])
def test_lock_pins_each_package_exactly(name: str) -> None:
    for package, versions in pins(name).items():
        assert len(versions) == 1 or name == "gpu.lock", (package, versions)


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_lock_satisfies_the_needs(name: str) -> None:
    """Every requirement of ``<name>.in`` is pinned in ``<name>.lock`` at a version that it allows."""
    from packaging.requirements import Requirement

    locked = pins(f"{name}.lock")
    for line in (ROOT / "requirements" / f"{name}.in").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            package = re.sub(r"[-_.]+", "-", requirement.name).lower()
            assert all(requirement.specifier.contains(version) for version in locked[package]), line


def test_locks_agree_where_they_overlap() -> None:
    core, gpu, tools, engine = (pins(name) for name in ("cpu.lock", "gpu.lock", "test.txt", "textworld.lock"))
    for upper in (tools, engine):
        for lower in (core, gpu):
            assert {k: upper[k] for k in upper.keys() & lower} == {k: lower[k] for k in upper.keys() & lower}


def test_declared_python_is_what_the_tools_and_the_installer_use() -> None:
    setup = (ROOT / "setup.py").read_text()
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert 'python_requires=">=3.11,<3.13"' in setup
    assert "(3, 11) <= sys.version_info[:2] < (3, 13)" in (ROOT / "scripts" / "install.sh").read_text()
    assert tools["ruff"]["target-version"] == "py311" and tools["mypy"]["python_version"] == "3.11"
