"""SIGTERM interrupts at once, or when the update in progress is complete; never twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from verl.agentopsd.termination import Termination


@pytest.fixture
def termination() -> Iterator[Termination]:
    before = signal.getsignal(signal.SIGTERM)
    made = Termination()
    made.install()
    yield made
    signal.signal(signal.SIGTERM, before)


def test_at_once_outside_of_an_update(termination: Termination):
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert termination.requested
    os.kill(os.getpid(), signal.SIGTERM)  # a second one does not disturb the saving
    termination.hold()
    termination.release()


def test_when_complete_within_an_update(termination: Termination):
    termination.hold()
    os.kill(os.getpid(), signal.SIGTERM)
    assert termination.requested
    with pytest.raises(KeyboardInterrupt):
        termination.release()


def test_without_a_signal_nothing_happens(termination: Termination):
    termination.hold()
    termination.release()
    assert not termination.requested
