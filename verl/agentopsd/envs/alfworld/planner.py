"""A full-knowledge planner: proves that a game can be won by winning it on the exact engine.

It sees every fact, so its plans neither look around nor open anything in vain; they are walkthroughs, not
demonstrations for an agent that has to search.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from verl.agentopsd.envs.alfworld.engine import ExactEnv
from verl.agentopsd.envs.alfworld.game import Game

_TREATMENTS = {"isclean": "clean", "ishot": "heat", "iscool": "cool"}


def solve(game: Game) -> tuple[str, ...] | None:
    """The shortest winning command sequence among the straightforward ones, or None.

    Straightforward: fetch an object that counts, treat it if the goal asks for it, bring it to the target. Ties go to
    the smallest ids. A game that is won at the start has the empty plan.
    """
    if ExactEnv(game).won:
        return ()
    attempts = (_attempt(game, target) for target in sorted(game.goal.targets))
    plans = [plan for plan in attempts if plan is not None]
    return min(plans, key=len, default=None)


def _attempt(game: Game, target: str) -> tuple[str, ...] | None:
    """A plan that ends at ``target`` (a receptacle or a lamp), or None."""
    player = _Player(game)
    if game.goal.kind == "look":
        lamp_places = [receptacle for receptacle, things in game.contents.items() if target in things]
        if lamp_places and player.fetch_nearest("") and player.at(min(lamp_places)):
            player.do(f"use {game.names[target]}")
    else:
        # What lies in the target already is only worth fetching if it needs treatment.
        avoid = target if game.goal.state is None else ""
        for _ in range(2 if game.goal.kind == "place_two" else 1):
            thing = player.fetch_nearest(avoid)
            if thing is None or not player.treat(thing) or not player.open_at(target):
                return None
            player.do(f"move {game.names[thing]} to {game.names[target]}")
    return tuple(player.commands) if player.env.won else None


class _Player:
    """An episode with its commands so far; every method returns whether it got where it wanted to."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self.env = ExactEnv(game)
        self.commands: list[str] = []

    def do(self, command: str) -> bool:
        valid = self.env.step(command).valid
        if valid:
            self.commands.append(command)
        return valid

    def at(self, receptacle: str) -> bool:
        """Goes to ``receptacle`` unless already there."""
        if self.env.location == self.game.location_of[receptacle]:
            return True
        return self.do(f"go to {self.game.names[receptacle]}")

    def open_at(self, receptacle: str) -> bool:
        """Goes to ``receptacle`` and opens it if it is closed."""
        if not self.at(receptacle):
            return False
        closed = receptacle in self.game.openable and receptacle not in self.env.opened
        return not closed or self.do(f"open {self.game.names[receptacle]}")

    def fetch_nearest(self, avoid: str) -> str | None:
        """Takes the object that counts and is quickest to get, not out of ``avoid``; its id, or None."""
        found = sorted(self._sources(avoid), key=lambda pair: (self._cost(pair[1]), pair))
        for thing, receptacle in found:
            take = f"take {self.game.names[thing]} from {self.game.names[receptacle]}"
            if self.open_at(receptacle) and self.do(take):
                return thing
        return None

    def treat(self, thing: str) -> bool:
        """Cleans, heats or cools the held ``thing`` if the goal asks for it."""
        state = self.game.goal.state
        if state is None or thing in self.env.states[state]:
            return True
        verb = _TREATMENTS[state]
        kinds = {"heat": {"microwavetype"}, "cool": {"fridgetype"}, "clean": self.game.sink_types}[verb]
        for receptacle in self.game.receptacles:
            if self.game.receptacle_type.get(receptacle) in kinds and self.at(receptacle):
                return self.do(f"{verb} {self.game.names[thing]} with {self.game.names[receptacle]}")
        return False

    def _sources(self, avoid: str) -> Iterator[tuple[str, str]]:
        counted, takeable = self.game.goal.objects, self.game.pickupable
        return chain.from_iterable(
            ((thing, receptacle) for thing in things if thing in counted and thing in takeable)
            for receptacle, things in self.env.contents.items()
            if receptacle != avoid
        )

    def _cost(self, receptacle: str) -> int:
        """Commands until something in ``receptacle`` can be taken."""
        away = self.env.location != self.game.location_of[receptacle]
        closed = receptacle in self.game.openable and receptacle not in self.env.opened
        return away + closed
