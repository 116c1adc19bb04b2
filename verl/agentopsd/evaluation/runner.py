"""One evaluation: what it is, how it is played into its file, and the table at the end."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from verl.agentopsd.config import ConfigError, env_section, teacher_config
from verl.agentopsd.env_faults import EnvironmentsFailed
from verl.agentopsd.envs.base import EnvFamily, make_family
from verl.agentopsd.evaluation.engine import TaskDataset, episode_of, play, rollout_engine, sampling_of
from verl.agentopsd.evaluation.output import Key, Output, with_outcome_hash
from verl.agentopsd.evaluation.panel import Panel
from verl.agentopsd.evaluation.records import EpisodeRecord, Summary
from verl.agentopsd.evaluation.summary import behaviour, finished, success
from verl.agentopsd.platform.forked.preload import preloading
from verl.agentopsd.preflight import check_prompt, openings
from verl.agentopsd.redact import RedactingFile
from verl.agentopsd.rollout.chat import ChatFormat
from verl.agentopsd.skills.bank import SkillBank
from verl.agentopsd.skills.insert import with_skill

REPORT_EVERY = 0.1
"""Without a terminal, progress is one line per this share of the episodes."""


@dataclass(frozen=True)
class Evaluation:
    """Everything that is known before the engine starts.

    Attributes:
        model: as the user named it.
        name, step: of the model, for the records.
        model_hash: of the folder that the engine loads.
        skill: the policy sees a skill: a control, never a result.
    """

    config: DictConfig
    family: EnvFamily
    panel: Panel
    chat: ChatFormat
    bank: SkillBank
    model: str
    name: str
    step: int
    model_hash: str
    samples: int
    skill: bool

    @property
    def episodes(self) -> int:
        return len(self.panel) * self.samples

    def settings(self) -> dict[str, Any]:
        """What decides the episodes; a file is only continued when all of it is the same."""
        env, data = self.config.env, self.config.data
        names = ("max_turns", "max_action_tokens", "prompt_style", "action_format", "show_admissible", "seed")
        sampling = sampling_of(self.config)
        return {
            "model": self.name,
            "model hash": self.model_hash,
            "step": self.step,
            "panel": self.panel.name,
            "panel hash": self.panel.hash,
            "samples": self.samples,
            "skill": self.bank.hash if self.skill else False,
            **{name: sampling[name] for name in ("temperature", "top_p", "top_k")},
            **{f"env.{name}": env.get(name) for name in names},
            "data.max_prompt_length": data.max_prompt_length,
            "data.max_response_length": data.max_response_length,
            "data.apply_chat_template_kwargs": OmegaConf.to_container(data.apply_chat_template_kwargs, resolve=True),
            "actor_rollout_ref.model.custom_chat_template": self.config.actor_rollout_ref.model.custom_chat_template,
        }


def check_prompts(config: DictConfig, family: EnvFamily, panel: Panel, chat: ChatFormat, bank: SkillBank | None) -> str:
    """Finds out before the start whether prompts fit; with a skill, makes the room that it needs.

    Args:
        bank: of the skills that the policy will see, None without.

    Returns:
        A line for the plan.

    Raises:
        ConfigError: with the arithmetic.
    """
    data, rollout = config.data, config.actor_rollout_ref.rollout
    exact = make_family({**env_section(config), "backend": "exact"})  # same texts, without starting an engine
    by_split = {split: [task for task in panel.tasks if task.split == split] for split in panel.counts}
    position = teacher_config(config).skill_position
    longest, game, added = 0, "", 0
    for task, messages in openings(exact, by_split):
        tokens = len(chat.initial_ids(messages))
        longest, game = max((longest, game), (tokens, task.game_id))
        if bank is not None:
            skilled = len(chat.initial_ids(with_skill(messages, bank.text(task.task_type), position)))
            added = max(added, skilled - tokens)
    limit = check_prompt(config, longest, game)
    if bank is not None:
        room = data.max_prompt_length + added
        data.max_prompt_length = room if limit is None else min(room, limit - data.max_response_length)
        if longest + added > data.max_prompt_length:
            raise ConfigError(
                f"a prompt with its skill has {longest} + {added} tokens and the answers up to "
                f"{data.max_response_length}, but the model has {limit} positions; skills are never cut: lower "
                f"data.max_response_length to {int(limit or 0) - longest - added}"
            )
    skill = f", with skill {longest + added}" if added else ""
    return (
        f"tokens   longest prompt {longest}{skill} of {data.max_prompt_length}; row {rollout.max_model_len} of {limit}"
    )


def run(evaluation: Evaluation, output: Output, environment: dict[str, str]) -> Summary:
    """Plays what is missing in ``output``, closes it and returns its summary; an interruption leaves it resumable.

    Raises:
        EnvironmentsFailed: no episode is left to count.
    """
    started = time.monotonic()
    try:
        missing = output.missing
        with _quiet(output.work_dir), Bar(evaluation.episodes, output.episodes()) as bar:
            if missing:
                bar.say("starting the rollout engine")
                with (
                    preloading(evaluation.config, environment),
                    rollout_engine(evaluation.config, environment, output.work_dir) as loops,
                ):
                    bar.begin()
                    for episode in _play(evaluation, missing, loops, output.work_dir):
                        output.write(episode)
                        bar.add(episode)
        episodes = output.episodes()
        if all(episode.env_error for episode in episodes):
            raise EnvironmentsFailed(
                f"all {len(episodes)} episodes were lost to the environment. The first, {episodes[0].game_id}: "
                f"{episodes[0].env_error}. When that is mended, the same command with --overwrite plays them again"
            )
        seconds = output.wall_seconds + time.monotonic() - started
        summary = _summary(evaluation, output, episodes, seconds)
        output.finish(episodes, summary)
        return summary
    finally:
        output.pause(time.monotonic() - started)


def _play(evaluation: Evaluation, missing: Sequence[Key], loops: Any, work_dir: Path) -> Iterator[EpisodeRecord]:
    config = evaluation.config
    wanted = {game for game, _ in missing}
    tasks = [task for task in evaluation.panel.tasks if task.game_id in wanted]
    skills = [evaluation.bank.text(task.task_type) for task in tasks] if evaluation.skill else None
    rows = TaskDataset(tasks, str(config.env.name), int(config.env.seed), skills)
    position = teacher_config(config).skill_position
    for played in play(
        loops,
        [rows[index] for index in range(len(rows))],
        samples=evaluation.samples,
        step=0,
        limit_seconds=float(config.limits.validation),
        run_dir=work_dir,
    ):
        episode = episode_of(
            played,
            run=evaluation.name,
            step=evaluation.step,
            phase="evaluation",
            chat=evaluation.chat,
            bank=evaluation.bank,
            skill_position=position,
            weights_version=evaluation.step,
        )
        if episode.skill != evaluation.skill:
            raise ConfigError(f"{episode.game_id} was played {'with' if episode.skill else 'without'} a skill")
        yield episode


def _summary(evaluation: Evaluation, output: Output, episodes: list[EpisodeRecord], seconds: float) -> Summary:
    from verl.agentopsd.task_runner import versions

    summary = finished(
        episodes,
        model=evaluation.model,
        panel=evaluation.panel.name,
        panel_hash=evaluation.panel.hash,
        sampling=sampling_of(evaluation.config),
        versions={**versions(), "model_hash": evaluation.model_hash},
        wall_seconds=round(seconds, 1),
    )
    summary = with_outcome_hash(summary, episodes)
    return replace(summary, results={**summary.results, "settings": output.settings})


@contextlib.contextmanager
def _quiet(work_dir: Path) -> Iterator[None]:
    """What verl and its libraries print goes to a log."""
    with (
        (work_dir / "verl.log").open("a", encoding="utf-8") if work_dir.is_dir() else contextlib.nullcontext() as log,
        contextlib.redirect_stdout(RedactingFile(log) if log else sys.stdout),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        logging.getLogger("verl").setLevel(logging.WARNING)
        yield


class Bar:
    """Progress with the success so far and the time left: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int, done: Sequence[EpisodeRecord]) -> None:
        self.total, self.done, self.won = total, len(done), sum(episode.won for episode in done)
        self.valid = sum(not episode.env_error for episode in done)
        self._first, self._reported, self._started = self.done, self.done, time.monotonic()
        self.console = Console(file=sys.__stdout__, soft_wrap=True)
        self._progress = Progress(
            TextColumn("[bold]episodes"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[success]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False)

    def begin(self) -> None:
        """The first game starts now; the time left is estimated from here on."""
        self._started = time.monotonic()
        self._task = self._progress.add_task("", total=self.total, completed=self.done, success=self._success())
        self._progress.start()

    def add(self, episode: EpisodeRecord) -> None:
        """One more episode is in the file."""
        self.done += 1
        self.won += episode.won
        self.valid += not episode.env_error
        self._progress.update(self._task, completed=self.done, success=self._success())
        if self._progress.disable and self.done - self._reported >= REPORT_EVERY * self.total:
            self._reported = self.done
            each = (time.monotonic() - self._started) / (self.done - self._first)
            left = each * (self.total - self.done)
            self.say(f"{self.done} of {self.total} episodes  {self._success()}  {left:.0f} s left")

    def _success(self) -> str:
        return f"success {self.won / self.valid:.1%}" if self.valid else ""


def rows_of(episodes: Sequence[EpisodeRecord]) -> list[list[str]]:
    """Cells of the table: everything, every split, and every task type (within a split if there are several)."""
    splits = sorted({episode.split for episode in episodes})
    kinds = sorted({episode.task_type for episode in episodes})
    parts = [("all", list(episodes))] if len(splits) > 1 else []
    for split in splits:
        own = [episode for episode in episodes if episode.split == split]
        parts.append((split, own))
        for kind in kinds:
            parts.append((f"  {kind}", [episode for episode in own if episode.task_type == kind]))
    return [_row(label, part) for label, part in parts if part]


def _row(label: str, episodes: Sequence[EpisodeRecord]) -> list[str]:
    valid = [episode for episode in episodes if not episode.env_error]
    rate, played = success(valid), behaviour(valid)

    def cell(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return [
        label,
        str(rate["n"]),
        cell(rate["rate"], ".1%"),
        f"[{rate['low']:.1%}, {rate['high']:.1%}]",
        cell(played["turns_mean"], ".1f"),
        cell(played["invalid_mean"], ".2f"),
        cell(played["truncated"], ".1%"),
        cell(played["loops"], ".1%"),
    ]


HEADER = ["", "games", "success", "95 % interval", "turns", "invalid / game", "truncated", "loops"]


def print_table(summary: Summary, episodes: Sequence[EpisodeRecord], console: Console) -> None:
    """The result for people."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    how = "greedy" if not summary.sampling.get("temperature") else f"T = {summary.sampling['temperature']:g}"
    if summary.samples > 1:
        how += f", {summary.samples} samples per game"
    title = f"{summary.model}, panel {summary.panel} ({summary.panel_hash}), {how}"
    console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    if summary.skill:
        console.print("CONTROL: the policy saw a skill; this is no result", style="bold red", highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    for index, name in enumerate(HEADER):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows_of(episodes):
        table.add_row(*map(escape, row), style=None if row[0].startswith(" ") else "bold")
    console.print(table)
    results = summary.results
    if "pass_at" in results:
        rates = "  ".join(f"pass@{k} {value:.1%}" for k, value in results["pass_at"].items())
        console.print(f"{rates}  avg@{results['samples']} {results['success']['rate']:.1%}", highlight=False)
    if results["errors"]:
        console.print(
            f"warning: {results['errors']} of {results['episodes']} episodes were lost to the environment and are in "
            "no number above; their records say why (env_error)",
            style="bold red",
            highlight=False,
        )
    total = results["tokens"]["action_total"]
    console.print(
        f"{total:,} sampled tokens in {summary.wall_seconds:.0f} s; outcomes {results.get('outcomes', '–')} (equal in "
        "two evaluations if every word was)",
        style="dim",
        highlight=False,
    )
