"""At most one run in a folder at a time: `locked`."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from distca.apps.common.options import ConfigError

LOCK = ".lock"
"""The file in a run's folder that is locked. It stays there, empty."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """In `with`, no other process can lock the folder. The system ends a lock with its process, however that ends.

    A file system that has no locks is passed over.

    Raises:
        ConfigError: another process has locked the folder.
        OSError: the folder is missing, or nothing can be written there.
    """
    with open(folder / LOCK, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another run is under way in {folder}: wait until it has ended, or name another folder"
            ) from None
        except OSError:  # not on this file system
            pass
        yield
