"""One JSON line per episode, the same schema for training dumps and for evaluation.

A file is a sequence of episode lines and, when an evaluation has finished, one summary line at the end. It only grows:
nothing is overwritten without being asked to, and a file whose writer died can be continued.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, TypeVar

import numpy as np

from verl.agentopsd.checkpoints import sync_folder
from verl.agentopsd.envs.base import Message
from verl.agentopsd.skills.insert import with_skill

SCHEMA = 1
logger = logging.getLogger(__name__)
T = TypeVar("T")


class RecordError(ValueError):
    """A record file that cannot be read or written as asked; the message names file, line and remedy."""


@dataclass(frozen=True)
class Turn:
    """One answer of the policy and what came back. The credit's values are ``None`` where the turn was not scored."""

    text: str
    command: str
    well_formed: bool
    valid: bool
    observation: str
    tokens: int
    rollout_logprob_sum: float | None = None  # by the sampler, nats
    logprob_sum: float | None = None  # by the actor, without the skill, nats
    teacher_logprob_sum: float | None = None  # by the teacher, with the skill, nats
    e: float | None = None
    B: float | None = None
    dB: float | None = None
    w: float | None = None
    advantage: float | None = None
    penalty: float | None = None  # what every token of the turn gets beside the advantage; None without penalties
    gaps: list[float] | None = None  # teacher minus actor log-prob of each action token, nats to six digits


@dataclass(frozen=True)
class EpisodeRecord:
    """One episode. ``messages`` is the opening chat as the policy saw it; ``turns`` holds everything after it."""

    run: str
    step: int
    phase: str  # "train", "validation" (during training) or "evaluation"
    split: str
    game_id: str
    task_type: str
    seed: int
    won: bool
    num_turns: int
    invalid: int
    truncated: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    sample: int = 0  # which of the episodes of this game
    group: str = ""  # the GRPO group
    truncated_by: str = ""
    env_error: str = ""
    reward: float | None = None
    advantage: float | None = None  # base advantage A
    success_rate: float | None = None  # S/G of the group
    prior: float | None = None  # B_0
    skill: bool = False  # the policy itself saw a skill: a control, never a result
    max_turns: int | None = None  # turns that this episode was allowed
    prompt_tokens: int = 0
    action_tokens: int = 0
    response_tokens: int = 0
    seconds: float = 0.0
    env_seconds: float = 0.0
    gen_seconds: float = 0.0
    weights_version: int | None = None

    @property
    def key(self) -> tuple[int, str, int]:
        """What makes an episode unique within a file: ``(step, game_id, sample)``."""
        return self.step, self.game_id, self.sample

    def to_json(self) -> str:
        return _dumps({"kind": "episode", "schema": SCHEMA, **asdict(self)}, f"episode of {self.game_id!r}")

    @classmethod
    def from_json(cls, line: str) -> EpisodeRecord:
        return cls.from_dict(json.loads(line))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EpisodeRecord:
        turns = data.get("turns", [])
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise RecordError("field turns in EpisodeRecord is not a list of objects")
        return _build(cls, {**data, "turns": [_build(Turn, turn) for turn in turns]})


@dataclass(frozen=True)
class Summary:
    """The last line of a finished evaluation; ``results`` is what ``summary.summarize`` returns."""

    run: str
    model: str
    step: int
    panel: str
    panel_hash: str
    games: int
    samples: int
    skill: bool
    sampling: dict[str, Any]
    results: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    wall_seconds: float = 0.0

    def to_json(self) -> str:
        return _dumps({"kind": "summary", "schema": SCHEMA, **asdict(self)}, "summary")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Summary:
        return _build(cls, data)


@dataclass(frozen=True)
class RecordFile:
    """A file that was read: its episodes in the order written and the summary, if the writer got that far."""

    path: Path
    episodes: list[EpisodeRecord]
    summary: Summary | None

    def __iter__(self) -> Iterator[EpisodeRecord]:
        return iter(self.episodes)

    def __len__(self) -> int:
        return len(self.episodes)


