"""Two or more models on the same games: who won what, how sure the difference is.

Everything is paired by game. With one evaluation per model the interval of the difference is a bootstrap over games and
McNemar's exact test says how likely such a split is between equal models; with several training seeds per model, seeds
are resampled too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl.agentopsd.evaluation.records import EpisodeRecord, RecordFile, Summary, read_records
from verl.agentopsd.evaluation.statistics import (
    Estimate,
    McNemar,
    detectable_episodes,
    hierarchical_bootstrap,
    mcnemar_exact,
    paired_bootstrap,
    wilson,
)
from verl.agentopsd.evaluation.summary import behaviour

ALL = "all games"


class CompareError(ValueError):
    """Files that must not be compared; the message says why and names the games."""


@dataclass(frozen=True)
class Game:
    """One game of the common panel."""

    split: str
    game_id: str
    task_type: str


@dataclass(frozen=True)
class Model:
    """A model's evaluations, one file per training seed. ``won`` is (seeds, games): the mean over a game's samples."""

    name: str
    files: list[Path]
    summaries: list[Summary]
    won: NDArray[np.float64]
    behaviour: dict[str, float | None]

    @property
    def seeds(self) -> int:
        return len(self.files)


@dataclass(frozen=True)
class Score:
    """Success in one scope. ``sd`` is over seeds, ``None`` for one."""

    success: Estimate
    sd: float | None


@dataclass(frozen=True)
class Difference:
    """A model against the baseline in one scope. ``mcnemar`` needs one seed and one sample per game."""

    difference: Estimate
    mcnemar: McNemar | None
    detectable: float | None  # episodes per model that would show the difference seen; None for no difference


@dataclass(frozen=True)
class Scope:
    """A set of games with the score of every model and every later model's difference to the first."""

    kind: str  # "all", "split" or "task type"
    name: str
    n: int
    scores: list[Score]
    differences: list[Difference]


@dataclass(frozen=True)
class Comparison:
    """The first model is the baseline. ``upper`` is the upper end of each later model's one-sided interval."""

    models: list[Model]
    panel: str
    panel_hash: str
    confidence: float
    scopes: list[Scope]
    upper: list[float]
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "panel": self.panel,
            "panel_hash": self.panel_hash,
            "confidence": self.confidence,
            "models": [
                {
                    "name": model.name,
                    "files": [str(file) for file in model.files],
                    "model": [summary.model for summary in model.summaries],
                    "step": [summary.step for summary in model.summaries],
                    "behaviour": model.behaviour,
                }
                for model in self.models
            ],
            "scopes": [asdict(scope) for scope in self.scopes],
            "one_sided_upper": dict(zip([model.name for model in self.models[1:]], self.upper, strict=True)),
            "notes": self.notes,
        }


