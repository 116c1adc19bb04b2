"""Games, their wording, and a skill for every task type: preflight's own checks, as findings."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from verl.agentopsd import preflight
from verl.agentopsd.config import env_section
from verl.agentopsd.doctor.finding import Finding, ok, warning
from verl.agentopsd.envs.base import EnvFamily, Task, make_family
from verl.agentopsd.skills.bank import SkillBank


@dataclass(frozen=True)
class Material:
    """What prompts are made from."""

    family: EnvFamily
    tasks: dict[str, list[Task]]
    bank: SkillBank


def load(config: DictConfig) -> tuple[Material, list[Finding]]:
    """Reads games and skills.

    Raises:
        Exception: of this package, when games or skills are missing or incomplete.
    """
    family, tasks = preflight.games(config)
    bank = preflight.skills(config, family)
    findings = [ok("games", ", ".join(f"{split} {len(games)}" for split, games in tasks.items()))]
    if source := _generated(config):
        findings.append(warning("games", source))
    exact = make_family({**env_section(config), "backend": "exact"})
    opened = sum(1 for _ in preflight.openings(exact, tasks))
    findings.append(
        ok("grammar", f"{opened} games opened; commands and answers are worded as the exact engine knows them")
    )
    missing = [kind for kind in family.task_types if kind not in bank.covered]
    if missing:
        findings.append(
            warning("skills", f"{bank.name}: no text of their own for {', '.join(missing)}; they get the general skill")
        )
    findings.append(
        ok("skills", f"{bank.name} ({bank.hash}): {len(bank.covered)} of {len(family.task_types)} task types")
    )
    return Material(family, tasks, bank), findings


def _generated(config: DictConfig) -> str | None:
    import os

    if config.env.name == "alfworld" and not (env_section(config).get("data_dir") or os.environ.get("ALFWORLD_DATA")):
        return (
            "generated games: results are not comparable with published ones; python scripts/get_alfworld_data.py gets "
            "ALFWorld's, env.data_dir or ALFWORLD_DATA names their folder"
        )
    return None
