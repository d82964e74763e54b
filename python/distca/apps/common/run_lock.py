"""The lock of a run's folder: one run at a time writes there."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from distca.apps.common.files import writing
from distca.apps.common.options import ConfigError

LOCK = ".lock"
"""The file in a run's folder that is locked. It stays there, empty."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a run's folder. The end of the process lets it go, however it ends.

    On a file system without locks it holds nothing.

    Raises:
        ConfigError: a run that is under way holds it.
    """
    with contextlib.ExitStack() as opened:
        with writing(folder):
            file = opened.enter_context(open(folder / LOCK, "w"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"the run in {folder} is under way: stop it first, or wait until it is over") from error
        except OSError:  # Lustre and some others have no locks unless they are mounted with them
            pass
        yield
