"""The report on a terminal, or as JSON."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from verl.agentopsd.doctor.examine import Report
from verl.agentopsd.doctor.finding import Level
from verl.agentopsd.doctor.gpus import GIB
from verl.agentopsd.doctor.planner import Plan

STYLES = {Level.OK: "green", Level.UNCHECKED: "cyan", Level.WARNING: "yellow", Level.ERROR: "bold red"}


def to_json(report: Report) -> str:
    """One object: ``ok``, ``findings`` and ``plan`` (null when the model's sizes are unknown)."""
    findings = [{"level": f.level.value, "subject": f.subject, "text": f.text} for f in report.findings]
    plan = report.plan.as_json() if report.plan else None
    return json.dumps({"ok": report.exit_code == 0, "findings": findings, "plan": plan}, indent=1, allow_nan=False)


def show(report: Report, console: Console) -> None:
    """Findings, then the plan, then one line that counts."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in report.findings:
        table.add_row(finding.level.value, finding.subject, finding.text, style=STYLES[finding.level])
    console.print(table, markup=False)
    if report.plan is not None:
        show_plan(report.plan, console)
    counts = {level: len(report.of(level)) for level in Level}
    console.print(
        f"{counts[Level.ERROR]} errors, {counts[Level.WARNING]} warnings, {counts[Level.UNCHECKED]} not checked here, "
        f"{counts[Level.OK]} in order"
    )


BRIEF = ("games", "lengths", "memory")


def show_briefly(report: Report, console: Console) -> None:
    """What a start says: games, lengths, memory, and all that is not in order."""
    for finding in report.findings:
        if finding.level in (Level.WARNING, Level.UNCHECKED):
            console.print(f"{finding.level.value:8s} {finding.text}", style=STYLES[finding.level], markup=False)
        elif finding.level is Level.OK and finding.subject in BRIEF:
            console.print(f"{finding.subject:8s} {finding.text}", highlight=False, markup=False)


def show_plan(plan: Plan, console: Console) -> None:
    """Seconds per stage, bytes per GPU and what was assumed."""
    memory, seconds = plan.memory, plan.seconds
    if plan.device != "cpu":
        console.print(f"\nGiB per GPU ({plan.device})", style="bold", highlight=False)
        parts = {
            "weights": memory.weights,
            "gradients": memory.gradients,
            "Adam": memory.optimizer,
            "gathered layer": memory.gathered,
            "activations": memory.activations,
            "logits": memory.logits,
            "teacher": memory.teacher,
            "= update": memory.training,
            "rollout weights": memory.rollout_weights,
            "KV cache": memory.kv_cache,
            "= rollout": memory.playing,
        }
        console.print("  ".join(f"{name} {value / GIB:.1f}" for name, value in parts.items()), highlight=False)
    console.print(f"\nseconds per update ({plan.layout.gpus} × {plan.device})", style="bold", highlight=False)
    stages = {
        "rollout": seconds.rollout,
        "old log-probs": seconds.old_log_probs,
        "reference": seconds.reference,
        "teacher": seconds.teacher,
        "update": seconds.update,
        "= total": seconds.total,
    }
    console.print("  ".join(f"{name} {_seconds(value)}" for name, value in stages.items()), highlight=False)
    console.print(f"assumed: {'; '.join(plan.notes)}\n", style="dim", highlight=False)


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
