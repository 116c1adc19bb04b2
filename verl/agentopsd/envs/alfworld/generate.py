"""Makes ALFWorld games in the real format, without a simulator: ``game.tw-pddl`` and ``traj_data.json``.

    python -m verl.agentopsd.envs.alfworld.generate OUT --train 400 --valid-seen 60 --valid-unseen 60 --seed 0

The rules, the wording and what fits where are ALFWorld's own (data files of the ``alfworld`` package, which is not
imported); rooms and placements are random; every game is won once by a planner before it is written, and that plan is
its walkthrough. The six task types take turns. Floor plans of ``valid_unseen`` occur in no other split. The same seed
gives the same bytes.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from tqdm import tqdm

from verl.agentopsd.envs.alfworld.game import parse_game
from verl.agentopsd.envs.alfworld.games import EXPECTED, GAME_FILE, MANIFEST_FILE, TASK_TYPES, TRAJECTORY_FILE
from verl.agentopsd.envs.alfworld.planner import solve
from verl.agentopsd.envs.alfworld.rooms import (
    LAMPS,
    OBJECTS,
    ROOM_KINDS,
    Affordances,
    FloorPlan,
    Room,
    floor_plan,
    furnish,
    plan_numbers,
)

GENERATOR_VERSION = 1
ALFWORLD_DATA_PACKAGE = "pip install --no-deps alfworld==0.4.2"

_SENTENCES = {
    "pick_and_place_simple": ("put a {o} in {r}.", "put some {o} on {r}."),
    "look_at_obj_in_light": ("look at {o} under the {r}.", "examine the {o} with the {r}."),
    "pick_clean_then_place_in_recep": ("put a clean {o} in {r}.", "clean some {o} and put it in {r}."),
    "pick_heat_then_place_in_recep": ("put a hot {o} in {r}.", "heat some {o} and put it in {r}."),
    "pick_cool_then_place_in_recep": ("put a cool {o} in {r}.", "cool some {o} and put it in {r}."),
    "pick_two_obj_and_place": ("put two {o} in {r}.", "find two {o} and put them in {r}."),
}
_TREATMENT = {
    # task type -> (key of Affordances.actions, predicate of the state)
    "pick_clean_then_place_in_recep": ("Cleanable", "isClean"),
    "pick_heat_then_place_in_recep": ("Heatable", "isHot"),
    "pick_cool_then_place_in_recep": ("Coolable", "isCool"),
}
_PLACE_GOAL = """\
(exists (?r - receptacle) (exists (?o - object)
    (and {treated}(objectType ?o {o}Type) (receptacleType ?r {r}Type) (inReceptacle ?o ?r))))"""
_PLACE_TWO_GOAL = """\
(exists (?r - receptacle) (exists (?o1 - object)
    (and (objectType ?o1 {o}Type) (receptacleType ?r {r}Type) (inReceptacle ?o1 ?r)
        (exists (?o2 - object)
            (and (not (= ?o1 ?o2)) (objectType ?o2 {o}Type) (receptacleType ?r {r}Type) (inReceptacle ?o2 ?r))))))"""
_LOOK_GOAL = """\
(exists (?ot - object ?r - receptacle ?a - agent ?l - location)
    (and (objectType ?ot {r}Type) (toggleable ?ot) (isToggled ?ot)
        (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r)))
