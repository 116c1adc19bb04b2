"""Gets ALFWorld's text games (json_2.1.1): 3553 train, 140 valid_seen, 134 valid_unseen games.

    python scripts/get_alfworld_data.py                                    # downloads with `alfworld-download`
    python scripts/get_alfworld_data.py --archive FILE [--sha256 HEX]      # unpacks a .tar.* or .zip you have

The games go to --out (default: $ALFWORLD_DATA, else ~/.cache/alfworld) as OUT/json_2.1.1/<split>/. Unpacking writes
beside OUT/json_2.1.1 and moves it into place when its games have been counted; run again, it finds them and stops.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO

from verl.agentopsd.envs.alfworld.game import GameFileError
from verl.agentopsd.envs.alfworld.games import EXPECTED, GamesNotFound, discover

DATA_FOLDER = "json_2.1.1"
OFFICIAL_SPLITS = ("train", "valid_seen", "valid_unseen")
DEFAULT_OUT = os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld"


class DataError(RuntimeError):
    """The data could not be put in place; the message is one sentence with the remedy."""


def unpack(archive: Path, out: Path, *, sha256: str | None = None, overwrite: bool = False) -> dict[str, int]:
    """Unpacks ``archive`` to ``out/json_2.1.1``; returns the number of games per split.

    Only regular files below a ``json_2.1.1`` folder of the archive are written, and only inside ``out``.

    Raises:
        DataError: no such archive, wrong checksum, not an archive, an unsafe path in it, games missing, no space, or
            other data in the way.
    """
    present = count_games(out)
    if is_complete(present) and not overwrite:
        return present
    target = out / DATA_FOLDER
    if target.exists() and not overwrite:
        raise DataError(f"{target} is there but incomplete ({_counts_text(present)}); add --overwrite to replace it")
    if not archive.is_file():
        raise DataError(f"--archive {archive}: no such file")
    if sha256 is not None:
        _check_sum(archive, sha256)

    draft = out / f".{DATA_FOLDER}.{os.getpid()}.partial"
    try:
        draft.mkdir(parents=True)
        for name, content in _members(archive):
            file = draft / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with open(file, "wb") as handle:
                shutil.copyfileobj(content, handle)
        counts = count_games(draft)
        if not is_complete(counts):
            raise DataError(f"{archive} lacks games: {_counts_text(counts)}; expected {_counts_text(EXPECTED)}")
        if target.exists():
            shutil.rmtree(target)
        (draft / DATA_FOLDER).rename(target)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{archive} is damaged or not a .tar.* or .zip archive ({error})") from error
    except OSError as error:
        raise DataError(f"cannot unpack to {out}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return counts


def download(out: Path) -> dict[str, int]:
    """Runs ALFWorld's own downloader; returns the number of games per split.

    Raises:
        DataError: the downloader is missing or fails, or the games are not complete afterwards.
    """
    present = count_games(out)
    if is_complete(present):
        return present
    program = shutil.which("alfworld-download", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        raise DataError(
            "alfworld-download is not installed: run `pip install --no-deps alfworld==0.4.2`, "
            "or give an archive of the games with --archive FILE"
        )
    out.mkdir(parents=True, exist_ok=True)
    if subprocess.run([program, "--data-dir", str(out)]).returncode != 0:
        raise DataError(
            "alfworld-download failed (see above); it needs access to github.com, without which you can copy the games "
            "from another machine and give the archive with --archive FILE"
        )
    counts = count_games(out)
    if not is_complete(counts):
        raise DataError(f"alfworld-download left an incomplete set in {out}: {_counts_text(counts)}; run this again")
    return counts


def count_games(out: Path) -> dict[str, int]:
    """Playable games per split below ``out/json_2.1.1``; splits without any are absent."""
    counts = {}
    for split in EXPECTED:
        try:
            counts[split] = len(discover(out, split, check_counts=False))
        except (GamesNotFound, GameFileError):
            continue
    return counts


def is_complete(counts: dict[str, int]) -> bool:
    """The official splits have all their games; ``valid_train`` may be absent."""
    return all(counts.get(split) == EXPECTED[split] for split in OFFICIAL_SPLITS)


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{split} {counts.get(split, 0)}" for split in OFFICIAL_SPLITS)


def _check_sum(archive: Path, expected: str) -> None:
    with open(archive, "rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != expected.strip().lower():
        raise DataError(f"{archive} has sha256 {found}, not {expected}: it is damaged or another file; fetch it again")


def _members(archive: Path) -> Iterator[tuple[PurePosixPath, IO[bytes]]]:
    """The regular files below ``json_2.1.1``, by their path from there on."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                name = _inside(info.filename)
                if name is not None and not info.is_dir():
                    with packed.open(info) as content:
                        yield name, content
    else:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = _inside(member.name)
                unpacked = tar.extractfile(member) if member.isreg() and name is not None else None
                if name is not None and unpacked is not None:
                    yield name, unpacked


def _inside(name: str) -> PurePosixPath | None:
    """``a/json_2.1.1/b`` -> ``json_2.1.1/b``; None for what lies elsewhere.

    Raises:
        DataError: the path tries to leave the folder.
    """
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts:
        raise DataError(f"the archive holds an unsafe path ({name!r}); nothing was unpacked")
    if DATA_FOLDER not in path.parts[:-1]:
        return None
    return PurePosixPath(*path.parts[path.parts.index(DATA_FOLDER) :])


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=Path, metavar="FILE", help="unpack this instead of downloading")
    parser.add_argument("--sha256", metavar="HEX", help="refuse the archive unless this is its checksum")
    parser.add_argument("--out", type=Path, default=Path(DEFAULT_OUT), metavar="DIR", help=f"default {DEFAULT_OUT}")
    parser.add_argument("--overwrite", action="store_true", help="replace games that are there already")
    options = parser.parse_args(arguments)
    out = options.out.expanduser().absolute()
    try:
        if options.archive is None:
            counts = download(out)
        else:
            counts = unpack(options.archive.expanduser(), out, sha256=options.sha256, overwrite=options.overwrite)
    except DataError as error:
        print(f"get_alfworld_data: {error}", file=sys.stderr)
        return 1
    print(f"{_counts_text(counts)} games in {out / DATA_FOLDER}; use them with: export ALFWORLD_DATA={out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
