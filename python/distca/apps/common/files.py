"""Files of a run: their way to the disk, and one sentence for each that cannot be written or is not as it was left."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distca.apps.common.options import ConfigError
from distca.errors import DistcaError, InvalidArgumentError


def why(error: OSError, path: Path) -> str:
    """The system's reason with its number, the file if it is another one than `path`, and the free bytes there."""
    reason = f"{error.strerror or error} (errno {error.errno})" if error.errno is not None else str(error)
    other = f", {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes) else ""
    return f"{reason}{other}; {_free(path)}"


def _free(path: Path) -> str:
    """The free bytes of a path's file system, in words. The last parts of the path may be missing."""
    for folder in (path, *path.parents):
        try:
            found = os.statvfs(folder)
        except OSError:
            continue
        return f"{found.f_bavail * found.f_frsize:,} bytes are free in {folder}"
    return ""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises DistcaError if writing that file of a run, which happens inside, fails."""
    try:
        yield
    except OSError as error:
        raise DistcaError(f"could not write {path}: {why(error, path)}") from error


def write_given(option: str, path: Path, text: str) -> None:
    """Writes the file that an option names. Raises InvalidArgumentError, which names both, if it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"{option} {path} cannot be written: {error.strerror}") from error


def read_object(path: Path, what_to_do: str) -> dict[str, Any]:
    """The JSON object in a file of a run. Raises ConfigError, which says `what_to_do`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {what_to_do}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON ({error}); {what_to_do}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, must hold an object; {what_to_do}")
    return content


def as_json(content: Any, indent: int | None = None) -> str:
    """The content as JSON. A number that is not finite is null, because JSON has no name for it."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def sync(path: Path) -> None:
    """Waits until the file's contents, or the names of a folder's files, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Waits until the folder and all files in it are on the disk."""
    for path in [*folder.iterdir(), folder]:
        sync(path)
