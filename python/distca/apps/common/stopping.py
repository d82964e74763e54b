"""Signals that ask a run to stop after the step that it is in."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_SAME_SIGNAL_SECONDS = 0.5  # torchrun repeats the terminal's Ctrl-C


@dataclass
class StopRequest:
    """Whether this rank was asked to stop after the current step, and when. It is true from then on."""

    requested: bool = False
    at: float = 0.0

    def __bool__(self) -> bool:
        return self.requested


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Turns the first SIGINT or SIGTERM into a request. A later one ends the process at once."""
    request = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if request.requested and now - request.at > _SAME_SIGNAL_SECONDS:
            os._exit(128 + number)
        if not request.requested:
            request.requested, request.at = True, now

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
