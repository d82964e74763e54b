"""What takes long to make and several tests need: made once for all workers of a run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Path]) -> Path:
    """The file or folder `name`, in the folder of this run of pytest.

    The worker that comes first calls `make` with a folder of its own, and what that returns gets the name; others wait.
    """
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all workers
    made = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the worker closes it, or dies
        if not made.exists():
            make(factory.mktemp(name)).rename(made)
    return made
