"""Files that take long to make and that several tests need are made once for all workers of a run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Path]) -> Path:
    """The file or folder `name` in the folder of this run of pytest.

    The first worker calls `make` with a folder of its own, and renames what that returns to `name`. The others wait.
    """
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the folder that all workers share
    made = folder / name
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the lock is released when the worker closes the file or dies
        if not made.exists():
            make(factory.mktemp(name)).rename(made)
    return made
