"""A fault that can be planted in the sources.

A piece of the source marks its place. Pieces are compared word by word, so line breaks and spaces do not count. Where a
name of the piece has changed, the fault has to follow: under another name the piece might be another fault.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_WORD = re.compile(r"\w+|\S")


@dataclass(frozen=True)
class Fault:
    """A change of the piece `old` in `file` to `new`, after which one of `tests` fails."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, tree: Path) -> tuple[Path, str]:
        """The file of the tree that gets the fault, and its text with the fault in it. Raises ValueError unless exactly
        one place of the file has the words of the piece.
        """
        path = tree / self.file
        text = path.read_text() if path.is_file() else ""
        places = _places(text, self.old)
        if len(places) != 1:
            raise ValueError(
                f"fault {self.name!r}: {len(places)} places of {self.file} have the words of its piece, exactly one is "
                f"expected; the fault has to follow the source:\n{self.old}"
            )
        [(begin, end)] = places
        return path, text[:begin] + self.new + text[end:]


def _places(text: str, piece: str) -> list[tuple[int, int]]:
    """Where the text has the words of the piece, as characters ``[begin, end)``."""
    words, wanted = list(_WORD.finditer(text)), _WORD.findall(piece)
    written = [word[0] for word in words]
    # Spaces and line breaks around the piece belong to it.
    before, after = len(piece) - len(piece.lstrip()), len(piece) - len(piece.rstrip())
    places = []
    for first in range(len(words) - len(wanted) + 1):
        if written[first] != wanted[0] or written[first : first + len(wanted)] != wanted:
            continue
        begin, end = words[first].start(), words[first + len(wanted) - 1].end()
        while before and begin and text[begin - 1] == " ":
            begin -= 1
        while after and end < len(text) and text[end] in " \n":
            end += 1
            if text[end - 1] == "\n":
                break
        places.append((begin, end))
    return places
