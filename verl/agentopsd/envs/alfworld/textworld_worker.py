"""The process that runs the real ALFWorld engine; started by ``textworld_env`` as a script of its own.

One JSON object per line in and out. Requests: ``{"op": "open", "session": n, "path": file}``, ``{"op": "step",
"session": n, "command": text}``, ``{"op": "close", "session": n}``, each with ``"limit": seconds``. Answers: ``{"text",
"admissible", "won"}``, ``{}`` for close, or ``{"error": text}``. The first line it writes, ``{"ready": true}``, says
that the imports are done. It ends when its input does, hence with its parent, and when a request takes longer than its
limit: native code that hangs reads no input. Nothing of verl is imported, which would take seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, TextIO


class Engine:
    """The open episodes of this process. Each needs a TextWorld environment of its own, because Fast Downward keeps the
    state of the game in global variables of its library; environments are reused, as loading that library is costly."""

    def __init__(self) -> None:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.envs.pddl.pddl import PddlEnv

        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        self._new_env = lambda: AlfredDemangler(PddlEnv(infos))
        self._idle: list[Any] = []
        self._sessions: dict[int, Any] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carries out one request."""
        session = request["session"]
        if request["op"] == "open":
            env = self._idle.pop() if self._idle else self._new_env()
            env.load(request["path"])
            state = env.reset()
            self._sessions[session] = env
        elif request["op"] == "step":
            state, _, _ = self._sessions[session].step(request["command"])
        else:
            if session in self._sessions:
                self._idle.append(self._sessions.pop(session))
            return {}
        return {
            "text": state.feedback,
            "admissible": list(state["admissible_commands"]),
            "won": bool(state["won"]),
        }


def main() -> None:
    requests, answers = sys.stdin, _private_stdout()
    engine = Engine()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    _send(answers, {"ready": True})
    for line in requests:
        try:
            request = json.loads(line)
            signal.setitimer(signal.ITIMER_REAL, request["limit"])  # no handler: the signal ends the process
            answer = engine.answer(request)
        except KeyboardInterrupt:
            return
        except BaseException as error:  # the PDDL parser leaves by SystemExit
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(answers, answer)


def _private_stdout() -> TextIO:
    """The answer channel, out of reach of the engine's own prints, which go to stderr from here on."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _send(channel: TextIO, message: dict[str, Any]) -> None:
    channel.write(json.dumps(message) + "\n")
    channel.flush()


if __name__ == "__main__":
    main()