(exists (?o - object ?a - agent) (and (objectType ?o {o}Type) (holds ?a ?o)))"""


class GenerationError(RuntimeError):
    """Games could not be made; the message says why and what to do."""


@dataclass(frozen=True)
class Assets:
    """What the generator takes from the ``alfworld`` package."""

    domain: str
    grammar: str
    affordances: Affordances


@dataclass(frozen=True)
class Assignment:
    """What a game is about. ``target`` is a receptacle class, or the lamp class of a look-at task."""

    task_type: str
    object_class: str
    target: str


def generate(out: str | os.PathLike[str], counts: Mapping[str, int], *, seed: int = 0, overwrite: bool = False) -> Path:
    """Writes ``counts[split]`` games per split below ``out/json_2.1.1``; returns that folder.

    Everything is written beside ``out`` first and moved there when complete.

    Raises:
        GenerationError: ``out`` is in use, or ``alfworld``'s data files are missing.
        ValueError: an unknown split, a negative count, or no game at all.
    """
    _check_counts(counts)
    out = Path(out).expanduser().absolute()
    _check_destination(out, overwrite)
    assets = load_assets()
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.{os.getpid()}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        with tqdm(total=sum(counts.values()), desc="ALFWorld games", unit="game", disable=None) as progress:
            for split, count in counts.items():
                for index in range(count):
                    _write_game(draft / "json_2.1.1", split, index, seed, assets)
                    progress.update()
        _write_manifest(draft / "json_2.1.1", counts, seed)
        if out.exists():
            shutil.rmtree(out)
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return out / "json_2.1.1"


def ensure_generated(out: str | os.PathLike[str], counts: Mapping[str, int], *, seed: int = 0) -> Path:
    """Generates the set unless it is there already; safe when several processes ask at once.

    Raises:
        GenerationError: ``out`` holds another set (other counts, seed or generator), or something else.
    """
    out = Path(out).expanduser().absolute()
    root = out / "json_2.1.1"
    with _locked(out.with_name(f".{out.name}.lock")):
        if not (root / MANIFEST_FILE).is_file():
            return generate(out, counts, seed=seed)
        found, wanted = json.loads((root / MANIFEST_FILE).read_text()), manifest(counts, seed)
        if found != wanted:
            raise GenerationError(
                f"{out} holds another generated set ({found}) than the one asked for ({wanted}); "
                "point env.generated.dir elsewhere or delete the folder"
            )
    return root


def manifest(counts: Mapping[str, int], seed: int) -> dict[str, Any]:
    """What identifies a generated set."""
    return {
        "generator": GENERATOR_VERSION,
        "alfworld": alfworld_version(),
        "seed": seed,
        "counts": {split: count for split, count in counts.items() if count},
    }


def make_game(split: str, index: int, seed: int, assets: Assets) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """One solvable game: its folder below the split, the ``game.tw-pddl`` object and the ``traj_data.json`` object."""
    rng = random.Random(f"{seed}/{split}/{index}")
    task_type = TASK_TYPES[index % len(TASK_TYPES)]
    trial = f"trial_G{seed:08d}_{split.replace('_', '')}_{index:06d}"
    while True:
        kind = rng.choice(ROOM_KINDS[task_type])
        number = rng.choice(plan_numbers(split, kind))
        made = _try_make(task_type, floor_plan(number, kind, seed), rng, assets, trial)
        if made is not None:
            break
    assignment, data, sentence = made
    folder = f"{task_type}-{assignment.object_class}-None-{assignment.target}-{number}/{trial}"
    return folder, data, _trajectory(assignment, number, trial, sentence)


def _try_make(
    task_type: str, plan: FloorPlan, rng: random.Random, assets: Assets, trial: str
) -> tuple[Assignment, dict[str, Any], str] | None:
    """One draw of assignment and objects; None if the room does not allow it or it is not a game."""
    affordances = assets.affordances
    assignment = _draw_assignment(task_type, plan.kind, set(plan.receptacles.values()), rng, affordances)
    if assignment is None:
        return None
    is_look = task_type == "look_at_obj_in_light"
    stray_lamp = rng.choice(("", "", *LAMPS[plan.kind]))
    room = furnish(
        plan,
        rng,
        affordances,
        wanted=assignment.object_class,
        copies=rng.randint(1, 2) + (task_type == "pick_two_obj_and_place"),
        kept_out_of="" if is_look else assignment.target,
        lamp=assignment.target if is_look else stray_lamp,
    )
    if room is None:
        return None
    names = {"o": assignment.object_class.lower(), "r": assignment.target.lower()}
    sentence = rng.choice(_SENTENCES[task_type]).format(**names)
    data = {
        "pddl_domain": assets.domain,
        "grammar": assets.grammar.replace("UNKNOWN GOAL.", sentence),
        "pddl_problem": problem_text(room, assignment, affordances, f"plan_{trial}"),
        "solvable": True,
        "walkthrough": [],
    }
    plan_found = solve(parse_game(data, where=trial))
    if not plan_found:
        return None
    data["walkthrough"] = list(plan_found)
    return assignment, data, sentence


def _draw_assignment(
    task_type: str, kind: str, receptacles: set[str], rng: random.Random, affordances: Affordances
) -> Assignment | None:
    """An object class and a target that ALFWorld's tables allow together, or None if the room has no such pair."""
    if task_type == "look_at_obj_in_light":
        return Assignment(task_type, rng.choice(OBJECTS[kind]), rng.choice(LAMPS[kind]))
    pairs = [
        (cls, target)
        for cls in OBJECTS[kind]
        for target in sorted(receptacles)
        if cls in affordances.holds.get(target, ())
        and (task_type not in _TREATMENT or cls in affordances.actions[_TREATMENT[task_type][0]])
    ]
    return Assignment(task_type, *rng.choice(pairs)) if pairs else None


