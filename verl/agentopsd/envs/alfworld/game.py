"""One ALFWorld game file, parsed once into an immutable :class:`Game` that all its episodes share.

A ``game.tw-pddl`` is a JSON object with a PDDL domain (the rules), a PDDL problem (rooms, objects, goal), a text
grammar and a walkthrough. Rules and grammar are the same in every game of ALFWorld, so the engine knows them by heart
and reads only the problem and the task sentence; a file with other rules is refused rather than played approximately.

Entities go by their lower-cased PDDL ids (``apple_bar__plus_00_dot_78_bar_...``); ``Game.names`` has the names that the
player sees (``apple 1``).
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

Facts = Mapping[str, list[tuple[str, ...]]]
"""Lower-cased predicate -> its argument tuples, in the order of the file."""

REQUIRED_FIELDS = ("pddl_domain", "grammar", "pddl_problem", "solvable", "walkthrough")
STATES = ("isclean", "ishot", "iscool", "istoggled", "issliced")
_AFFORDANCES = ("openable", "pickupable", "toggleable", "heatable", "coolable", "cleanable", "sliceable")

_FACT = re.compile(r"\((\w+)\s+([^()]*?)\)")
_TASK = re.compile(r'Your task is to: [^"\\]*')
_OLD_GRAMMAR = re.compile(r'template :: "put \{o\} (?:in|on|in/on) \{r\}"')
_CURRENT_GRAMMAR = 'template :: "move {o} to {r}"'

# Fingerprints of the rules the engine implements: json_2.1.1 as published, and the files inside alfworld 0.4.2. They
# differ in one line (does a receptacle of SinkType clean?), so the value is the set of types that clean.
_DOMAINS = {
    "9549a55d7ecd967f": frozenset({"sinkbasintype", "sinktype"}),
    "68c0c8ed4392a559": frozenset({"sinkbasintype"}),
}
_GRAMMARS = {"0799a5c634545513", "9f506a0ed041c9d6"}


class GameFileError(ValueError):
    """A game file that cannot be played. The message names the file and says why."""


@dataclass(frozen=True)
class Goal:
    """What wins the game.

    Attributes:
        kind: ``place`` (one of ``objects`` in a target), ``place_two`` (two in the same target) or ``look`` (hold one
            of ``objects`` beside a lit lamp of ``targets``).
        objects: the ids that count: of the right type, and heatable and so on where the goal says so.
        targets: receptacle ids, or lamp ids when ``kind`` is ``look``.
        state: ``isclean``, ``ishot``, ``iscool`` or None.
    """

    kind: str
    objects: frozenset[str]
    targets: frozenset[str]
    state: str | None = None


@dataclass(frozen=True)
class Game:
    """The unchanging part of a game, shared by episodes and threads: read its containers, never write them.

    Attributes:
        task: the task sentence, ``Your task is to: ...``.
        walkthrough: commands that win from the start with full knowledge.
        names: id -> the name shown to the player.
        receptacles: sorted ids.
        location_of: receptacle -> location. Several receptacles may share one.
        receptacles_at: location -> sorted receptacles there; locations without any are absent.
        can_contain: (receptacle type, object type) pairs that ``move`` accepts.
        contents: receptacle -> sorted ids of what is in it at the start. One object can be in several receptacles.
        nested: receptacle-like object (a bowl, a box) -> sorted ids of what is in it, which no action changes.
        object_locations: object -> locations it is at, which need not be that of its receptacle.
        states: one of ``STATES`` -> ids that have it at the start.
    """

    task: str
    walkthrough: tuple[str, ...]
    goal: Goal
    names: Mapping[str, str]
    receptacles: tuple[str, ...]
    location_of: Mapping[str, str]
    receptacles_at: Mapping[str, tuple[str, ...]]
    receptacle_type: Mapping[str, str]
    object_type: Mapping[str, str]
    can_contain: frozenset[tuple[str, str]]
    openable: frozenset[str]
    pickupable: frozenset[str]
    toggleable: frozenset[str]
    heatable: frozenset[str]
    coolable: frozenset[str]
    cleanable: frozenset[str]
    sliceable: frozenset[str]
    receptacle_like: frozenset[str]
    sink_types: frozenset[str]
    start: str
    contents: Mapping[str, tuple[str, ...]]
    nested: Mapping[str, tuple[str, ...]]
    object_locations: Mapping[str, frozenset[str]]
    opened: frozenset[str]
    states: Mapping[str, frozenset[str]]
    location_actions: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict, repr=False, compare=False)
    """A cache of the engine: location -> the commands that depend on nothing else."""


def parse_game(data: Mapping[str, Any], where: str = "game") -> Game:
    """Reads the decoded JSON of a ``game.tw-pddl``; ``where`` names the file in errors.

    Raises:
        GameFileError: a missing field, an unsolvable game, the old "put ... in/on" wording, unknown rules, or a problem
            the engine cannot make sense of.
    """
    missing = [name for name in REQUIRED_FIELDS if name not in data]
    if missing:
        raise GameFileError(f"{where}: not a playable game file, it lacks {', '.join(missing)}")
    if data["solvable"] is not True:
        raise GameFileError(f"{where}: the game is marked as unsolvable")
    texts = ("grammar", "pddl_domain", "pddl_problem")
    if wrong := [name for name in texts if not isinstance(data[name], str)]:
        raise GameFileError(f"{where}: not a playable game file, {wrong[0]} is no text")
    walkthrough = data["walkthrough"]
    if not isinstance(walkthrough, list) or not all(isinstance(command, str) for command in walkthrough):
        raise GameFileError(f"{where}: not a playable game file, walkthrough is no list of commands")
    task = _check_grammar(data["grammar"], where)
    sink_types = _check_domain(data["pddl_domain"], where)
    try:
        return _parse_problem(data["pddl_problem"], task, tuple(walkthrough), sink_types)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise GameFileError(f"{where}: the PDDL problem is damaged or not an ALFWorld one ({error!r})") from error


def _check_grammar(grammar: str, where: str) -> str:
    """The task sentence of a grammar whose wording the engine knows."""
    if _OLD_GRAMMAR.search(grammar):
        raise GameFileError(
            f'{where}: this file has the old "put X in/on Y" wording; ALFWorld now says "move X to Y": '
            "fetch the current games with scripts/get_alfworld_data.py"
        )
    task = _TASK.search(grammar)
    if task is None:
        raise GameFileError(f'{where}: the grammar has no "Your task is to: ..." sentence')
    fixed = grammar[: task.start()] + grammar[task.end() :]
    if _CURRENT_GRAMMAR not in grammar or _fingerprint(fixed) not in _GRAMMARS:
        raise GameFileError(
            f"{where}: a text grammar that the exact engine does not know; play it with env.backend=textworld"
        )
    return task.group(0)


def _check_domain(domain: str, where: str) -> frozenset[str]:
    """The receptacle types that clean, under rules that the engine knows."""
    sink_types = _DOMAINS.get(_fingerprint(domain))
    if sink_types is None:
        raise GameFileError(
            f"{where}: a PDDL domain that the exact engine does not know; play it with env.backend=textworld"
        )
    return sink_types


@lru_cache(maxsize=64)
def _fingerprint(text: str) -> str:
    """16 hex digits that ignore PDDL comments and spacing."""
    code = re.sub(r"(?m)^\s*;.*$|\s;.*$", "", text)
    return hashlib.sha256(" ".join(code.split()).encode()).hexdigest()[:16]


def _parse_problem(problem: str, task: str, walkthrough: tuple[str, ...], sink_types: frozenset[str]) -> Game:
    init_at, goal_at = problem.index("(:init"), problem.index("(:goal")
    facts = _read_facts(problem[init_at:goal_at])

    location_of = _function(facts, "receptacleatlocation")
    receptacles = tuple(sorted(location_of))
    object_type, receptacle_type = _function(facts, "objecttype"), _function(facts, "receptacletype")
    affordances = {name: _ids(facts, name) for name in _AFFORDANCES}
    ((_agent, start),) = facts["atlocation"]
    return Game(
        task=task,
        walkthrough=walkthrough,
        goal=_parse_goal(problem[goal_at:].lower(), object_type, receptacle_type, affordances),
        names=_player_names({entity for rows in facts.values() for row in rows for entity in row}),
        receptacles=receptacles,
        location_of=location_of,
        receptacles_at=_grouped((location_of[r], r) for r in receptacles),
        receptacle_type=receptacle_type,
        object_type=object_type,
        can_contain=frozenset((r, o) for r, o in facts.get("cancontain", ())),
        receptacle_like=_ids(facts, "isreceptacleobject"),
        sink_types=sink_types,
        start=start,
        contents=_grouped((r, o) for o, r in facts.get("inreceptacle", ())),
        nested=_grouped((outer, inner) for inner, outer in facts.get("inreceptacleobject", ())),
        object_locations={o: frozenset(at) for o, at in _grouped(facts.get("objectatlocation", ())).items()},
        opened=_ids(facts, "opened"),
        states={name: _ids(facts, name) for name in STATES},
        openable=affordances["openable"],
        pickupable=affordances["pickupable"],
        toggleable=affordances["toggleable"],
        heatable=affordances["heatable"],
        coolable=affordances["coolable"],
        cleanable=affordances["cleanable"],
        sliceable=affordances["sliceable"],
    )


def _read_facts(init: str) -> Facts:
    facts: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for predicate, arguments in _FACT.findall(init.lower()):
        facts[predicate].append(tuple(arguments.split()))
    return facts


def _ids(facts: Facts, predicate: str) -> frozenset[str]:
    return frozenset(row[0] for row in facts.get(predicate, ()))


def _function(facts: Facts, predicate: str) -> dict[str, str]:
    """A two-place predicate that gives every first argument exactly one second argument."""
    rows = facts[predicate]
    mapping = {first: second for first, second in rows}
    if len(mapping) != len(set(rows)):
        raise ValueError(f"{predicate} gives one entity two values")
    return mapping


def _grouped(pairs: Iterable[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    groups: dict[str, set[str]] = defaultdict(set)
    for key, value in pairs:
        groups[key].add(value)
    return {key: tuple(sorted(values)) for key, values in groups.items()}


def _player_names(entities: Iterable[str]) -> dict[str, str]:
    """Ids -> names, as ALFWorld's ``Demangler`` gives them.

    Quirks kept: numbers count down along the sorted ids, and "basin" anywhere in an id puts it into the class name
    (``Sink|..|SinkBasin`` is a sinkbasin).
    """
    class_of = {}
    for entity in entities:
        name, separator, _ = entity.partition("_bar_")
        if separator:
            class_of[entity] = name + ("basin" if "basin" in entity else "")
    next_number = Counter(class_of.values())
    names = {}
    for entity in sorted(class_of):
        names[entity] = f"{class_of[entity]} {next_number[class_of[entity]]}"
        next_number[class_of[entity]] -= 1
    return names


def _parse_goal(
    goal: str,
    object_type: Mapping[str, str],
    receptacle_type: Mapping[str, str],
    affordances: Mapping[str, frozenset[str]],
) -> Goal:
    def typed(pattern: str, types: Mapping[str, str]) -> frozenset[str]:
        found = re.search(pattern, goal)
        if found is None:
            raise ValueError("the goal names no type")
        return frozenset(entity for entity, kind in types.items() if kind == found.group(1))

    objects = typed(r"\(objecttype \?o1? (\w+)\)", object_type)
    if "(istoggled ?ot)" in goal:
        lamps = typed(r"\(objecttype \?ot (\w+)\)", object_type)
        return Goal("look", objects, lamps & affordances["toggleable"])
    targets = typed(r"\(receptacletype \?r (\w+)\)", receptacle_type)
    if "?o2" in goal:
        return Goal("place_two", objects, targets)
    for affordance in ("cleanable", "heatable", "coolable"):
        if f"({affordance} ?o)" in goal:
            objects &= affordances[affordance]
    state = re.search(r"\((isclean|ishot|iscool) \?o\)", goal)
    return Goal("place", objects, targets, state.group(1) if state else None)
