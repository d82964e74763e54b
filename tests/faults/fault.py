"""A fault that can be planted in the sources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """In `file`, the text `old`, which must stand there exactly once, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, tree: Path) -> str:
        """The file of the tree with the fault in it; ValueError where the source no longer has its text."""
        source = (tree / self.file).read_text()
        if source.count(self.old) != 1:
            raise ValueError(
                f"fault {self.name!r}: this text stands {source.count(self.old)} times in {self.file}, "
                f"exactly once is expected; the fault has to follow the source:\n{self.old}"
            )
        return source.replace(self.old, self.new)
