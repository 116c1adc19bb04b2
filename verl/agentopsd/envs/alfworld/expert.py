"""An ALFWorld player that searches by text only, and a measured way to make it clumsy.

The expert sees what a language model sees: the opening, the task sentence and the answers of the game. It keeps a
small picture of the world (where it stands, what it holds, what it saw where), searches the likeliest unvisited
place first and then does what the task asks. It is used to clone the tiny model, to prove that generated games are
solvable, and in tests and demos.

:class:`Clumsiness` degrades it in the two ways a skill text can repair: without *general* skill it wanders and
dawdles, without *specific* skill it forgets the step that the task type needs (cleaning, the lamp, the second object).
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

Prior = Mapping[str, Mapping[str, float]]
"""``prior[receptacle type][object type]``: share of such receptacles that hold such an object at the start."""

PRIOR_FILE = Path(__file__).with_name("prior.json")

NOTHING_HAPPENS = "Nothing happens."
STATIONS = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
_OPENABLE = frozenset({"drawer", "cabinet", "fridge", "microwave", "safe"})

_THING = re.compile(r"\ba (\w+ \d+)")
_ARRIVED = re.compile(r"You arrive at (\w+ \d+)\.")
_CLOSED = re.compile(r"(?:The (\w+ \d+) is closed|You close the (\w+ \d+))\.")
_CONTENTS = re.compile(r"(?:On the (\w+ \d+)|The (\w+ \d+) is open\. In it), you see (.*)\.")
_TAKEN = re.compile(r"You pick up the (\w+ \d+) from the (\w+ \d+)\.")
_MOVED = re.compile(r"You move the (\w+ \d+) to the (\w+ \d+)\.")
_TREATED = re.compile(r"You (?:clean|heat|cool) the ")

_ONE = r"(?:some|an?|the)"
_OBJECT = r"(?P<object>\w+)"
_PLACE = r"(?:in|on) (?:the |a )?(?P<place>\w+)"
_GOALS = (
    ("look", re.compile(rf"(?:examine|look at) (?:the |an? |some )?{_OBJECT} (?:with|under) the (?P<place>\w+)")),
    ("two", re.compile(rf"(?:find|put) two {_OBJECT} (?:and put them )?{_PLACE}")),
    ("put", re.compile(rf"(?P<treatment>clean|cool|heat) {_ONE} {_OBJECT} and put it {_PLACE}")),
    ("put", re.compile(rf"put {_ONE} (?:(?P<treatment>clean|cool|hot) )?{_OBJECT} {_PLACE}")),
)


@dataclass(frozen=True)
class Goal:
    """What a task sentence asks for: ``kind`` is put, two or look; ``place`` is the target's (or the lamp's) type."""

    kind: str
    object: str
    place: str
    treatment: str | None = None


def parse_goal(task: str) -> Goal:
    """Reads ALFWorld's task sentence, with or without ``Your task is to:``.

    Raises:
        ValueError: the sentence has none of ALFWorld's forms.
    """
    sentence = task.strip().rstrip(".").lower()
    for kind, pattern in _GOALS:
        match = pattern.search(sentence)
        if match:
            words = match.groupdict()
            treatment = words.get("treatment")
            return Goal(kind, words["object"], words["place"], "heat" if treatment == "hot" else treatment)
    raise ValueError(f"task sentence has none of ALFWorld's forms: {task!r}")


@dataclass(frozen=True)
class Clumsiness:
    """Probabilities by which a player without skill strays; every one is per decision.

    Without general skill: ``aimless`` goes to a random receptacle instead of the likeliest unvisited one, ``dawdle``
    gives a useless command, ``wrong_object`` takes something that was not asked for; the first two are multiplied by
    a factor drawn once per episode from ``spread``. Without specific skill: ``forget`` misses the step that the task
    type needs, and each later turn notices it with ``recover``.
    """

    aimless: float = 0.6
    dawdle: float = 0.35
    wrong_object: float = 0.08
    forget: float = 0.8
    recover: float = 0.05
    spread: tuple[float, float] = (0.7, 1.3)


def kind_of(name: str) -> str:
    """``"cabinet 12"`` -> ``"cabinet"``."""
    return name.split()[0]


def build_prior(rooms: Iterable[Mapping[str, Sequence[str]]]) -> dict[str, dict[str, float]]:
    """Counts where things are.

    Args:
        rooms: for each game its receptacles by name with the names of the objects in them at the start.
    """
    seen: Counter[str] = Counter()
    holds: dict[str, Counter[str]] = defaultdict(Counter)
    for room in rooms:
        for receptacle, objects in room.items():
            seen[kind_of(receptacle)] += 1
            holds[kind_of(receptacle)].update({kind_of(thing) for thing in objects})
    return {
        place: {thing: round(count / seen[place], 4) for thing, count in sorted(holds[place].items())}
        for place in sorted(seen)
    }


def write_prior(prior: Prior, path: Path) -> None:
    path.write_text(json.dumps(prior, separators=(",", ":")) + "\n", encoding="utf-8")


@cache
def load_prior(path: Path = PRIOR_FILE) -> Prior:
    """The prior counted on ALFWorld's train games, shipped beside this file."""
    return json.loads(path.read_text(encoding="utf-8"))


