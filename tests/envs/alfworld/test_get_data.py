"""The script that puts the real games in place: safe, atomic, idempotent, and plain about what is wrong."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "get_alfworld_data.py"
COUNTS = {"train": 2, "valid_seen": 1, "valid_unseen": 1}


@pytest.fixture
def script(monkeypatch):
    """The script as a module, made to expect a tiny data set."""
    spec = importlib.util.spec_from_file_location("get_alfworld_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "EXPECTED", COUNTS)
    return module


def game_files(counts=COUNTS) -> dict[str, bytes]:
    return {
        f"json_2.1.1/{split}/pick_and_place_simple-Mug-None-Desk-{number}/trial_T1/game.tw-pddl": b'{"solvable": true}'
        for split, count in counts.items()
        for number in range(count)
    }


def tar_of(path: Path, files: dict[str, bytes], links: dict[str, str] | None = None) -> Path:
    with tarfile.open(path, "w:xz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            tar.addfile(info)
    return path


def run(script, *arguments: object) -> int:
    return script.main([str(argument) for argument in arguments])


def listing(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir())


def test_unpacks_a_tar_archive_and_says_how_to_use_it(script, tmp_path, capsys):
    archive = tar_of(tmp_path / "games.tar.xz", {**game_files(), "README.md": b"not a game"})
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    out = tmp_path / "data"
    assert run(script, "--archive", archive, "--sha256", digest, "--out", out) == 0
    assert listing(out) == sorted(game_files())
    assert f"train 2, valid_seen 1, valid_unseen 1 games in {out / 'json_2.1.1'}" in capsys.readouterr().out


def test_unpacks_a_zip_archive_from_below_another_folder(script, tmp_path):
    archive = tmp_path / "games.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for name, content in game_files().items():
            packed.writestr(f"alfworld/{name}", content)
    assert run(script, "--archive", archive, "--out", tmp_path / "data") == 0
    assert listing(tmp_path / "data") == sorted(game_files())


def test_a_second_run_finds_the_games_and_touches_nothing(script, tmp_path):
    archive, out = tar_of(tmp_path / "games.tar", game_files()), tmp_path / "data"
    run(script, "--archive", archive, "--out", out)
    times = {file: file.stat().st_mtime_ns for file in out.rglob("*")}
    assert run(script, "--archive", tmp_path / "gone.tar", "--out", out) == 0
    assert run(script, "--out", out) == 0
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*")} == times


def test_incomplete_games_in_the_way_need_overwrite(script, tmp_path, capsys):
    archive, out = tar_of(tmp_path / "games.tar", game_files()), tmp_path / "data"
    run(script, "--archive", archive, "--out", out)
    lost = out / sorted(game_files())[0]
    lost.unlink()
    assert run(script, "--archive", archive, "--out", out) == 1
    assert "is there but incomplete (train 1, valid_seen 1, valid_unseen 1); add --overwrite" in capsys.readouterr().err
    assert run(script, "--archive", archive, "--out", out, "--overwrite") == 0
    assert lost.exists()


@pytest.mark.parametrize("name", ["../escaped/json_2.1.1/train/x", "json_2.1.1/../../escaped", "/json_2.1.1/escaped"])
def test_a_path_that_leaves_the_folder_is_refused(script, tmp_path, capsys, name):
    archive = tar_of(tmp_path / "games.tar", {**game_files(), name: b"evil"})
    assert run(script, "--archive", archive, "--out", tmp_path / "in" / "data") == 1
    assert "unsafe path" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*escaped*")) and listing(tmp_path / "in") == []


def test_links_are_not_unpacked(script, tmp_path):
    link = "json_2.1.1/train/link"
    archive = tar_of(tmp_path / "games.tar", game_files(), links={link: "/etc"})
    assert run(script, "--archive", archive, "--out", tmp_path / "data") == 0
    assert not os.path.lexists(tmp_path / "data" / link)


def test_a_wrong_checksum_is_refused_before_anything_is_written(script, tmp_path, capsys):
    archive = tar_of(tmp_path / "games.tar", game_files())
    assert run(script, "--archive", archive, "--sha256", "ab" * 32, "--out", tmp_path / "data") == 1
    assert "has sha256" in capsys.readouterr().err and not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("content", "reason"), [(b"no archive", "is damaged or not a .tar.* or .zip archive"), (None, "no such file")]
)
def test_what_is_no_archive_is_refused(script, tmp_path, capsys, content, reason):
    archive = tmp_path / "games.tar.xz"
    if content is not None:
        archive.write_bytes(content)
    assert run(script, "--archive", archive, "--out", tmp_path / "data") == 1
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["cut", "overwritten"])
def test_a_damaged_archive_leaves_nothing(script, tmp_path, capsys, damage):
    archive = tar_of(tmp_path / "games.tar.xz", {**game_files(), "json_2.1.1/train/noise": os.urandom(100_000)})
    whole = archive.read_bytes()
    archive.write_bytes(whole[:60_000] if damage == "cut" else whole[:30_000] + bytes(1000) + whole[31_000:])
    assert run(script, "--archive", archive, "--out", tmp_path / "data") == 1
    assert "games.tar.xz is damaged" in capsys.readouterr().err
    assert listing(tmp_path / "data") == []


def test_an_archive_without_all_games_is_refused(script, tmp_path, capsys):
    archive = tar_of(tmp_path / "games.tar", game_files({"train": 2, "valid_seen": 1}))
    assert run(script, "--archive", archive, "--out", tmp_path / "data") == 1
    assert "lacks games: train 2, valid_seen 1, valid_unseen 0; expected train 2" in capsys.readouterr().err
    assert listing(tmp_path / "data") == []


def test_a_full_disk_is_one_sentence_and_leaves_nothing(script, tmp_path, capsys, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    archive = tar_of(tmp_path / "games.tar", game_files())
    monkeypatch.setattr(script.shutil, "copyfileobj", full)
    assert run(script, "--archive", archive, "--out", tmp_path / "data") == 1
    assert "cannot unpack to" in (said := capsys.readouterr().err) and "No space left on device" in said
    assert listing(tmp_path / "data") == []


def test_without_an_archive_the_official_downloader_is_called(script, tmp_path, monkeypatch):
    downloader = tmp_path / "bin" / "alfworld-download"
    downloader.parent.mkdir()
    made = "\n".join(f'mkdir -p "$2/{Path(n).parent}"; echo {{}} > "$2/{n}"' for n in game_files())
    downloader.write_text(f'#!/bin/sh\n[ "$1" = --data-dir ] || exit 2\n{made}\n')
    downloader.chmod(0o755)
    monkeypatch.setattr(script.sys, "executable", str(downloader.parent / "python"))
    assert run(script, "--out", tmp_path / "data") == 0
    assert listing(tmp_path / "data") == sorted(game_files())


def test_a_failing_or_missing_downloader_is_explained(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(script, "--out", tmp_path / "data") == 1
    assert "`pip install --no-deps alfworld==0.4.2`, or give an archive" in capsys.readouterr().err
    (tmp_path / "alfworld-download").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "alfworld-download").chmod(0o755)
    assert run(script, "--out", tmp_path / "data") == 1
    assert "alfworld-download failed (see above)" in capsys.readouterr().err
