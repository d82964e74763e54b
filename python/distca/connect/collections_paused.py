"""Without Python's garbage collections while modules are imported: they would find nothing in a third of the time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collections_paused() -> Iterator[None]:
    """Pauses collections by their threshold, so that `gc.disable` of a module that is imported inside holds."""
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == 0:
            gc.set_threshold(*before)
