"""Renders a run into one HTML file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from verl.agentopsd.evaluation.run_metrics import RunError
from verl.agentopsd.report.pack import Pack, block, metrics_data
from verl.agentopsd.report.source import read_run
from verl.agentopsd.report.tokens import TokenTexts

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("base.js", "charts.js", "table.js", "episode.js", "main.js")
GENERATOR = "verl.agentopsd.report"
INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ud800-\udfff\ufeff]")


@dataclass(frozen=True)
class Written:
    """The file that was written, what is in it, and what could not be read."""

    path: Path
    episodes: int
    bytes: int
    notes: list[str]


def write_report(
    run_dir: str | Path, out: str | Path | None = None, *, overwrite: bool = False, token_gaps: bool = True
) -> Written:
    """Writes ``RUN_DIR/report.html`` (or ``out``) in one move.

    An earlier report in its place is replaced, for it is derived from the run; any other file needs ``overwrite``.

    Raises:
        RunError: no such run, or ``out`` is a file that is not a report.
    """
    run_dir = Path(run_dir)
    path = Path(out) if out else run_dir / "report.html"
    if path.is_dir():
        raise RunError(f"{path} is a directory: --out takes the name of a file")
    if path.exists() and not overwrite and not is_report(path):
        raise RunError(f"{path} exists and is not a credit report; --overwrite replaces it, --out writes elsewhere")
    html, episodes, notes = render(run_dir, token_gaps=token_gaps)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.part")
    data = html.encode("utf-8", errors="replace")
    unfinished.write_bytes(data)
    unfinished.replace(path)
    return Written(path, episodes, len(data), notes)


def is_report(path: Path) -> bool:
    """The file was written by this module."""
    with path.open("rb") as file:
        return f'<meta name="generator" content="{GENERATOR}">'.encode() in file.read(2048)


def render(run_dir: Path, *, token_gaps: bool = True) -> tuple[str, int, list[str]]:
    """The page, the number of episodes in it and the notes on what could not be read."""
    run = read_run(run_dir)
    tokens = TokenTexts.of_run(run.path, run.model) if token_gaps else None
    pack = Pack(token_gaps=token_gaps, tokens=tokens)
    pack.add_all(run.episodes(), run.notes)
    script = "".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{script}}})();\n'
    data = {"rule": run.rule, "metrics": metrics_data(run.metrics), "table": pack.table()}
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    html = environment.get_template("page.html.jinja").render(
        run=run,
        episodes=len(pack),
        generator=GENERATOR,
        style=Markup((ASSETS / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=block(data),
        details=pack.details,
        gaps=pack.gaps,
    )
    return html, len(pack), run.notes


def _visible(value: Any) -> Any:
    """Control, direction and lone surrogate characters of a text, shown by their number, as the script does."""
    if type(value) is not str:
        return value
    return INVISIBLE.sub(lambda found: f"⟨U+{ord(found.group()):04X}⟩", value)
