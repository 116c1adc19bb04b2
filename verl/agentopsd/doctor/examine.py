"""All checks in order, from a command line to a report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from verl.agentopsd import preflight
from verl.agentopsd.config import ConfigError, has_teacher, teacher_config
from verl.agentopsd.doctor import batch, games, planner, rehearsal, resources, tokenizer, versions
from verl.agentopsd.doctor.finding import Finding, Level, error, guarded, ok, unchecked
from verl.agentopsd.doctor.games import Material
from verl.agentopsd.doctor.planner import Plan
from verl.agentopsd.doctor.shapes import ModelShape, shape_of
from verl.agentopsd.rollout.chat import ChatFormat
from verl.agentopsd.skills.insert import with_skill
from verl.agentopsd.teacher_preflight import check_teacher


@dataclass(frozen=True)
class Report:
    """What was found, in the order of the checks, and the plan when the model's sizes are known."""

    findings: tuple[Finding, ...]
    plan: Plan | None = None

    def of(self, level: Level) -> list[Finding]:
        return [finding for finding in self.findings if finding.level is level]

    @property
    def exit_code(self) -> int:
        """1 with an error, else 0: a warning does not stop a start."""
        return 1 if self.of(Level.ERROR) else 0


def examine(config: DictConfig, *, rehearse: bool = False) -> Report:
    """Looks at a composed configuration that ``main.prepare`` has accepted.

    Args:
        rehearse: also make everything that needs no GPU (``--dry-run`` and the doctor; a start makes it anyway).
    """
    findings: list[Finding] = versions.check(config)
    shape, sized = _shape(config)
    findings += sized + resources.check(config, shape) + batch.check(config) + planner.weight_bucket(config, shape)
    material: list[Material] = []
    chats: list[ChatFormat] = []

    def look_at_games() -> list[Finding]:
        found, notes = games.load(config)
        material.append(found)
        return notes

    def look_at_tokenizer() -> list[Finding]:
        chat, notes = tokenizer.check(config)
        chats.extend([chat] if chat else [])
        return notes

    findings += guarded("games", look_at_games) + guarded("tokenizer", look_at_tokenizer)
    chat = chats[0] if chats else None
    found = material[0] if material else None
    findings += guarded("lengths", lambda: _lengths(config, found, chat))
    if rehearse and found is not None:
        findings += guarded("rehearsal", lambda: rehearsal.check(config))
    gpus = resources.gpus()
    known_gpu = config.trainer.device == "cpu" or str(config.hardware.gpu) in ("auto", *planner.DEVICES)
    made = planner.plan(config, shape, gpus, _skill_tokens(config, found, chat)) if known_gpu else None
    findings += planner.check(config, shape, gpus, made)
    return Report(tuple(findings), made)


def _shape(config: DictConfig) -> tuple[ModelShape | None, list[Finding]]:
    path = str(config.actor_rollout_ref.model.path)
    try:
        shape = shape_of(path)
    except ValueError as failure:
        return None, [error("model", str(failure))]
    if shape is None:
        return None, [unchecked("model", f"{path}: sizes unknown here")]
    origin = "config.json" if Path(path).is_dir() else "doctor/shapes.py; its config.json is not on this machine"
    text = (
        f"{path}: {shape.parameters / 1e9:.2f} B parameters, {shape.positions or 'any number of'} positions ({origin})"
    )
    return shape, [ok("model", text)]


def _lengths(config: DictConfig, found: Material | None, chat: ChatFormat | None) -> list[Finding]:
    """preflight's own checks: with the tokenizer on real prompts, without it on the configured limits alone."""
    if found is not None and chat is None:
        check_teacher(config, preflight.training_games(config, found.tasks), None)
    if found is None or chat is None:
        limit = preflight.check_prompt(config, 0, "")
        data = config.data
        text = (
            f"prompt {data.max_prompt_length} + response {data.max_response_length} = "
            f"{data.max_prompt_length + data.max_response_length} of {limit or 'an unknown number of'} tokens a row "
            "may have; real prompts and skills are not tokenized here"
        )
        return [unchecked("lengths", text)]
    note = preflight.check_lengths(config, found.family, found.tasks, found.bank, chat)
    return [ok("lengths", note)]


def _skill_tokens(config: DictConfig, found: Material | None, chat: ChatFormat | None) -> int | None:
    """What the longest skill adds to a prompt; None where it cannot be counted."""
    if found is None or chat is None or not (has_teacher(config) or config.agentopsd.student_skill):
        return None
    position = teacher_config(config).skill_position
    opening = [{"role": "user", "content": "x"}]
    plain = len(chat.initial_ids(opening))
    longest = 0
    for kind in found.family.task_types:
        longest = max(longest, len(chat.initial_ids(with_skill(opening, found.bank.text(kind), position))) - plain)
    found.bank.fallbacks.clear()
    return longest


def refused(failure: ConfigError) -> Report:
    """The report of a configuration that does not even compose or validate."""
    return Report(tuple(error("configuration", line) for line in str(failure).splitlines()))
