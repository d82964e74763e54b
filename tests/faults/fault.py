"""A fault that can be planted in the sources. Its place survives renames, moves and other line breaks.

A piece of the source marks the place. Pieces are compared word by word, so line breaks and spaces do not count. If the
fault's file lacks these words, or there is no such file, the fault looks in all sources for the same piece with other
names: a name of the piece then stands for one name of the source, always the same one. If there are several such
places, the one with the most unchanged names is taken, and the same names are changed in what is planted.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_WORD = re.compile(r"\w+|\S")
_FOLDERS, _KINDS = ("cpp", "cuda", "python/distca", "tests/emulation"), (".py", ".cpp", ".h", ".cu", ".cuh")
_FEWEST_KEPT = 0.5
"""The share of a piece's names that must be unchanged where the piece is found under other names."""
_KEYWORDS = """auto bool break const continue do double else float for if int int64_t return size_t static std void
while and def elif except from in is lambda not or raise try with yield None True False self"""
_FIXED = frozenset(_KEYWORDS.split())


class Place(NamedTuple):
    """A place: characters ``[begin, end)`` of a file, and what the piece's names are called there."""

    file: Path
    begin: int
    end: int
    names: dict[str, str]


@dataclass(frozen=True)
class Fault:
    """A change of the piece `old` in `file` to `new`, after which one of `tests` fails."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def place(self, tree: Path) -> Place:
        """The place of the fault. Raises ValueError if no place, or more than one, is like its piece."""
        path = tree / self.file
        found = list(_places(path, self.old, exact=True)) if path.is_file() else []
        if not found:
            files = (
                file for folder in _FOLDERS for file in sorted((tree / folder).rglob("*")) if file.suffix in _KINDS
            )
            found = _most_alike([place for file in files for place in _places(file, self.old, exact=False)])
        if len(found) != 1:
            raise ValueError(
                f"fault {self.name!r}: {len(found)} places are like its piece of {self.file}, exactly one is expected; "
                f"the fault has to follow the source:\n{self.old}"
            )
        return found[0]

    def planted(self, tree: Path) -> tuple[Path, str]:
        """The file of the tree that gets the fault, and its text with the fault in it."""
        place = self.place(tree)
        text = place.file.read_text()
        new = re.sub(r"[A-Za-z_]\w*", lambda name: place.names.get(name[0], name[0]), self.new)
        return place.file, text[: place.begin] + new + text[place.end :]


def _places(file: Path, piece: str, *, exact: bool) -> Iterator[Place]:
    """The places where the file has the words of the piece, with its names or with others."""
    text = file.read_text()
    words = _words(text)
    wanted = _WORD.findall(piece)
    # Spaces and line breaks around the piece belong to it.
    before, after = len(piece) - len(piece.lstrip()), len(piece) - len(piece.rstrip())
    for first in range(len(words) - len(wanted) + 1):
        if exact and words[first][0] != wanted[0]:
            continue
        names = _names(wanted, [word[0] for word in words[first : first + len(wanted)]], exact)
        if names is None:
            continue
        begin, end = words[first].start(), words[first + len(wanted) - 1].end()
        while before and begin and text[begin - 1] == " ":
            begin -= 1
        while after and end < len(text) and text[end] in " \n":
            end += 1
            if text[end - 1] == "\n":
                break
        yield Place(file, begin, end, names)


@functools.cache
def _words(text: str) -> list[re.Match[str]]:
    return list(_WORD.finditer(text))


def _names(wanted: list[str], words: list[str], exact: bool) -> dict[str, str] | None:
    """What each name of the wanted words is called in `words`; None if these are other words."""
    if exact:
        return {} if wanted == words else None
    names: dict[str, str] = {}
    for one, other in zip(wanted, words, strict=True):
        if _is_name(one) != _is_name(other) or (not _is_name(one) and one != other):
            return None
        if _is_name(one) and names.setdefault(one, other) != other:
            return None
    kept = sum(one == other for one, other in names.items())
    return names if len(set(names.values())) == len(names) and kept >= _FEWEST_KEPT * len(names) else None


def _is_name(word: str) -> bool:
    return (word[0].isalpha() or word[0] == "_") and word not in _FIXED


def _most_alike(places: list[Place]) -> list[Place]:
    kept = [sum(one == other for one, other in place.names.items()) for place in places]
    return [place for place, count in zip(places, kept, strict=True) if count == max(kept)]
