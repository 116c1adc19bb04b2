"""SIGTERM: a scheduler's notice. The run saves the last completed update and ends with 0."""

from __future__ import annotations

import signal
import sys
from typing import Any


class Stopped(RuntimeError):
    """The run ended because it was asked to; the message says how to continue."""


class Termination:
    """Turns SIGTERM into a KeyboardInterrupt, at once or, while an update must not be cut in two, when it is complete.

    Attributes:
        requested: SIGTERM has arrived; a KeyboardInterrupt is then not the user's Ctrl-C.
    """

    def __init__(self) -> None:
        self.requested = False
        self._held = False
        self._raised = False

    def install(self) -> None:
        """Takes SIGTERM over; must be called in the main thread, and after Ray, which takes it over as well."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def hold(self) -> None:
        """From here on an interrupt would leave an update half done."""
        self._held = True

    def release(self) -> None:
        """The update is complete and written down.

        Raises:
            KeyboardInterrupt: SIGTERM arrived in the meantime.
        """
        self._held = False
        if self.requested and not self._raised:
            self._raise()

    def _on_signal(self, signum: int, frame: Any) -> None:
        if not self.requested:
            print("\nSIGTERM: saving the last completed update", file=sys.__stderr__, flush=True)
        self.requested = True
        if not self._held and not self._raised:
            self._raise()

    def _raise(self) -> None:
        self._raised = True
        # a KeyboardInterrupt, because Ray's waits let nothing else through
        raise KeyboardInterrupt("SIGTERM")