def iter_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and content of every complete line; a torn last line is left out with a warning.

    Raises:
        RecordError: no such file, or a line in the middle that is not a JSON object.
    """
    path = Path(path)
    if not path.is_file():
        raise RecordError(f"{path}: no such record file")
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                data = json.loads(raw)
            except (ValueError, RecursionError) as error:
                if not raw.endswith(b"\n"):
                    logger.warning("%s:%d: the last line is torn and left out: its writer stopped in it", path, number)
                    return
                raise RecordError(f"{path}:{number}: not JSON ({error}); mend or remove this line") from None
            if not isinstance(data, dict):
                raise RecordError(f"{path}:{number}: not a JSON object; mend or remove this line")
            yield number, data


def read_records(path: str | Path) -> RecordFile:
    """Reads a whole file of episodes.

    Raises:
        RecordError: as :func:`iter_lines`; also for a line of another kind or schema, a missing or unknown field,
            a second summary, or an episode after the summary.
    """
    episodes: list[EpisodeRecord] = []
    summary: Summary | None = None
    for number, data in iter_lines(path):
        where = f"{path}:{number}"
        if (schema := data.get("schema")) != SCHEMA:
            raise RecordError(f"{where}: schema {schema!r} is not the schema {SCHEMA} that this version reads")
        if summary is not None:
            what = "a second summary" if data.get("kind") == "summary" else "an episode after the summary"
            raise RecordError(f"{where}: {what}; two evaluations were written into one file, split it")
        try:
            if data.get("kind") == "episode":
                episodes.append(EpisodeRecord.from_dict(data))
            elif data.get("kind") == "summary":
                summary = Summary.from_dict(data)
            else:
                raise RecordError(f"kind {data.get('kind')!r} is neither 'episode' nor 'summary'")
        except RecordError as error:
            raise RecordError(f"{where}: {error}") from None
    return RecordFile(Path(path), episodes, summary)


class RecordWriter:
    """Appends episodes to a file, one flushed line each; safe to kill at any moment.

    Args:
        path: the file; its folder is made.
        overwrite: replace an existing file.
        resume: continue an existing file. A torn last line moves to ``<path>.torn``.

    Attributes:
        done: ``EpisodeRecord.key`` of everything already in the file.
        summary: the summary of a file that was already finished; such a file takes no more lines.

    Raises:
        RecordError: the file exists and neither flag was given, or another process is writing it.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False, resume: bool = False) -> None:
        if overwrite and resume:
            raise RecordError("overwrite and resume exclude each other: choose one")
        self.path = Path(path)
        self.done: set[tuple[int, str, int]] = set()
        self.summary: Summary | None = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not (overwrite or resume) and self.path.exists():
            raise RecordError(f"{self.path} exists; --resume (resume=True) continues it, --overwrite drops it")
        self._file: TextIO = self.path.open("a" if overwrite or resume else "x", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise RecordError(f"{self.path} is being written by another process") from None
        except OSError as error:
            self._file.close()
            raise RecordError(
                f"{self.path} lies on a file system without locks ({error.strerror}), so that two processes could "
                "write it: choose a folder on another disk"
            ) from error
        try:
            if overwrite:
                self._file.truncate(0)
            if resume:
                self._set_torn_line_aside()
                existing = read_records(self.path)
                self.done, self.summary = {record.key for record in existing}, existing.summary
        except BaseException:
            self._file.close()
            raise

    def write(self, record: EpisodeRecord) -> None:
        """Appends one episode; it is in the file when this returns."""
        self._append(record.to_json())
        self.done.add(record.key)

    def write_summary(self, summary: Summary) -> None:
        """Appends the summary, after which the file is finished."""
        self._append(summary.to_json())
        self.summary = summary

    def close(self) -> None:
        """Closes the file, whose lines are on disk when this returns."""
        if self._file.closed:
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            sync_folder(self.path.parent)
        finally:
            self._file.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _append(self, line: str) -> None:
        if self.summary is not None:
            raise RecordError(f"{self.path} is finished: it ends with a summary; write to another file")
        self._file.write(line + "\n")
        self._file.flush()

    def _set_torn_line_aside(self) -> None:
        with self.path.open("rb+") as file:
            end = file.seek(0, os.SEEK_END)
            tail, start = b"", end
            while start > 0 and b"\n" not in tail:  # back to the last line break, a block at a time
                start = max(0, start - 65536)
                file.seek(start)
                tail = file.read(end - start)
            torn = tail[tail.rfind(b"\n") + 1 :]
            if not torn:
                return
            if _is_json(torn):  # only the line break is missing
                file.seek(end)
                file.write(b"\n")
                return
            aside = self.path.with_name(self.path.name + ".torn")
            with aside.open("ab") as kept:
                kept.write(torn + b"\n")
            file.truncate(end - len(torn))
        logger.warning("%s: a torn last line of %d bytes was moved to %s", self.path, len(torn), aside)


@dataclass(frozen=True)
class TurnCredit:
    """What the teacher and the credit rule say about one turn of a scored row."""

    logprob_sum: float
    teacher_logprob_sum: float
    e: float
    B: float
    dB: float
    w: float
    advantage: float
    gaps: list[float] | None = None


def turn_credits(
    turn_ids: Any,
    logprobs: Any,
    teacher_logprobs: Any,
    advantages: Any,
    credit: Mapping[str, Any],
    *,
    keep_gaps: bool = True,
) -> list[TurnCredit]:
    """One row's credit per turn.

    Args:
        turn_ids, logprobs, teacher_logprobs, advantages: (T,) arrays or CPU tensors of one row; ids -1 off the mask.
        credit: ``evidence, belief, delta, weights``, each (K,) of the same row without padding. Where K counts action
            tokens, a turn has the sum of its tokens' e and ΔB, their last B and their mean w and advantage.
        keep_gaps: keep every token's gap, which offline recomputation with token granularity needs.
    """
    ids = np.asarray(turn_ids)
    on = ids >= 0
    ids, student, teacher = ids[on], _floats(logprobs)[on], _floats(teacher_logprobs)[on]
    shaped = _floats(advantages)[on]
    e, B, dB, w = (_floats(credit[name]) for name in ("evidence", "belief", "delta", "weights"))
    turns = int(ids.max()) + 1 if ids.size else 0
    if len(e) not in (turns, len(ids)):
        raise RecordError(f"the credit of a row with {turns} turns and {len(ids)} action tokens has {len(e)} entries")
    per_token = len(e) != turns
    result = []
    for k in range(turns):
        own = np.flatnonzero(ids == k)
        at = own if per_token else np.array([k])
        gaps = [round(gap, 6) for gap in (teacher[own] - student[own]).tolist()]
        result.append(
            TurnCredit(
                logprob_sum=float(student[own].sum()),
                teacher_logprob_sum=float(teacher[own].sum()),
                e=float(e[at].sum()),
                B=float(B[at[-1]]),
                dB=float(dB[at].sum()),
                w=float(w[at].mean()),
                advantage=float(shaped[own].mean()),
                gaps=gaps if keep_gaps else None,
            )
        )
    return result


def episode_record(
    extra_fields: Mapping[str, Any],
    *,
    run: str,
    step: int,
    phase: str = "train",
    weights_version: int | None = None,
    sample: int = 0,
    group: str = "",
    reward: float | None = None,
    advantage: float | None = None,
    success_rate: float | None = None,
    prior: float | None = None,
    credits: Sequence[TurnCredit] | None = None,
) -> EpisodeRecord:
    """Builds the record of one episode from what the agent loop left in ``extra_fields``.

    Args:
        extra_fields: as ``rollout/agent_loop.py`` fills it. With a ``skill`` in it, the record holds the messages with
            that skill and says so.
        credits: one per turn for a scored row, ``None`` for a row that was not scored.
        weights_version: defaults to the rollout's own ``max_global_steps``.

    Raises:
        RecordError: a field is missing, or the number of credits is not the number of turns.
    """
    try:
        turns, spans = extra_fields["turns"], [turn["span"] for turn in extra_fields["turns"]]
        if credits is not None and len(credits) != len(turns):
            raise RecordError(f"{extra_fields['game_id']}: {len(credits)} credits for {len(turns)} turns")
        scored: list[dict[str, Any]] = [asdict(c) for c in credits] if credits is not None else [{}] * len(turns)
        if weights_version is None:
            weights_version = extra_fields.get("max_global_steps")
        return EpisodeRecord(
            run=run,
            step=int(step),
            phase=phase,
            sample=int(sample),
            group=str(group),
            reward=None if reward is None else float(reward),
            advantage=None if advantage is None else float(advantage),
            success_rate=None if success_rate is None else float(success_rate),
            prior=None if prior is None else float(prior),
            skill=bool(extra_fields.get("skill")),
            max_turns=extra_fields.get("max_turns"),
            weights_version=None if weights_version is None else int(weights_version),
            turns=[
                Turn(
                    text=turn["text"],
                    command=turn["command"],
                    well_formed=bool(turn["well_formed"]),
                    valid=bool(turn["valid"]),
                    observation=turn["observation"],
                    tokens=int(span[1]) - int(span[0]),
                    rollout_logprob_sum=None if turn["logprob_sum"] is None else float(turn["logprob_sum"]),
                    **values,
                )
                for turn, span, values in zip(turns, spans, scored, strict=True)
            ],
            split=extra_fields["split"],
            game_id=extra_fields["game_id"],
            task_type=extra_fields["task_type"],
            seed=int(extra_fields["seed"]),
            messages=[dict(message) for message in messages_shown(extra_fields)],
            won=bool(extra_fields["won"]),
            num_turns=int(extra_fields["num_turns"]),
            invalid=int(extra_fields["invalid"]),
            truncated=bool(extra_fields["truncated"]),
            truncated_by=extra_fields["truncated_by"],
            env_error=extra_fields["env_error"],
            prompt_tokens=int(extra_fields["prompt_tokens"]),
            action_tokens=int(extra_fields["action_tokens"]),
            response_tokens=int(extra_fields["response_tokens"]),
            seconds=float(extra_fields["seconds"]),
            env_seconds=float(extra_fields["env_seconds"]),
            gen_seconds=float(extra_fields["gen_seconds"]),
        )
    except KeyError as error:
        raise RecordError(f"the rollout's extra_fields lack {error.args[0]!r}, which a record needs") from None


def messages_shown(extra_fields: Mapping[str, Any]) -> Sequence[Message]:
    """The opening chat as the policy saw it; empty when the environment failed before there was one."""
    messages, skill = extra_fields["messages"], extra_fields.get("skill")
    return with_skill(messages, skill, extra_fields["skill_position"]) if messages and skill else messages


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _floats(values: Any) -> np.ndarray:
    return np.asarray(values, dtype=np.float64)


def _build(cls: type[T], data: Mapping[str, Any]) -> T:
    data = {key: value for key, value in data.items() if key not in ("kind", "schema")}
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(data.keys() - known.keys()):
        raise RecordError(f"unknown field {', '.join(unknown)} in {cls.__name__}")
    needed = {n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING}
    if missing := sorted(needed - data.keys()):
        raise RecordError(f"field {', '.join(missing)} is missing in {cls.__name__}")
    for name, value in data.items():
        kinds = _KINDS.get(str(known[name].type))
        if kinds is not None and type(value) not in kinds:
            raise RecordError(f"field {name} in {cls.__name__} is {value!r:.60}, not {known[name].type}")
    return cls(**data)


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "int | None": (int, type(None)),
    "float": (float, int),
    "float | None": (float, int, type(None)),
    "list[float] | None": (list, type(None)),
    "list[dict[str, str]]": (list,),
    "dict[str, Any]": (dict,),
    "dict[str, str]": (dict,),
}
"""Types of a field's value as JSON gives it, by the field's annotation."""


def _dumps(data: dict[str, Any], what: str) -> str:
    try:
        return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
    except ValueError:
        raise RecordError(f"the {what} holds a number that is not finite; such a record is never written") from None


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