def problem_text(room: Room, assignment: Assignment, affordances: Affordances, name: str) -> str:
    """The PDDL problem."""
    plan = room.plan
    lines = [f"(define (problem {name})", "(:domain alfred)", "(:objects", "agent1 - agent"]
    lines += _declarations(room, assignment)
    lines += [")", "(:init"]
    for receptacle, cls in plan.receptacles.items():
        lines.append(f"(receptacleType {receptacle} {cls}Type)")
        lines.append(f"(receptacleAtLocation {receptacle} {plan.location_of[receptacle]})")
        if cls in affordances.openable:
            lines.append(f"(openable {receptacle})")
    for thing, cls in room.objects.items():
        lines += _object_facts(room, thing, cls, affordances)
    object_classes = sorted(set(room.objects.values()))
    for receptacle_class in sorted(set(plan.receptacles.values())):
        for cls in object_classes:
            if cls in affordances.holds.get(receptacle_class, ()):
                lines.append(f"(canContain {receptacle_class}Type {cls}Type)")
    lines += [f"(atLocation agent1 {room.start})", ")", f"(:goal (and {_goal_text(assignment)}))", ")"]
    return "\n".join(lines) + "\n"


def _declarations(room: Room, assignment: Assignment) -> Iterator[str]:
    """Every entity with its PDDL type. The types named by the domain must exist even where no such thing does."""
    plan = room.plan
    object_types = {*room.objects.values(), "Knife", "ButterKnife"}
    receptacle_types = {*plan.receptacles.values(), "Microwave", "Fridge", "SinkBasin"}
    locations = {*plan.location_of.values(), *room.at.values(), room.start}
    for cls in sorted(object_types):
        yield f"{cls}Type - otype"
    for cls in sorted(receptacle_types):
        yield f"{cls}Type - rtype"
    for thing in room.objects:
        yield f"{thing} - object"
    for receptacle in plan.receptacles:
        yield f"{receptacle} - receptacle"
    for location in sorted(locations):
        yield f"{location} - location"


def _object_facts(room: Room, thing: str, cls: str, affordances: Affordances) -> Iterator[str]:
    yield f"(objectType {thing} {cls}Type)"
    yield f"(objectAtLocation {thing} {room.at[thing]})"
    if thing in room.inside:
        yield f"(inReceptacle {thing} {room.inside[thing]})"
        if not cls.endswith("Lamp"):
            yield f"(pickupable {thing})"
    for action in ("Cleanable", "Heatable", "Coolable", "Toggleable", "Sliceable"):
        if cls in affordances.actions[action]:
            yield f"({action.lower()} {thing})"
    if cls in affordances.containers:
        yield f"(isReceptacleObject {thing})"


def _goal_text(assignment: Assignment) -> str:
    names = {"o": assignment.object_class, "r": assignment.target}
    if assignment.task_type == "look_at_obj_in_light":
        return _LOOK_GOAL.format(**names)
    if assignment.task_type == "pick_two_obj_and_place":
        return _PLACE_TWO_GOAL.format(**names)
    action, state = _TREATMENT.get(assignment.task_type, ("", ""))
    treated = f"({action.lower()} ?o) ({state} ?o) " if state else ""
    return _PLACE_GOAL.format(treated=treated, **names)


def _trajectory(assignment: Assignment, number: int, trial: str, sentence: str) -> dict[str, Any]:
    """The part of ALFRED's ``traj_data.json`` that ALFWorld's text games use."""
    is_look = assignment.task_type == "look_at_obj_in_light"
    return {
        "task_id": trial,
        "task_type": assignment.task_type,
        "pddl_params": {
            "mrecep_target": "",
            "object_sliced": False,
            "object_target": assignment.object_class,
            "parent_target": "" if is_look else assignment.target,
            "toggle_target": assignment.target if is_look else "",
        },
        "scene": {"floor_plan": f"FloorPlan{number}", "scene_num": number},
        "turk_annotations": {"anns": [{"task_desc": sentence, "high_descs": []}]},
    }


