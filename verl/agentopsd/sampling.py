"""Which games an update plays: ``data.sampling.strategy=difficulty`` prefers games that are won sometimes.

A game whose episodes all end alike has advantage 0 and teaches nothing. Every game belongs to one pool by its success
rate over its last ``window`` visits, episodes lost to the environment left out:

    unseen   not played yet
    hard     rate < low         the hard-task pool, revisited at ``hard_share``
    band     low ≤ rate ≤ high  the rest of every update
    easy     rate > high        revisited at ``easy_share``, to notice what is being forgotten

Of the N games of an update ``explore_share`` are unseen, ``hard_share`` hard, ``easy_share`` easy and the others from
the band. Shares are exact in the long run: update u has ⌊s N u⌋ − ⌊s N (u−1)⌋ games of a share s. Within a pool the
game that was not played for longest comes first, ties broken at random under the seed; a game rests for ``rest``
updates before it is drawn again. Places that a pool cannot fill go to the band, then to unseen, hard and easy games,
and only then to games that should rest. An update never has a game twice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

POOLS = ("unseen", "hard", "band", "easy")
FILL_ORDER = ("band", "unseen", "hard", "easy")


@dataclass(frozen=True)
class SamplingConfig:
    """The section ``data.sampling``; ``shuffle`` is verl's own order and reads nothing else of it."""

    strategy: str = "shuffle"
    low: float = 0.05
    high: float = 0.95
    hard_share: float = 0.1
    easy_share: float = 0.05
    explore_share: float = 0.25
    window: int = 2
    rest: int = 5


