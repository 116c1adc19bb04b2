"""The file of an evaluation from the first episode to the summary: nothing is lost, nothing is mixed.

While games are played, episodes are appended as they end, so an interrupted file holds everything that was finished.
What is being evaluated stands beside it in ``<file>.work/settings.json``; a file is only continued with the same
settings. At the end episodes are put into the panel's order, whatever order they ended in, and the summary closes the
file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.agentopsd.evaluation.records import EpisodeRecord, RecordWriter, Summary, read_records

Key = tuple[str, int]
"""Game id and sample."""


class OutputError(ValueError):
    """The output file cannot take this evaluation."""


def check_free(path: Path, *, overwrite: bool, resume: bool) -> None:
    """Refuses early what :class:`Output` would refuse.

    Raises:
        OutputError: the file exists and neither flag was given, or cannot be written.
    """
    if path.is_dir():
        raise OutputError(f"--out {path} is a folder: name a file in it, for example {path / 'evaluation.jsonl'}")
    if not _is_empty(path) and not overwrite and not resume:
        raise OutputError(f"{path} exists: --resume continues it, --overwrite drops it, --out FILE writes another one")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("ab").close()
        if not there:
            path.unlink()
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror}): choose another file with --out") from error


class Output:
    """An evaluation's file.

    Args:
        path: the file.
        settings: everything that decides the episodes; must be equal for a file to be continued.
        panel: the game ids in order.
        samples: episodes per game.
        overwrite, resume: what to do with an existing file.

    Attributes:
        work_dir: logs and settings of the unfinished evaluation; removed by :meth:`finish`.
        wall_seconds: spent by earlier, interrupted calls.

    Raises:
        OutputError: the file holds something else; says what differs.
        RecordError: the file is damaged, or another process writes it.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        panel: Sequence[str],
        samples: int,
        *,
        overwrite: bool = False,
        resume: bool = False,
    ) -> None:
        self.path = path
        self.work_dir = path.with_name(path.name + ".work")
        self._settings_file = self.work_dir / "settings.json"
        self._order: dict[Key, int] = {
            (game, sample): index * samples + sample for index, game in enumerate(panel) for sample in range(samples)
        }
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.wall_seconds = 0.0
        # a start that failed leaves an empty file, which is nothing to be careful with
        overwrite = overwrite or (not resume and _is_empty(path))
        self.writer = RecordWriter(path, overwrite=overwrite, resume=resume)
        try:
            if self.writer.done or self.writer.summary is not None:
                self._check_same()
            else:
                self._save()
        except BaseException:
            self.writer.close()
            raise

    @property
    def missing(self) -> list[Key]:
        """Episodes that are not in the file, in the panel's order."""
        done = {(game, sample) for _, game, sample in self.writer.done}
        return [key for key in self._order if key not in done]

    @property
    def summary(self) -> Summary | None:
        """The summary of a file that was already finished."""
        return self.writer.summary

    def episodes(self) -> list[EpisodeRecord]:
        """What is in the file, in the panel's order."""
        return sorted(read_records(self.path), key=lambda episode: self._order[episode.game_id, episode.sample])

    def write(self, episode: EpisodeRecord) -> None:
        """Appends an episode; it is in the file when this returns. One that is already there is left out."""
        if episode.key not in self.writer.done:
            self.writer.write(episode)

    def pause(self, seconds: float) -> None:
        """Notes the time spent and closes the file, which can be continued."""
        self.wall_seconds += seconds
        if self.writer.summary is None:
            self._save()
        self.writer.close()

    def finish(self, episodes: Sequence[EpisodeRecord], summary: Summary) -> None:
        """Puts the file into order and closes it with the summary."""
        if self.missing:
            raise OutputError(f"{len(self.missing)} episodes are missing, the first of {self.missing[0][0]}")
        ordered = self.path.with_name(self.path.name + ".ordered")
        with RecordWriter(ordered, overwrite=True) as writer:
            for episode in episodes:
                writer.write(episode)
            writer.write_summary(summary)
        os.replace(ordered, self.path)
        self.writer.summary = summary
        shutil.rmtree(self.work_dir, ignore_errors=True)

    def _save(self) -> None:
        self.work_dir.mkdir(parents=True, exist_ok=True)
        state = {"settings": self.settings, "wall_seconds": round(self.wall_seconds, 3)}
        temporary = self._settings_file.with_suffix(".new")
        temporary.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        temporary.replace(self._settings_file)

    def _check_same(self) -> None:
        if self.writer.summary is not None:
            known = self.writer.summary.results.get("settings") or {}
        else:
            try:
                state = json.loads(self._settings_file.read_text(encoding="utf-8"))
                known, self.wall_seconds = state["settings"], float(state["wall_seconds"])
            except (OSError, ValueError, KeyError):
                raise OutputError(
                    f"{self.path} cannot be continued: {self._settings_file}, which says what was being evaluated, "
                    "cannot be read; --overwrite starts again"
                ) from None
        if differing := differences(known, self.settings):
            raise OutputError(
                f"{self.path} cannot be continued, it holds another evaluation: {'; '.join(differing)}. Use another "
                "--out, or --overwrite to drop it"
            )


def _is_empty(path: Path) -> bool:
    return not path.exists() or path.stat().st_size == 0


def differences(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """``name a, now b`` for every setting that differs."""
    return [
        f"{name} {known.get(name)!r}, now {wanted.get(name)!r}"
        for name in dict.fromkeys([*wanted, *known])
        if known.get(name) != wanted.get(name)
    ]


def outcome_hash(episodes: Sequence[EpisodeRecord]) -> str:
    """16 hex digits over what was said and done in all episodes: equal if and only if two evaluations played alike."""
    digest = hashlib.sha256()
    for episode in sorted(episodes, key=lambda episode: (episode.game_id, episode.sample)):
        turns = [[turn.text, turn.command, turn.valid, turn.observation] for turn in episode.turns]
        outcome = [episode.game_id, episode.sample, episode.messages, turns, episode.won, episode.truncated_by]
        digest.update(json.dumps(outcome, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()[:16]


def with_outcome_hash(summary: Summary, episodes: Sequence[EpisodeRecord]) -> Summary:
    """The summary with :func:`outcome_hash` in its results."""
    return replace(summary, results={**summary.results, "outcomes": outcome_hash(episodes)})
