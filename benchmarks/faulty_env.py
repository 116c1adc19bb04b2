"""ALFWorld whose environments fail at a set rate, for soak runs: ``env.name=alfworld_faulty +env.fault_rate=0.02``.

Every process of a run must import this file: ``VERL_USE_EXTERNAL_MODULES=benchmarks.faulty_env``. The faults follow the
episode's commands, so that a repeated run fails at the same places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from verl.agentopsd.envs.base import EnvFamily, EnvironmentFault, Observation, Task, TextEnv, make_family, register_env


class FaultyEnv:
    """Passes everything on to ``env`` until a fault is due: an error, a fault, garbage, or far too much text."""

    def __init__(self, env: TextEnv, rate: float, name: str) -> None:
        self._env = env
        self._rate = rate
        self._past = name

    def reset(self) -> Observation:
        return self._maybe("", self._env.reset())

    def step(self, command: str) -> Observation:
        return self._maybe(command, self._env.step(command))

    def close(self) -> None:
        self._env.close()

    def _maybe(self, command: str, answer: Observation) -> Any:
        self._past = hashlib.blake2b(f"{self._past}\n{command}".encode(), digest_size=8).hexdigest()
        draw = int(self._past, 16) / 2**64
        if draw >= self._rate:
            return answer
        kind = int(draw / self._rate * 4)
        if kind == 0:
            raise ValueError("injected: the environment raised")
        if kind == 1:
            raise EnvironmentFault("injected: the environment died")
        return None if kind == 2 else Observation("x" * 200_000)


class FaultyFamily:
    """The family of ``alfworld`` with :class:`FaultyEnv` around every environment."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._family: EnvFamily = make_family({**config, "name": "alfworld"})
        self._rate = float(config.get("fault_rate", 0.0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._family, name)

    def make(self, task: Task) -> TextEnv:
        return FaultyEnv(self._family.make(task), self._rate, task.game_id)


register_env("alfworld_faulty")(FaultyFamily)