@dataclass
class Beliefs:
    """What the text has shown so far. Names are the game's, such as ``"drawer 3"``."""

    receptacles: list[str]
    here: str | None = None
    held: str | None = None
    contents: dict[str, list[str]] = field(default_factory=dict)
    closed: dict[str, bool] = field(default_factory=dict)
    searched: set[str] = field(default_factory=set)
    same_spot: set[tuple[str, str]] = field(default_factory=set)

    def update(self, command: str, answer: str) -> None:
        if answer == NOTHING_HAPPENS:
            destination = command.removeprefix("go to ")
            if self.here and destination != command and destination in self.receptacles:
                self.same_spot.add((self.here, destination))
            return
        if match := _ARRIVED.match(answer):
            self.here = match[1]
        if match := _CLOSED.search(answer):
            receptacle = match[1] or match[2]
            self._stand_before(receptacle, command)
            self.closed[receptacle] = True
            if match[1]:
                self.searched.discard(receptacle)
        if match := _CONTENTS.search(answer):
            receptacle = match[1] or match[2]
            self._stand_before(receptacle, command)
            self.closed[receptacle] = False
            self.contents[receptacle] = _THING.findall(match[3])
            self.searched.add(receptacle)
        if match := _TAKEN.match(answer):
            self.held = match[1]
            if match[1] in self.contents.get(match[2], ()):
                self.contents[match[2]].remove(match[1])
        if match := _MOVED.match(answer):
            self.held = None
            self.contents.setdefault(match[2], []).append(match[1])

    def _stand_before(self, receptacle: str, command: str) -> None:
        """Several receptacles can share a spot; ``examine`` then turns to the other one."""
        if self.here and receptacle != self.here and command.startswith("examine "):
            others = {other for spot, other in self.same_spot if spot == self.here} - {receptacle}
            self.same_spot |= {(receptacle, self.here)} | {(receptacle, other) for other in others}
            self.here = receptacle


