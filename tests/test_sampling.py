"""Sampling by difficulty: pools, shares, rest, the seed, and a resumed dataloader."""

from __future__ import annotations

import copy
from collections import Counter
from types import SimpleNamespace

import pytest

from verl.agentopsd.dataset import EpisodeDataset
from verl.agentopsd.envs.base import Task
from verl.agentopsd.sampling import DifficultySampler, SamplingConfig, difficulty_dataloader, outcomes_by_game

GAMES = [f"train/{number:03d}" for number in range(40)]


def sampler(games: list[str] = GAMES, batch_size: int = 4, seed: int = 0, **settings: float) -> DifficultySampler:
    return DifficultySampler(games, batch_size, SamplingConfig("difficulty", **settings), seed)


def skill_of(row: int) -> tuple[int, int]:
    """(won, played): rows 0-9 are never won, 30-39 always, the others half of the time."""
    return (0 if row < 10 else 8 if row >= 30 else 4), 8


def play(one: DifficultySampler, updates: int) -> list[list[int]]:
    draws = []
    for _ in range(updates):
        draws.append(one.draw())
        one.observe({one.game_ids[row]: skill_of(row) for row in draws[-1]})
    return draws


def test_pools_follow_the_success_rate_of_the_last_visits():
    one = sampler(window=2)
    assert one.pool_of(0) == "unseen"
    one.observe({GAMES[0]: (0, 8)})
    assert (one.rate(0), one.pool_of(0)) == (0.0, "hard")
    one.observe({GAMES[0]: (1, 8)})  # 1 of 16 = .0625
    assert (one.rate(0), one.pool_of(0)) == (0.0625, "band")
    one.observe({GAMES[0]: (8, 8)})  # the first visit is forgotten: 9 of 16
    assert one.rate(0) == 0.5625
    one.observe({GAMES[0]: (8, 8)})
    assert (one.rate(0), one.pool_of(0)) == (1.0, "easy")


def test_the_borders_belong_to_the_band():
    one = sampler(low=0.25, high=0.75)
    one.observe({GAMES[0]: (2, 8), GAMES[1]: (6, 8), GAMES[2]: (1, 8), GAMES[3]: (7, 8)})
    assert [one.pool_of(row) for row in range(4)] == ["band", "band", "hard", "easy"]


def test_a_game_of_which_every_episode_was_lost_stays_unseen():
    one = sampler()
    one.observe({GAMES[0]: (0, 0)})
    assert one.pool_of(0) == "unseen"


def test_everything_is_explored_first():
    draws = play(sampler(explore_share=1.0, hard_share=0.0, easy_share=0.0), 10)
    assert sorted(row for draw in draws for row in draw) == list(range(40))


def test_shares_are_exact_in_the_long_run():
    """All games known and rested: of 100 draws × 4 games 10 % are hard, 5 % easy, the others from the band."""
    games = [f"train/{number:03d}" for number in range(400)]
    one = sampler(games, hard_share=0.1, easy_share=0.05, explore_share=0.25, rest=0)
    one.observe({game: ((0, 4, 8)[row % 3], 8) for row, game in enumerate(games)})
    counted: Counter[str] = Counter()
    for _ in range(100):
        counted.update(one.pool_of(row) for row in one.draw())
    assert counted == {"hard": 40, "easy": 20, "band": 340}


def test_no_game_twice_in_an_update_and_a_rest_between_visits():
    draws = play(sampler(rest=3), 60)
    assert all(len(set(draw)) == 4 for draw in draws)
    played: dict[int, list[int]] = {}
    for update, draw in enumerate(draws):
        for row in draw:
            played.setdefault(row, []).append(update)
    gaps = [b - a for updates in played.values() for a, b in zip(updates, updates[1:], strict=False)]
    assert min(gaps) == 4


def test_few_games_are_drawn_although_they_should_rest():
    draws = play(sampler(GAMES[:5], batch_size=4, rest=10), 6)
    assert all(len(set(draw)) == 4 for draw in draws)


def test_the_band_is_preferred_and_hard_games_come_back():
    draws = play(sampler(hard_share=0.1, easy_share=0.05, explore_share=0.25, rest=2), 200)
    late = Counter("hard" if row < 10 else "easy" if row >= 30 else "band" for draw in draws[100:] for row in draw)
    assert late == {"hard": 40, "easy": 20, "band": 340}
    assert {row for draw in draws[100:] for row in draw if row < 10} == set(range(10))


def test_the_seed_decides_and_nothing_else():
    assert play(sampler(seed=3), 20) == play(sampler(seed=3), 20)
    assert play(sampler(seed=3), 20) != play(sampler(seed=4), 20)


def test_a_saved_sampler_continues_the_same_sequence():
    straight = sampler(seed=1)
    play(straight, 7)
    state = copy.deepcopy(straight.state_dict())
    ahead = play(straight, 8)
    resumed = sampler(seed=1)
    resumed.load_state_dict(state)
    assert play(resumed, 8) == ahead
    assert straight.state_dict() != state  # the saved state is no view of the living one


def test_the_state_is_by_game_so_that_a_changed_split_keeps_what_it_knows():
    one = sampler()
    one.observe({GAMES[7]: (0, 8)})
    other = sampler(list(reversed(GAMES[5:])))
    other.load_state_dict(one.state_dict())
    assert other.pool_of(other.game_ids.index(GAMES[7])) == "hard"


def test_metrics_are_shares():
    one = sampler(explore_share=0.25)
    one.draw()
    one.observe({GAMES[0]: (0, 8), GAMES[1]: (4, 8)})
    metrics = one.metrics()
    assert metrics["sampling/drawn_unseen"] == 1.0
    assert metrics["sampling/pool_unseen"] == 38 / 40
    assert (metrics["sampling/pool_hard"], metrics["sampling/pool_band"]) == (1 / 40, 1 / 40)
    assert sum(value for name, value in metrics.items() if "pool" in name) == pytest.approx(1)


def test_too_few_games_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match="an update plays 4 different games, but the training split has 3"):
        sampler(GAMES[:3])


def test_outcomes_leave_lost_episodes_out():
    def one(game: str, won: bool, valid: bool = True) -> SimpleNamespace:
        return SimpleNamespace(facts={"game_id": game}, won=won, valid=valid)

    episodes = [one("a", True), one("a", False), one("a", True, valid=False), one("b", False, valid=False)]
    assert outcomes_by_game(episodes) == {"a": (1, 2), "b": (0, 0)}


class Games(EpisodeDataset):
    def __init__(self) -> None:
        self.tasks = [Task(game, "train", "look", "") for game in GAMES]
        self.env_name, self.seed = "alfworld", 0


def test_verl_s_dataloader_saves_and_restores_it():
    """What upstream puts into data.pt is enough: state_dict of the loader, load_state_dict before its first batch."""
    loader, one = difficulty_dataloader(Games(), 4, SamplingConfig("difficulty"), seed=5)
    batches = iter(loader)

    def step(batches, one) -> list[str]:
        games = [info["game_id"] for info in next(batches)["extra_info"]]
        one.observe({game: skill_of(GAMES.index(game)) for game in games})
        return games

    for _ in range(6):
        step(batches, one)
    state = loader.state_dict()
    ahead = [step(batches, one) for _ in range(6)]
    loader, one = difficulty_dataloader(Games(), 4, SamplingConfig("difficulty"), seed=5)
    loader.load_state_dict(state)
    early = loader.state_dict()  # a run asks for it before its first batch
    assert early["_index_sampler_state"] == state["_index_sampler_state"]
    batches = iter(loader)
    assert [step(batches, one) for _ in range(6)] == ahead
