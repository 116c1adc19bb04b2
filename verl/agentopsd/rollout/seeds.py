"""Sampling seeds: the same run draws the same episodes, and the G episodes of one game differ by nothing else."""

from __future__ import annotations

import hashlib


def episode_seed(run_seed: int, data_seed: int, step: int, game_id: str, session: int) -> int:
    """The seed of one episode: session ``session`` of a game in update ``step``."""
    return _hash(f"{run_seed}/{data_seed}/{step}/{game_id}/{session}")


def turn_seed(seed: int, turn: int) -> int:
    """The sampling seed of one turn; a server samples each turn as a request of its own."""
    return _hash(f"{seed}/{turn}")


def _hash(text: str) -> int:
    """31 bits, which every random generator takes; the same in every process, unlike ``hash``."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1