def alfworld_version() -> str:
    """The installed version of ``alfworld``.

    Raises:
        GenerationError: it is not installed; the message has the command.
    """
    try:
        return version("alfworld")
    except PackageNotFoundError as error:
        raise GenerationError(
            f"generating games needs the data files of the alfworld package: `{ALFWORLD_DATA_PACKAGE}` (0.4 MB)"
        ) from error


@lru_cache(maxsize=1)
def load_assets() -> Assets:
    """Reads rules, wording and affordances out of the installed ``alfworld`` package without importing it.

    Importing would pull in TextWorld, a planner and a compiler's work; three files are all that is needed.
    """
    alfworld_version()
    spec = importlib.util.find_spec("alfworld")
    if spec is None or not spec.submodule_search_locations:
        raise GenerationError(f"the alfworld package is damaged; reinstall it: `{ALFWORLD_DATA_PACKAGE}`")
    package = Path(next(iter(spec.submodule_search_locations)))
    tables = _load_module(package / "gen" / "constants.py")
    return Assets(
        domain=(package / "data" / "alfred.pddl").read_text(encoding="utf-8"),
        grammar=(package / "data" / "alfred.twl2").read_text(encoding="utf-8"),
        affordances=Affordances(
            holds={cls: frozenset(objects) for cls, objects in tables.VAL_RECEPTACLE_OBJECTS.items()},
            actions={action: frozenset(objects) for action, objects in tables.VAL_ACTION_OBJECTS.items()},
            containers=frozenset(tables.MOVABLE_RECEPTACLES),
            openable=frozenset(tables.OPENABLE_CLASS_LIST) - frozenset(tables.MOVABLE_RECEPTACLES),
        ),
    )


def _load_module(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_alfworld_constants", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise GenerationError(f"{file} is missing; reinstall the package: `{ALFWORLD_DATA_PACKAGE}`")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check_counts(counts: Mapping[str, int]) -> None:
    unknown = [split for split in counts if split not in EXPECTED]
    if unknown:
        raise ValueError(f"unknown split {unknown[0]!r}; splits are {', '.join(EXPECTED)}")
    negative = [split for split, count in counts.items() if count < 0]
    if negative:
        raise ValueError(f"{counts[negative[0]]} games for {negative[0]}: a count must not be negative")
    if not any(counts.values()):
        raise ValueError("no games asked for: give at least one split a positive count")


def _check_destination(out: Path, overwrite: bool) -> None:
    """``out`` must be free; with ``overwrite``, an earlier generated set may go, but nothing else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise GenerationError(f"{out} exists already; pass --overwrite to replace it, or name another folder")
    if not (out / "json_2.1.1" / MANIFEST_FILE).is_file():
        raise GenerationError(f"{out} is not a generated set, so --overwrite leaves it alone; name another folder")


def _write_game(root: Path, split: str, index: int, seed: int, assets: Assets) -> None:
    name, data, trajectory = make_game(split, index, seed, assets)
    folder = root / split / name
    folder.mkdir(parents=True)
    (folder / GAME_FILE).write_text(json.dumps(data), encoding="utf-8")
    (folder / TRAJECTORY_FILE).write_text(json.dumps(trajectory), encoding="utf-8")


def _write_manifest(root: Path, counts: Mapping[str, int], seed: int) -> None:
    (root / MANIFEST_FILE).write_text(json.dumps(manifest(counts, seed), indent=1) + "\n", encoding="utf-8")


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="generate", description="Make ALFWorld games in the real format.")
    parser.add_argument("out", metavar="OUT", help="folder to make; the games go to OUT/json_2.1.1/<split>/")
    for split in EXPECTED:
        parser.add_argument(f"--{split.replace('_', '-')}", type=int, default=0, metavar="N", help="games (default 0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier generated set")
    options = parser.parse_args(arguments)
    counts = {split: getattr(options, split) for split in EXPECTED}
    try:
        root = generate(options.out, counts, seed=options.seed, overwrite=options.overwrite)
    except (GenerationError, ValueError, OSError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 1
    print(f"{sum(counts.values())} games below {root}; play them with env.data_dir={root.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
