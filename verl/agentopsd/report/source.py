"""What a report is made of: a run's configuration, metrics and records, read so that damage is noted, not fatal."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.agentopsd.diagnose import diagnose
from verl.agentopsd.evaluation.records import SCHEMA, EpisodeRecord, RecordError
from verl.agentopsd.evaluation.run_metrics import RunError, RunMetrics, read_metrics

RECORD_FOLDERS = ("validation", "rollouts", "evaluation")
"""Folders of a run with ``<step>.jsonl`` files. Validation comes first: it is played before the update of its step."""


@dataclass
class RunSource:
    """A run as its report sees it; ``notes`` says in sentences what could not be read, and grows while reading.

    Attributes:
        facts: label and value of what the head of the page states.
        versions: name and version of the software.
        metrics: ``None`` before the first update.
        warnings: of :func:`verl.agentopsd.diagnose.diagnose`.
        rule: ``lambda``, ``bound`` and ``gamma`` of the credit rule where the configuration has them.
    """

    path: Path
    name: str
    facts: list[tuple[str, str]]
    versions: list[tuple[str, str]]
    metrics: RunMetrics | None
    warnings: list[str]
    files: list[Path]
    rule: dict[str, float]
    model: str | None
    notes: list[str] = field(default_factory=list)

    def episodes(self) -> Iterator[EpisodeRecord]:
        """All episodes, file after file; a line that cannot be read is left out with a note."""
        for file in self.files:
            yield from read_episodes(file, self.notes, file.relative_to(self.path))


def read_run(run_dir: str | Path) -> RunSource:
    """Reads everything but the episodes.

    Raises:
        RunError: no such directory, or one without any file of a run.
    """
    path = Path(run_dir)
    if not path.is_dir():
        raise RunError(f"{path} is not a directory: give the directory of a run, which holds metrics.jsonl")
    files = record_files(path)
    if not files and not (path / "metrics.jsonl").exists() and not (path / "config.yaml").exists():
        raise RunError(f"{path} holds no metrics.jsonl, config.yaml or records: give the directory of a run")
    notes: list[str] = []
    config = _config(path / "config.yaml", notes)
    metrics: RunMetrics | None = None
    with _warnings_into(notes, path):
        try:
            metrics = read_metrics(path)
        except (RunError, OSError) as error:
            notes.append(f"No training curves: {_relative(str(error), path)}.")
    if not files:
        notes.append("No episodes: the run has not written a record yet (rollouts/, validation/).")
    return RunSource(
        path=path,
        name=path.resolve().name,
        facts=_facts(config, metrics),
        versions=_versions(path / "versions.json", notes),
        metrics=metrics,
        warnings=[str(finding) for finding in diagnose(metrics)] if metrics else [],
        files=files,
        rule={key: value for key in ("lambda", "bound", "gamma") if (value := _number(config, f"agentopsd.{key}"))},
        model=_text(config, "actor_rollout_ref.model.path") or None,
        notes=notes,
    )


def record_files(run_dir: Path) -> list[Path]:
    """The record files of a run in the order of its updates."""
    found = [
        (file.stem.split("-")[0], order, file)  # 000020-with-skill belongs to step 20
        for order, folder in enumerate(RECORD_FOLDERS)
        for file in (run_dir / folder).glob("*.jsonl")
    ]
    return [file for *_, file in sorted(found)]


def read_episodes(file: Path, notes: list[str], name: Path | None = None) -> Iterator[EpisodeRecord]:
    """The readable episodes of a file, one at a time; what is left out is counted in one note with its first reason."""
    left_out, reason = 0, ""
    with file.open("rb") as lines:
        for number, raw in enumerate(lines, 1):
            try:
                episode = _episode(raw)
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                torn = not raw.endswith(b"\n") and isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
                left_out += 1
                what = "torn, its writer stopped in it" if torn else f"not a record ({error})"
                reason = reason or f"line {number} is {what}"
                continue
            if episode is not None:
                yield episode
    if left_out:
        count = "one line was left out" if left_out == 1 else f"{left_out} lines were left out"
        notes.append(f"{name or file}: {count}: {reason}.")


def _episode(raw: bytes) -> EpisodeRecord | None:
    """``None`` for an empty line and for a summary."""
    if not raw.strip():
        return None
    data = json.loads(raw)
    if not isinstance(data, dict):
        raise RecordError("not a JSON object")
    if data.get("schema") != SCHEMA:
        raise RecordError(f"schema {data.get('schema')!r}, this version reads {SCHEMA}")
    if data.get("kind") == "summary":
        return None
    if data.get("kind") != "episode":
        raise RecordError(f"kind {data.get('kind')!r}")
    return EpisodeRecord.from_dict(data)


def _config(file: Path, notes: list[str]) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    if not file.exists():
        notes.append("No config.yaml: model and method are not known.")
        return {}
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        notes.append(f"config.yaml cannot be read: {' '.join(str(error).split())}.")
        return {}
    return config if isinstance(config, dict) else {}


def _versions(file: Path, notes: list[str]) -> list[tuple[str, str]]:
    try:
        versions = json.loads(file.read_bytes()) if file.exists() else {}
        return [(str(name), str(version)) for name, version in versions.items()]
    except (OSError, ValueError, AttributeError) as error:
        notes.append(f"versions.json cannot be read: {error}.")
        return []


def _facts(config: Mapping[str, Any], metrics: RunMetrics | None) -> list[tuple[str, str]]:
    facts = [("Model", _text(config, "actor_rollout_ref.model.path")), ("Method", _method(config))]
    env = [_text(config, "env.name"), _text(config, "data.train_files"), _text(config, "env.backend")]
    facts.append(("Games", ", ".join(part for part in env if part)))
    batch, samples = _text(config, "data.train_batch_size"), _text(config, "actor_rollout_ref.rollout.n")
    facts.append(("Per update", f"{batch} games × {samples} episodes" if batch and samples else ""))
    facts.append(("Learning rate", _text(config, "actor_rollout_ref.actor.optim.lr")))
    done = len(metrics.series("group/success_rate")[0]) if metrics else 0
    total = _text(config, "trainer.total_training_steps")
    facts.append(("Updates", f"{done} of {total}" if total and total != "-1" else str(done)))
    if metrics:
        facts += _success(metrics)
    return [(label, value) for label, value in facts if value]


def _success(metrics: RunMetrics) -> list[tuple[str, str]]:
    steps, rates = metrics.series("val/success_rate")
    if not steps:
        return []
    last = metrics.steps[steps[-1]]
    value = f"{rates[-1]:.1%}" if len(rates) == 1 else f"{rates[0]:.1%} → {rates[-1]:.1%}"
    if "val/success_low" in last and "val/success_high" in last:
        value += f" [{last['val/success_low']:.1%}, {last['val/success_high']:.1%}]"
    games = f" of {last['val/episodes']:.0f} games" if "val/episodes" in last else ""
    return [("Validation success", value + games)]


def _method(config: Mapping[str, Any]) -> str:
    estimator = _text(config, "algorithm.adv_estimator")
    if estimator != "agentopsd":
        return estimator.upper() if estimator == "grpo" else estimator
    symbols = {"lambda": "λ", "gamma": "γ", "bound": "b"}
    parts = [f"{sign} {value}" for key, sign in symbols.items() if (value := _text(config, f"agentopsd.{key}"))]
    usual = {"granularity": "turn", "recursion": "True", "prior": "group", "direction": "signed", "evidence": "raw"}
    for key, default in usual.items():
        value = _text(config, f"agentopsd.{key}")
        if value and value != default:
            parts.append(f"{key} {value}")
    return "AgentOPSD" + (f", {', '.join(parts)}" if parts else "")


def _lookup(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _text(config: Mapping[str, Any], key: str) -> str:
    value = _lookup(config, key)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return "" if value is None or isinstance(value, Mapping) else str(value)


def _number(config: Mapping[str, Any], key: str) -> float | None:
    value = _lookup(config, key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _relative(sentence: str, run_dir: Path) -> str:
    return sentence.replace(f"{run_dir}/", "")


@contextmanager
def _warnings_into(notes: list[str], run_dir: Path) -> Iterator[None]:
    """What the readers log as warnings becomes notes of the page."""

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.append(_relative(record.getMessage(), run_dir) + ".")

    reader, handler = logging.getLogger(read_metrics.__module__), Collect(logging.WARNING)
    propagate, reader.propagate = reader.propagate, False
    reader.addHandler(handler)
    try:
        yield
    finally:
        reader.removeHandler(handler)
        reader.propagate = propagate
