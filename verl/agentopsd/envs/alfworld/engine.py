"""ALFWorld's text game in pure Python: the same text, the same admissible commands, the same ``won``.

The original re-parses its grammar for every admissible command of every step (70-200 ms a step, seconds a reset). The
rules are few and fixed, so here each is a small method over plain dictionaries (about 10 microseconds a step). Whatever
the original does, odd or not, is kept; the oddities are marked *quirk* with their cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from verl.agentopsd.envs.alfworld.game import STATES, Game
from verl.agentopsd.envs.base import Observation

NOTHING_HAPPENS: Final = "Nothing happens."
HELP: Final = """\
Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""

Action = tuple[str, ...]
"""A verb of ``_VERBS`` and the ids it acts on."""


class ExactEnv:
    """One episode of one :class:`Game`; implements ``TextEnv``.

    The state is held in small dictionaries of immutable values, so that :meth:`clone` is cheap enough for search.
    There is no step limit here: how long an episode may last is the rollout's business. As in the original, commands
    after the goal was reached are still answered.

    Attributes:
        location: where the agent is.
        held: the object in its hand, or None.
        contents: receptacle -> sorted ids of what is in it.
        object_locations: object -> the locations it is filed under.
        taken_out: (object, receptacle) for every object that was taken out and not put back.
        opened: ids of the open receptacles.
        states: ``isclean``, ``ishot``, ``iscool``, ``istoggled`` or ``issliced`` -> ids.
    """

    location: str
    held: str | None
    contents: dict[str, tuple[str, ...]]
    object_locations: dict[str, frozenset[str]]
    taken_out: frozenset[tuple[str, str]]
    opened: frozenset[str]
    states: dict[str, frozenset[str]]
    _won: bool
    _actions: dict[str, Action] | None
    _admissible: tuple[str, ...] | None

    def __init__(self, game: Game) -> None:
        self.game = game
        self.reset()

    def reset(self) -> Observation:
        """Starts (or starts again) from the game's first state."""
        game = self.game
        self.location = game.start
        self.held = None
        self.contents = dict(game.contents)
        self.object_locations = dict(game.object_locations)
        self.taken_out = frozenset()
        self.opened = game.opened
        self.states = dict(game.states)
        self._state_changed()
        intro = f"-= Welcome to TextWorld, ALFRED! =-\n\n{self._first_look()}\n\n{game.task}"
        return self._observation(intro, valid=True)

    def step(self, command: str) -> Observation:
        """Answers one command; an inadmissible one changes nothing and is answered by "Nothing happens."."""
        action = self.actions().get(command.strip())
        if action is None:
            return self._observation(NOTHING_HAPPENS, valid=False)
        verb, *arguments = action
        return self._observation(_VERBS[verb](self, *arguments), valid=True)

    def close(self) -> None:
        """Nothing to release."""

    @property
    def won(self) -> bool:
        """The goal holds in the present state."""
        return self._won

    def admissible(self) -> tuple[str, ...]:
        """Every command that is understood now, sorted."""
        if self._admissible is None:
            self._admissible = tuple(sorted(self.actions()))
        return self._admissible

    def clone(self) -> ExactEnv:
        """An independent episode in the same state."""
        twin = object.__new__(ExactEnv)
        twin.__dict__.update(self.__dict__)
        twin.contents = dict(self.contents)
        twin.object_locations = dict(self.object_locations)
        twin.states = dict(self.states)
        return twin

    def replay(self, commands: Iterable[str]) -> list[Observation]:
        """Resets and plays ``commands``; returns the observation of the reset and of each command."""
        return [self.reset(), *(self.step(command) for command in commands)]

    def actions(self) -> dict[str, Action]:
        """Admissible command -> what it does. Do not modify."""
        if self._actions is None:
            actions = dict(self._location_actions())
            self._add_receptacle_actions(actions)
            if self.held is not None:
                self._add_held_actions(actions, self.held)
            self._actions = actions
        return self._actions

    def _observation(self, text: str, valid: bool) -> Observation:
        return Observation(text, admissible=self.admissible(), won=self._won, done=self._won, valid=valid)

    def _state_changed(self) -> None:
        self._actions = None
        self._admissible = None
        self._won = self._goal_holds()

    def _location_actions(self) -> dict[str, Action]:
        """The commands that the location alone decides; computed once per game and location."""
        actions = self.game.location_actions.get(self.location)
        if actions is None:
            game, names = self.game, self.game.names
            actions = {"look": ("look",), "inventory": ("inventory",), "help": ("help",)}
            # Quirk: going to another receptacle of the same location is a no-op in the planner, hence not admissible.
            for receptacle in game.receptacles:
                if game.location_of[receptacle] != self.location:
                    actions[f"go to {names[receptacle]}"] = ("go", receptacle)
            for receptacle in self._here():
                actions[f"examine {names[receptacle]}"] = ("examine receptacle", receptacle)
            game.location_actions[self.location] = actions
        return actions

    def _add_receptacle_actions(self, actions: dict[str, Action]) -> None:
        game, names = self.game, self.game.names
        for receptacle in self._here():
            name = names[receptacle]
            if receptacle in game.openable:
                verb = "close" if receptacle in self.opened else "open"
                actions[f"{verb} {name}"] = (verb, receptacle)
            can_take = self.held is None and self._reachable(receptacle)
            for thing in self.contents.get(receptacle, ()):
                if can_take and thing in game.pickupable:
                    actions[f"take {names[thing]} from {name}"] = ("take", thing, receptacle)
                # Quirk: a lamp in a closed receptacle can be used.
                if thing in game.toggleable:
                    actions[f"use {names[thing]}"] = ("use", thing)

    def _add_held_actions(self, actions: dict[str, Action], held: str) -> None:
        game, names = self.game, self.game.names
        name, kind = names[held], game.object_type.get(held, "")
        # Quirk: a stray comma in the domain's precondition leaves only held objects open to examination.
        actions[f"examine {name}"] = ("examine object", held)
        for receptacle in self._here():
            receptacle_name, receptacle_kind = names[receptacle], game.receptacle_type.get(receptacle, "")
            if self._reachable(receptacle) and (receptacle_kind, kind) in game.can_contain:
                actions[f"move {name} to {receptacle_name}"] = ("move", held, receptacle)
            # Quirk: a closed microwave heats and a closed fridge cools.
            if receptacle_kind == "microwavetype" and held in game.heatable:
                actions[f"heat {name} with {receptacle_name}"] = ("heat", held, receptacle)
            if receptacle_kind == "fridgetype" and held in game.coolable:
                actions[f"cool {name} with {receptacle_name}"] = ("cool", held, receptacle)
            if receptacle_kind in game.sink_types and held in game.cleanable:
                actions[f"clean {name} with {receptacle_name}"] = ("clean", held, receptacle)
        if kind in ("knifetype", "butterknifetype"):
            for thing in game.sliceable:
                if self.location in self.object_locations.get(thing, ()):
                    actions[f"slice {names[thing]} with {name}"] = ("slice", thing, held)

    def _here(self) -> Sequence[str]:
        return self.game.receptacles_at.get(self.location, ())

    def _reachable(self, receptacle: str) -> bool:
        return receptacle not in self.game.openable or receptacle in self.opened

    def _look(self) -> str:
        if not self._here():
            # Quirk: an explicit look binds the location, which no receptacle shares, so the list comes out empty.
            return _middle_of_room([])
        names = self.game.names
        facing = _listing([names[receptacle] for receptacle in self._here()])
        # Quirk: "next to it" is what was taken out of a receptacle here and put down at the same location elsewhere.
        beside = [
            f"a {names[thing]}"
            for thing in sorted({thing for thing, _ in self.taken_out})
            if self.location in self.object_locations.get(thing, ())
            for receptacle in self._here()
            if (thing, receptacle) in self.taken_out
        ]
        return f"You are facing the {facing}. Next to it, you see {_listing(beside)}."

    def _first_look(self) -> str:
        return _middle_of_room([f"a {self.game.names[receptacle]}" for receptacle in self.game.receptacles])

    def _inventory(self) -> str:
        if self.held is None:
            return "You are not carrying anything."
        return f"You are carrying: a {self.game.names[self.held]}."

    def _help(self) -> str:
        return HELP

    def _go(self, receptacle: str) -> str:
        self.location = self.game.location_of[receptacle]
        self._state_changed()
        return f"You arrive at {self.game.names[receptacle]}. {self._examine_receptacle(receptacle)}"

    def _open(self, receptacle: str) -> str:
        self.opened |= {receptacle}
        self._state_changed()
        return f"You open the {self.game.names[receptacle]}. {self._examine_receptacle(receptacle)}"

    def _close(self, receptacle: str) -> str:
        self.opened -= {receptacle}
        self._state_changed()
        return f"You close the {self.game.names[receptacle]}."

    def _examine_receptacle(self, receptacle: str) -> str:
        name = self.game.names[receptacle]
        if receptacle not in self.game.openable:
            return f"On the {name}, you see {self._things(self.contents.get(receptacle, ()))}."
        if receptacle not in self.opened:
            return f"The {name} is closed."
        return f"The {name} is open. In it, you see {self._things(self.contents.get(receptacle, ()))}."

    def _examine_object(self, thing: str) -> str:
        name = self.game.names[thing]
        if thing in self.game.receptacle_like:
            return f"This is a normal {name}. In it, you see {self._things(self.game.nested.get(thing, ()))}."
        clean, hot, cool, on, sliced = (thing in self.states[state] for state in STATES)
        temperature = "hot" if hot else "cool" if cool else ""
        if clean and sliced:
            return f"This is a {temperature + ' and ' if temperature else ''}clean sliced {name}."
        if temperature and sliced:
            return f"This is a {temperature} sliced {name}."
        if clean and temperature:
            return f"This is a {temperature} and clean {name}."
        if temperature:
            return f"This is a {'hot' if hot else 'cold'} {name}."
        if clean:
            return f"This is a clean {name}."
        if on and thing in self.game.toggleable:
            return f"This {name} is on."
        if sliced and thing in self.game.sliceable:
            return f"This is a sliced {name}."
        return f"There's nothing special about {name}."

    def _take(self, thing: str, receptacle: str) -> str:
        self.contents[receptacle] = tuple(other for other in self.contents[receptacle] if other != thing)
        # Quirk: only the taker's location is struck out. An object filed under another location than its receptacle's
        # stays there for `slice`.
        self.object_locations[thing] = self.object_locations.get(thing, frozenset()) - {self.location}
        self.taken_out |= {(thing, receptacle)}
        self.held = thing
        self._state_changed()
        return f"You pick up the {self.game.names[thing]} from the {self.game.names[receptacle]}."

    def _move(self, thing: str, receptacle: str) -> str:
        self.contents[receptacle] = tuple(sorted({*self.contents.get(receptacle, ()), thing}))
        self.object_locations[thing] = self.object_locations.get(thing, frozenset()) | {self.location}
        self.taken_out -= {(thing, receptacle)}
        self.held = None
        self._state_changed()
        return f"You move the {self.game.names[thing]} to the {self.game.names[receptacle]}."

    def _use(self, lamp: str) -> str:
        # Quirk: there is no switching off.
        self._mark("istoggled", lamp)
        return f"You turn on the {self.game.names[lamp]}."

    def _clean(self, thing: str, receptacle: str) -> str:
        self._mark("isclean", thing)
        return f"You clean the {self.game.names[thing]} using the {self.game.names[receptacle]}."

    def _heat(self, thing: str, receptacle: str) -> str:
        self._mark("ishot", thing, instead_of="iscool")
        return f"You heat the {self.game.names[thing]} using the {self.game.names[receptacle]}."

    def _cool(self, thing: str, receptacle: str) -> str:
        self._mark("iscool", thing, instead_of="ishot")
        return f"You cool the {self.game.names[thing]} using the {self.game.names[receptacle]}."

    def _slice(self, thing: str, knife: str) -> str:
        self._mark("issliced", thing)
        return f"You sliced the {self.game.names[thing]} with the {self.game.names[knife]}."

    def _mark(self, state: str, thing: str, instead_of: str | None = None) -> None:
        self.states[state] |= {thing}
        if instead_of is not None:
            self.states[instead_of] -= {thing}
        self._state_changed()

    def _things(self, things: Iterable[str]) -> str:
        return _listing([f"a {self.game.names[thing]}" for thing in things])

    def _goal_holds(self) -> bool:
        goal = self.game.goal
        if goal.kind == "look":
            if self.held not in goal.objects:
                return False
            lit = self.states["istoggled"] & goal.targets
            return any(thing in lit for receptacle in self._here() for thing in self.contents.get(receptacle, ()))
        counted = goal.objects if goal.state is None else goal.objects & self.states[goal.state]
        needed = 2 if goal.kind == "place_two" else 1
        return any(
            sum(thing in counted for thing in self.contents.get(receptacle, ())) >= needed
            for receptacle in goal.targets
        )


_VERBS: Final[dict[str, Callable[..., str]]] = {
    "look": ExactEnv._look,
    "inventory": ExactEnv._inventory,
    "help": ExactEnv._help,
    "go": ExactEnv._go,
    "open": ExactEnv._open,
    "close": ExactEnv._close,
    "examine receptacle": ExactEnv._examine_receptacle,
    "examine object": ExactEnv._examine_object,
    "take": ExactEnv._take,
    "move": ExactEnv._move,
    "use": ExactEnv._use,
    "clean": ExactEnv._clean,
    "heat": ExactEnv._heat,
    "cool": ExactEnv._cool,
    "slice": ExactEnv._slice,
}


def _middle_of_room(receptacles: list[str]) -> str:
    return f"You are in the middle of a room. Looking quickly around you, you see {_listing(receptacles)}."


def _listing(items: list[str]) -> str:
    """``nothing`` | ``a`` | ``a, and b`` | ``a, b, and c``, as the grammar joins a list."""
    if not items:
        return "nothing"
    if len(items) == 1:
        return items[0]
    return f"{', '.join(items[:-1])}, and {items[-1]}"