class DifficultySampler:
    """Draws the games of one update after the other: a batch sampler of verl's dataloader, which saves its state.

    Args:
        game_ids: of the dataset's rows, in its order.
        batch_size: games per draw, N above.
        config: the shares and limits.
        seed: ``env.seed``; equal seeds and equal outcomes draw equal games.

    Raises:
        ValueError: fewer games than one draw needs.
    """

    def __init__(self, game_ids: Sequence[str], batch_size: int, config: SamplingConfig, seed: int) -> None:
        if len(game_ids) < batch_size:
            raise ValueError(
                f"an update plays {batch_size} different games, but the training split has {len(game_ids)}: lower "
                "data.train_batch_size or add games"
            )
        self.game_ids = list(game_ids)
        self.batch_size, self.config, self.seed = batch_size, config, seed
        self._draws = 0
        self._last_draw: dict[str, int] = {}
        self._visits: dict[str, list[list[int]]] = {}  # the last [won, played] of each game, oldest first
        self._drawn: dict[str, int] = dict.fromkeys(POOLS, 0)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield self.draw()

    def __len__(self) -> int:
        return len(self.game_ids) // self.batch_size

    def draw(self) -> list[int]:
        """Rows of the next update's games, all different, in random order."""
        chance = random.Random(f"{self.seed}/{self._draws}")
        pools = self._waiting(chance)
        drawn: list[int] = []
        self._drawn = dict.fromkeys(POOLS, 0)

        def take(pool: str, number: int) -> None:
            taken = pools[pool][: max(0, min(number, self.batch_size - len(drawn)))]
            del pools[pool][: len(taken)]
            self._drawn[pool] += len(taken)
            drawn.extend(taken)

        shares = {
            "hard": self.config.hard_share,
            "easy": self.config.easy_share,
            "unseen": self.config.explore_share,
        }
        for pool, share in shares.items():
            take(pool, _due(share * self.batch_size, self._draws))
        for pool in FILL_ORDER:
            take(pool, self.batch_size)
        resting = sorted(set(range(len(self.game_ids))).difference(drawn), key=lambda row: (self._last(row), row))
        for row in resting[: self.batch_size - len(drawn)]:
            self._drawn[self.pool_of(row)] += 1
            drawn.append(row)
        chance.shuffle(drawn)
        for row in drawn:
            self._last_draw[self.game_ids[row]] = self._draws
        self._draws += 1
        return drawn

    def observe(self, outcomes: Mapping[str, tuple[int, int]]) -> None:
        """Takes in what an update saw.

        Args:
            outcomes: (won, played) by game id, lost episodes not counted; a game with nothing played is left as it was.
        """
        for game_id, (won, played) in outcomes.items():
            if played:
                visits = self._visits.setdefault(game_id, [])
                visits.append([int(won), int(played)])
                del visits[: -self.config.window]

    def rate(self, row: int) -> float | None:
        """Success rate over the last visits, None for an unseen game."""
        visits = self._visits.get(self.game_ids[row])
        return sum(won for won, _ in visits) / sum(played for _, played in visits) if visits else None

    def pool_of(self, row: int) -> str:
        """The pool a game is in now."""
        rate = self.rate(row)
        if rate is None:
            return "unseen"
        if rate < self.config.low:
            return "hard"
        return "easy" if rate > self.config.high else "band"

    def metrics(self) -> dict[str, float]:
        """``sampling/drawn_*``: shares of the last draw; ``sampling/pool_*``: shares of all games as they stand now."""
        standing = [self.pool_of(row) for row in range(len(self.game_ids))]
        return {
            **{f"sampling/drawn_{pool}": number / self.batch_size for pool, number in self._drawn.items()},
            **{f"sampling/pool_{pool}": standing.count(pool) / len(standing) for pool in POOLS},
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next draws depend on, by game id; verl saves it with its dataloader in ``data.pt``."""
        return {
            "draws": self._draws,
            "last_draw": dict(self._last_draw),
            "visits": {game_id: [list(visit) for visit in visits] for game_id, visits in self._visits.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken; what it knows of games that are gone is kept and not used."""
        self._draws = int(state["draws"])
        self._last_draw = dict(state["last_draw"])
        self._visits = {game_id: [list(visit) for visit in visits] for game_id, visits in state["visits"].items()}

    def _waiting(self, chance: random.Random) -> dict[str, list[int]]:
        """Rows of each pool that have rested long enough, the one not played for longest first."""
        rows = [row for row in range(len(self.game_ids)) if self._rested(row)]
        chance.shuffle(rows)
        pools: dict[str, list[int]] = {pool: [] for pool in POOLS}
        for row in sorted(rows, key=self._last):  # sorting keeps the order of equals
            pools[self.pool_of(row)].append(row)
        return pools

    def _rested(self, row: int) -> bool:
        return self._last(row) < 0 or self._draws - self._last(row) > self.config.rest

    def _last(self, row: int) -> int:
        return self._last_draw.get(self.game_ids[row], -1)


def _due(per_draw: float, draws: int) -> int:
    """Whole games that a share of ``per_draw`` games has in draw ``draws``, counted from 0; exact in the long run."""
    return math.floor(per_draw * (draws + 1) + 1e-9) - math.floor(per_draw * draws + 1e-9)


def outcomes_by_game(episodes: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """(won, played) by game id of an update's episodes, those lost to the environment left out."""
    counted: dict[str, tuple[int, int]] = {}
    for episode in episodes:
        won, played = counted.get(episode.facts["game_id"], (0, 0))
        if episode.valid:
            won, played = won + episode.won, played + 1
        counted[episode.facts["game_id"]] = (won, played)
    return counted


def difficulty_dataloader(dataset: Any, batch_size: int, config: SamplingConfig, seed: int) -> tuple[Any, Any]:
    """verl's dataloader with a :class:`DifficultySampler` in it, and that sampler."""
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]
    from verl.utils.dataset.rl_dataset import collate_fn

    sampler = DifficultySampler([task.game_id for task in dataset.tasks], batch_size, config, seed)
    loader: Any = StatefulDataLoader(dataset, batch_sampler=sampler, num_workers=0, collate_fn=collate_fn)
    return loader, sampler