class SearchExpert:
    """Plays one episode: alternate :meth:`act` and :meth:`observe`.

    Args:
        opening: any text that lists the receptacles ("You see a bed 1, a desk 1, ...").
        task: the task sentence.
        general: plays with the general skill; without it ``clumsiness`` applies.
        specific: plays with the skill of the task type; without it ``clumsiness`` applies.
        clumsiness: how strongly a missing skill shows.
        prior: where things usually are; None is the shipped one, an empty mapping is no prior.
        rng: source of all randomness; None is a fixed seed.
    """

    def __init__(
        self,
        opening: str,
        task: str,
        *,
        general: bool = True,
        specific: bool = True,
        clumsiness: Clumsiness = Clumsiness(),  # noqa: B008 (frozen)
        prior: Prior | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.goal = parse_goal(task)
        self.general, self.specific, self.clumsiness = general, specific, clumsiness
        self.rng = rng or random.Random(0)
        self.prior = load_prior() if prior is None else prior
        self.world = Beliefs(_THING.findall(opening))
        self.target: str | None = None
        self.delivered: list[str] = []
        self.treated = self.goal.treatment is None
        self.forgetful: bool | None = None
        self.lost = False
        self._stray = self.rng.uniform(*clumsiness.spread)
        self._search_order = self._likeliest_first(self.goal.object)
        self._lamp_order = self._likeliest_first(self.goal.place) if self.goal.kind == "look" else []

    def act(self) -> str:
        """The next command."""
        command = self._decide()
        if command.startswith("go to ") and (self.world.here, command[6:]) in self.world.same_spot:
            command = "examine " + command[6:]
        return command

    def observe(self, command: str, answer: str) -> None:
        """Takes in the game's answer to ``command``."""
        self.world.update(command, answer)
        if match := _TAKEN.match(answer):
            if kind_of(match[1]) == self.goal.object:
                self.treated, self.forgetful = self.goal.treatment is None, None
        if _TREATED.match(answer):
            self.treated = True
        if match := _MOVED.match(answer):
            if kind_of(match[1]) == self.goal.object and kind_of(match[2]) == self.goal.place:
                self.delivered.append(match[1])
                self.target = match[2]
                self.lost = self._loses_the_thread()

    def _likeliest_first(self, thing: str) -> list[str]:
        def rank(receptacle: str) -> tuple[float, str, int]:
            place, number = receptacle.split()
            return (-self.prior.get(place, {}).get(thing, 0.0), place, int(number))

        return sorted(self.world.receptacles, key=rank)

    def _chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def _loses_the_thread(self) -> bool:
        """The object is delivered but the task is not done: does an unskilled player know what is missing?"""
        if not self.treated:
            return True
        return self.goal.kind == "two" and not self.specific and self._chance(0.75 * self.clumsiness.forget)

    def _forgets(self) -> bool:
        """Decides once per object whether the step of the task type is forgotten."""
        if self.specific:
            return False
        if self.forgetful is None:
            self.forgetful = self._chance(self.clumsiness.forget)
        return self.forgetful

    def _decide(self) -> str:
        world, goal = self.world, self.goal
        if not self.general and self._chance(self.clumsiness.dawdle * self._stray):
            return self._dawdle()
        if self.lost:
            if not self.specific and not self._chance(self.clumsiness.recover):
                return self._dawdle()
            self.lost, self.forgetful = False, False if goal.treatment else None
            if goal.treatment:
                self.delivered = []
        if world.held is None:
            return self._fetch()
        if kind_of(world.held) != goal.object:
            return f"move {world.held} to {world.here}"
        if goal.kind == "look":
            return self._use_lamp()
        if not self.treated and not self._forgets():
            station = f"{STATIONS[goal.treatment or '']} 1"
            return self._reach(station, f"{goal.treatment} {world.held} with {station}")
        target = self.target or f"{goal.place} 1"
        return self._reach(target, None if world.closed.get(target) else f"move {world.held} to {target}")

    def _reach(self, receptacle: str, then: str | None) -> str:
        """Goes to ``receptacle``, opens it when ``then`` is None, else gives ``then``."""
        if self.world.here != receptacle:
            return f"go to {receptacle}"
        return then or f"open {receptacle}"

    def _fetch(self) -> str:
        receptacle, thing = self._locate(self.goal.object, self._search_order)
        if self.world.here != receptacle or self.world.closed.get(receptacle):
            return self._reach(receptacle, None)
        if thing:
            return f"take {thing} from {receptacle}"
        lying_here = self.world.contents.get(receptacle)
        if not self.general and lying_here and self._chance(self.clumsiness.wrong_object):
            return f"take {self.rng.choice(lying_here)} from {receptacle}"
        return f"go to {self._unsearched(self._search_order)}"

    def _use_lamp(self) -> str:
        world = self.world
        if self._forgets():
            if self._chance(1.5 * self.clumsiness.recover):
                self.forgetful = False
            else:
                anywhere = f"go to {self.rng.choice(world.receptacles)}"
                return self.rng.choice(
                    [f"examine {world.held}", f"examine {world.held}", "look", "inventory", anywhere]
                )
        receptacle, lamp = self._locate(self.goal.place, self._lamp_order)
        if world.here != receptacle or world.closed.get(receptacle):
            return self._reach(receptacle, None)
        return f"use {lamp}" if lamp else f"go to {self._unsearched(self._lamp_order)}"

    def _locate(self, thing: str, order: Sequence[str]) -> tuple[str, str | None]:
        """Where to go for a ``thing`` and, when it was seen there, which one."""
        two = self.goal.kind == "two"
        for receptacle, names in self.world.contents.items():
            if two and receptacle == self.target:
                continue
            for name in names:
                if kind_of(name) == thing and not (two and name in self.delivered):
                    return receptacle, name
        if not self.general and self._chance(self.clumsiness.aimless * self._stray):
            return self.rng.choice(self.world.receptacles), None
        return self._unsearched(order), None

    def _unsearched(self, order: Sequence[str]) -> str:
        for receptacle in order:
            if receptacle not in self.world.searched and receptacle != self.target:
                return receptacle
        return self.rng.choice(self.world.receptacles)

    def _dawdle(self) -> str:
        """A command that brings nothing: mostly wandering, sometimes looking around or fumbling."""
        world, draw = self.world, self.rng.random()
        anywhere = f"go to {self.rng.choice(world.receptacles)}"
        here = world.here
        if draw < 0.35 or draw >= 0.92:
            return anywhere
        if draw < 0.50:
            return "look"
        if draw < 0.62 or here is None:
            return "inventory" if draw < 0.62 else anywhere
        if draw < 0.74:
            return f"examine {here}"
        if draw < 0.82 and kind_of(here) in _OPENABLE and here in world.closed:
            return f"{'open' if world.closed[here] else 'close'} {here}"
        if world.held:
            return f"move {world.held} to {here}"
        return f"take {self.goal.object} 1 from {here}"