def compare(
    files: Sequence[tuple[str, Path]], *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Comparison:
    """Reads, checks and compares evaluations.

    Args:
        files: ``(name, file)``; files of one name are training seeds of one model. The first name is the baseline.
        confidence: of all intervals.

    Raises:
        CompareError: fewer than two models, or files that differ in their games, saw a skill or are not finished.
        RecordError: a file cannot be read.
    """
    names = list(dict.fromkeys(name for name, _ in files))
    if len(names) < 2:
        raise CompareError("a comparison needs two models: give two files, or NAME=FILE with two different names")
    read = [(name, read_records(path)) for name, path in files]
    for _, file in read:
        _check(file)
    _check_same_games([file for _, file in read])
    games, notes = _common_games([file for _, file in read])
    notes += _differing_sampling([file for _, file in read])
    models = [_model(name, [file for own, file in read if own == name], games) for name in names]
    boot: dict[str, Any] = {"resamples": resamples, "seed": seed}
    scopes = [_scope(kind, label, index, models, confidence, boot) for kind, label, index in _scopes(games)]
    base, *others = models
    upper = [_difference(base.won, other.won, 2 * confidence - 1, boot).high for other in others]
    summary = base.summaries[0]
    return Comparison(models, summary.panel, summary.panel_hash, confidence, scopes, upper, notes)


def _check(file: RecordFile) -> None:
    if file.summary is None:
        raise CompareError(
            f"{file.path} is not finished: it has no summary line; continue the evaluation with --resume"
        )
    skilled = [episode.game_id for episode in file if episode.skill]
    if file.summary.skill or skilled:
        raise CompareError(
            f"{file.path} was played with a skill in the prompt ({len(skilled)} games, first {_first(skilled)}): "
            "that is a control, not a result; compare runs without skills"
        )
    if len(steps := {episode.step for episode in file}) > 1:
        raise CompareError(f"{file.path} holds episodes of several steps {sorted(steps)}: one file must be one model")
    twice = [key for key, n in Counter((e.split, e.game_id, e.sample) for e in file).items() if n > 1]
    if twice:
        raise CompareError(f"{file.path} holds {twice[0][1]} (sample {twice[0][2]}) more than once")


def _check_same_games(files: Sequence[RecordFile]) -> None:
    first, *rest = files
    expected = _keys(first)
    for file in rest:
        played = _keys(file)
        if played != expected:
            lacking, extra = sorted(expected - played), sorted(played - expected)
            parts = [f"{len(lacking)} games only in {first.path}: {_some(lacking)}"] if lacking else []
            parts += [f"{len(extra)} games only in {file.path}: {_some(extra)}"] if extra else []
            raise CompareError(f"{first.path} and {file.path} are not the same panel; " + "; ".join(parts))
        assert first.summary is not None and file.summary is not None
        if file.summary.panel_hash != first.summary.panel_hash:
            raise CompareError(
                f"{first.path} and {file.path} have the same game ids but other contents: panel hashes "
                f"{first.summary.panel_hash} and {file.summary.panel_hash}; evaluate both on the same game files"
            )


def _common_games(files: Sequence[RecordFile]) -> tuple[list[Game], list[str]]:
    """The games that every file played to an end, and a note about those that one lost to the environment."""
    lost = {(e.split, e.game_id) for file in files for e in file if e.env_error}
    games = {(e.split, e.game_id): Game(e.split, e.game_id, e.task_type) for e in files[0]}
    common = [games[key] for key in sorted(games) if key not in lost]
    if not common:
        raise CompareError(f"{files[0].path}: no game was played to an end in every file")
    if not lost:
        return common, []
    return common, [
        f"{len(lost)} games left out: lost to an environment error in at least one file ({_some(sorted(lost))})"
    ]


def _differing_sampling(files: Sequence[RecordFile]) -> list[str]:
    settings = [file.summary.sampling | {"samples": file.summary.samples} for file in files if file.summary]
    notes = []
    for key in sorted({key for setting in settings for key in setting}):
        values = [setting.get(key) for setting in settings]
        if any(value != values[0] for value in values):
            pairs = ", ".join(f"{file.path.name} {value}" for file, value in zip(files, values, strict=True))
            notes.append(f"the files were sampled differently: {key} is {pairs}")
    return notes


def _model(name: str, files: Sequence[RecordFile], games: Sequence[Game]) -> Model:
    wanted = {(game.split, game.game_id) for game in games}
    won = np.array([_outcomes(file, games) for file in files])
    episodes: list[EpisodeRecord] = [e for file in files for e in file if (e.split, e.game_id) in wanted]
    acted = behaviour(episodes)
    kept = ("turns_mean", "invalid_mean", "truncated", "loops", "invalid_streak_mean", "recovery")
    described: dict[str, float | None] = {key: acted[key] for key in kept}
    described["action_tokens_mean"] = float(np.mean([episode.action_tokens for episode in episodes]))
    return Model(name, [file.path for file in files], [f.summary for f in files if f.summary], won, described)


def _outcomes(file: RecordFile, games: Sequence[Game]) -> list[float]:
    won: dict[tuple[str, str], list[bool]] = {}
    for episode in file:
        won.setdefault((episode.split, episode.game_id), []).append(episode.won)
    return [float(np.mean(won[game.split, game.game_id])) for game in games]


def _scopes(games: Sequence[Game]) -> list[tuple[str, str, NDArray[np.intp]]]:
    scopes = [("all", ALL, np.arange(len(games)))]
    for kind, labels in (("split", [g.split for g in games]), ("task type", [g.task_type for g in games])):
        values = sorted(set(labels))
        if len(values) > 1:
            scopes += [(kind, value, np.flatnonzero(np.array(labels) == value)) for value in values]
    return scopes


def _scope(
    kind: str,
    name: str,
    index: NDArray[np.intp],
    models: Sequence[Model],
    confidence: float,
    boot: Mapping[str, Any],
) -> Scope:
    won = [model.won[:, index] for model in models]
    return Scope(
        kind=kind,
        name=name,
        n=len(index),
        scores=[_score(own, confidence, boot) for own in won],
        differences=[_against(won[0], other, confidence, boot) for other in won[1:]],
    )


def _score(won: NDArray[np.float64], confidence: float, boot: Mapping[str, Any]) -> Score:
    if len(won) == 1:
        return Score(wilson(float(won.sum()), won.shape[1], confidence), None)
    nothing = np.zeros((1, won.shape[1]))
    return Score(_difference(nothing, won, confidence, boot), float(won.mean(axis=1).std(ddof=1)))


def _against(
    base: NDArray[np.float64], other: NDArray[np.float64], confidence: float, boot: Mapping[str, Any]
) -> Difference:
    single = len(base) == len(other) == 1 and all(np.isin(won, (0, 1)).all() for won in (base, other))
    needed = detectable_episodes(float(base.mean()), float(other.mean()))
    return Difference(
        difference=_difference(base, other, confidence, boot),
        mcnemar=mcnemar_exact(base[0], other[0]) if single else None,
        detectable=needed if np.isfinite(needed) else None,
    )


def _difference(
    base: NDArray[np.float64], other: NDArray[np.float64], confidence: float, boot: Mapping[str, Any]
) -> Estimate:
    if len(base) == len(other) == 1:
        return paired_bootstrap(base[0], other[0], confidence=confidence, **boot)
    return hierarchical_bootstrap(base, other, confidence=confidence, **boot)


def _keys(file: RecordFile) -> set[tuple[str, str]]:
    return {(episode.split, episode.game_id) for episode in file}


def _first(items: Sequence[str]) -> str:
    return items[0] if items else "unknown"


def _some(keys: Sequence[tuple[str, str]], limit: int = 5) -> str:
    shown = ", ".join(f"{split}:{game}" for split, game in keys[:limit])
    return shown + (f" and {len(keys) - limit} more" if len(keys) > limit else "")
