"""The stages of ``scripts/build_tiny_model.py``: prior, tokenizer, cloning, evaluation, card."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from verl.agentopsd.envs.alfworld.expert import PRIOR_FILE, Clumsiness, build_prior, write_prior
from verl.agentopsd.envs.alfworld.games import TASK_TYPES, load_game
from verl.agentopsd.envs.base import Task, make_family
from verl.agentopsd.models.play import ChatTokens
from verl.agentopsd.models.tiny import TinyConfig, TinyLM
from verl.agentopsd.skills.bank import SkillBank

from .card import data_hash, evaluate, export, largest_difference, success_table, write_card
from .cloning import STAGES, Progress, Stage, clone
from .demonstrations import SKILL_LEVELS, Teacher, texts, to_row
from .vocabulary import train_tokenizer

SKILLS = "alfworld_tiny"
TOKENIZER_GAMES = 1000
Room = dict[str, list[str]]


def main(description: str) -> int:
    """Builds what the command line asks for. Returns the exit status."""
    options = parse_options(description)
    torch.set_num_threads(1)
    work = options.out / "work"
    if any(work.glob("stage*.pt")) and not options.resume:
        sys.exit(f"{work} holds an earlier run: pass --resume to continue it, or choose another --out")
    work.mkdir(parents=True, exist_ok=True)
    family = make_family(env_config(options.data_dir))
    tasks = family.tasks("train")
    say(f"{len(tasks)} train games")

    rooms = list(initial_rooms(tasks))
    prior = build_prior(rooms)
    write_prior(prior, work / PRIOR_FILE.name)
    teacher = Teacher(family, SkillBank.load(SKILLS, TASK_TYPES), prior)
    if not (work / "tokenizer.json").exists():
        train_tokenizer(corpus(teacher, tasks, rooms, options.seed), work)
    tokens = ChatTokens(work / "tokenizer.json")
    say(f"tokenizer: {tokens.tokenizer.get_vocab_size()} tokens")

    stages = [replace(stage, tokens=int(stage.tokens * options.scale)) for stage in STAGES]
    model = TinyLM.initialized(TinyConfig(vocab_size=tokens.tokenizer.get_vocab_size()), options.seed)
    panel = family.tasks("valid_seen")[::4]
    done = []
    for index, stage in enumerate(stages):

        def after_round(progress: Progress, loss: float, stage: Stage = stage, number: int = index + 1) -> None:
            report(number, stage, progress, loss, model, tokens, teacher, panel)

        state, seed = work / f"stage{index + 1}.pt", options.seed + index
        try:
            done.append(clone(model, teacher, tasks, tokens, stage, seed, state, options.minutes, after_round))
        except TimeoutError as stopped:
            sys.exit(str(stopped))

    say("playing all held-out games with and without skill")
    model.eval()
    export(model, work, options.out)
    rng = random.Random(f"{options.seed}/check")
    rows = [
        to_row(teacher.play(rng.choice(tasks), *level, Clumsiness(), rng), tokens, 1.0).ids for level in SKILL_LEVELS
    ]
    card: dict[str, Any] = {
        "model": {**asdict(model.config), "parameters": sum(p.numel() for p in model.parameters())},
        "training": {
            "command": f"OMP_NUM_THREADS=1 python scripts/build_tiny_model.py --out OUT --seed {options.seed}"
            + (f" --scale {options.scale}" if options.scale != 1.0 else ""),
            "seed": options.seed,
            "games": len(tasks),
            "data_hash": data_hash(tasks),
            "tokens": sum(progress.tokens for progress in done),
            "steps": sum(progress.steps for progress in done),
            "minutes": round(sum(progress.seconds for progress in done) / 60, 1),
            "stages": [asdict(stage) for stage in stages],
            "skills": {"set": SKILLS, "hash": teacher.skills.hash},
        },
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
        "largest_log_prob_difference": largest_difference(model, options.out, rows),
        "success": success_table(model, tokens, family, teacher.skills, options.seed),
    }
    write_card(card, options.out)
    for split, modes in card["success"].items():
        for mode, results in modes.items():
            rates = {name: sum(r["won"].values()) / sum(r["played"].values()) for name, r in results.items()}
            say(f"{split} {mode}: {rates['plain']:.3f}, with skill {rates['skill']:.3f}")
    return 0


def parse_options(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint; work files go below it")
    parser.add_argument("--data-dir", help="folder with json_2.1.1 (default: $ALFWORLD_DATA, else generated games)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the token budgets of all stages")
    parser.add_argument("--minutes", type=float, default=120.0, help="time limit per stage; --resume continues")
    parser.add_argument("--resume", action="store_true", help="continue what is in --out")
    return parser.parse_args()


def env_config(data_dir: str | None) -> dict:
    """The environment as ``model=tiny`` plays it."""
    return {
        "name": "alfworld",
        "data_dir": data_dir,
        "backend": "exact",
        "prompt_style": "compact",
        "action_format": "plain",
        "show_admissible": False,
        "seed": 0,
    }


def initial_rooms(tasks: list[Task]) -> Iterator[Room]:
    """Each game's receptacles with what is in them at the start, by the names the player sees."""
    for task in tasks:
        game = load_game(task.path)
        yield {
            game.names[receptacle]: [game.names[thing] for thing in game.contents.get(receptacle, ())]
            for receptacle in game.receptacles
        }


def corpus(teacher: Teacher, tasks: list[Task], rooms: list[Room], seed: int) -> Iterator[str]:
    """Text of clumsy and clean play on a sample of the games, and commands on every thing that any game has."""
    rng = random.Random(f"{seed}/tokenizer")
    for task in rng.sample(tasks, min(TOKENIZER_GAMES, len(tasks))):
        yield from texts([teacher.play(task, *rng.choice(SKILL_LEVELS[:2]), Clumsiness(), rng)])
    names = {name for room in rooms for receptacle, things in room.items() for name in (receptacle, *things)}
    for name in sorted(names):
        yield from (f"{verb} {name}" for verb in ("examine", "use", "open", "close", "clean", "heat", "cool", "take"))
    for task in tasks:
        yield teacher.family.make(task).reset().text


def report(
    number: int,
    stage: Stage,
    progress: Progress,
    loss: float,
    model: TinyLM,
    tokens: ChatTokens,
    teacher: Teacher,
    panel: list[Task],
) -> None:
    """A line per round; every tenth round also plays a few valid_seen games with and without skill."""
    line = (
        f"stage {number}  round {progress.rounds:3d}  {progress.tokens / 1e6:5.2f}/{stage.tokens / 1e6:.2f} M tokens  "
        f"loss {loss:.3f}  {progress.tokens / progress.seconds:,.0f} tokens/s  {progress.seconds / 60:.1f} min"
    )
    if progress.rounds % 10 == 0:
        plain, taught = (
            evaluate(model, tokens, teacher.family, panel, skills, 1.0, 0).rate for skills in (None, teacher.skills)
        )
        line += f"  won {plain:.2f}, with skill {taught:.2f} of {len(panel)} valid_seen games"
    say(line)


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)
