"""The manifest of a checkpoint: name, size and SHA-256 of each of its files.

It is written last, and compared before anything is read. It finds damage. It does not find a hostile author, who can
write a manifest that fits the files.

    python -m distca.apps.train.manifest CHECKPOINT    writes the manifest of the files as they are
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from distca.apps.common.files import read_object
from distca.apps.common.options import ConfigError

MANIFEST = "manifest.json"


class CheckpointError(ConfigError):
    """A checkpoint is damaged, or holds what no run writes. The message names the file."""


Digests = dict[str, tuple[int, str]]
"""Bytes and SHA-256 of each file, by its name."""


def what_to_do(checkpoint: Path) -> str:
    return f"restore it, or remove {checkpoint} to go on from the checkpoint before"


def digest(path: Path) -> tuple[int, str]:
    """Bytes and SHA-256 of a file."""
    found, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while part := file.read(1 << 20):
            found.update(part)
            size += len(part)
    return size, found.hexdigest()


def write_manifest(checkpoint: Path, digests: Digests) -> None:
    files = {name: {"bytes": size, "sha256": sha256} for name, (size, sha256) in sorted(digests.items())}
    (checkpoint / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")


def read_manifest(checkpoint: Path) -> Digests:
    """The manifest of a checkpoint. Raises CheckpointError unless the folder has exactly its files, in their sizes."""
    found = _regular_files(checkpoint)
    if MANIFEST not in found:
        raise CheckpointError(
            f"{checkpoint / MANIFEST} is missing: the checkpoint is damaged, or an earlier version wrote it; "
            f"{what_to_do(checkpoint)}; if you know that its files are whole, `python -m distca.apps.train.manifest "
            f"{checkpoint}` makes it"
        )
    content = read_object(checkpoint / MANIFEST, what_to_do(checkpoint))
    try:
        digests = {name: (entry["bytes"], entry["sha256"]) for name, entry in content["files"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{checkpoint / MANIFEST} must hold bytes and sha256 of each file; {what_to_do(checkpoint)}"
        ) from error
    for name in sorted(digests.keys() | found.keys() - {MANIFEST}):
        if name not in digests:
            raise CheckpointError(
                f"{checkpoint / name} is not in {MANIFEST}: it does not belong to this checkpoint; remove it"
            )
        size = found.get(name)
        if size != digests[name][0]:
            what = "is missing" if size is None else f"has {size} bytes, must have {digests[name][0]}"
            raise CheckpointError(f"{checkpoint / name} {what}; {what_to_do(checkpoint)}")
    return digests


def check_digests(checkpoint: Path, digests: Digests, names: Iterable[str]) -> None:
    """Raises CheckpointError for the first of the named files whose content differs from the manifest."""
    for name in names:
        if digest(checkpoint / name) != digests[name]:
            raise CheckpointError(
                f"{checkpoint / name} is damaged: its SHA-256 differs from the one in {MANIFEST}; "
                f"{what_to_do(checkpoint)}"
            )


def _regular_files(checkpoint: Path) -> dict[str, int]:
    """The bytes of each file, by its name. Raises CheckpointError for anything but regular files."""
    found = {}
    for path in sorted(checkpoint.iterdir()):
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(
                f"{path} is not a regular file: a checkpoint holds only regular files; {what_to_do(checkpoint)}"
            )
        found[path.name] = path.stat().st_size
    return found


def main(checkpoint: str) -> None:
    folder = Path(checkpoint)
    names = _regular_files(folder).keys() - {MANIFEST}
    write_manifest(folder, {name: digest(folder / name) for name in names})


if __name__ == "__main__":
    main(sys.argv[1])
