"""Without Python's garbage collections while modules are imported: they would find nothing in a third of the time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator


def pause_collections() -> Callable[[], None]:
    """Pauses collections by their threshold, so that `gc.disable` of a module that is imported holds.

    Returns:
        what ends the pause, unless somebody set another threshold.
    """
    before = gc.get_threshold()
    gc.set_threshold(0)

    def resume() -> None:
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*before)

    return resume


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """Pauses collections inside a `with` statement."""
    resume = pause_collections()
    try:
        yield
    finally:
        resume()
