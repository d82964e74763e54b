"""How the ranks tell each other which rows of which documents they have loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any

from distca.arguments import is_whole, listed
from distca.errors import InvalidArgumentError
from distca.planner.layout import PADDING, Layout
from distca.planner.layout_arguments import MOST_ROWS, Begins, checked_branches, refuse_cumulative

#: The largest number that a rank can tell.
_MOST = 2**63 - 1

#: Whether the first document of a batch continues the last one of the rank before; None if none ever does.
Continues = Callable[[Any], bool] | None

#: The lengths of a batch's documents, in the order of its rows.
Lengths = Callable[[Any], Sequence[int]]

#: The segments ``(document, begin, end)`` of a batch, in the order of its rows.
Segments = Callable[[Any], Sequence[tuple[int, int, int]]]

#: The branches of a batch, as `Layout` takes them; None if no batch has any.
Branches = Callable[[Any], Mapping[int, Begins]] | None

#: The bidirectional rows ``(document, begin, end)`` of a batch; None if no batch has any.
Bidirectional = Callable[[Any], Sequence[tuple[int, int, int]]] | None


class Telling(ABC):
    """What a rank tells of its batch, in words, and the layout that follows from what all ranks have told.

    Args:
        name: the class that the user has called, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @abstractmethod
    def words(self, batch: Any) -> list[int]:
        """What this rank tells of the batch. Raises InvalidArgumentError if it cannot be so."""

    @abstractmethod
    def layout(self, told: Sequence[Sequence[int]], idle_rows: Sequence[int]) -> Layout:
        """The layout of what the ranks have told, with so many rows of padding on each rank.

        Raises:
            InvalidArgumentError: what they have told does not go together.
        """

    @abstractmethod
    def say(self, words: Sequence[int]) -> str:
        """What these words tell, for messages."""

    @abstractmethod
    def numbers(self, told: Sequence[Sequence[int]]) -> list[dict[int, int]]:
        """For each rank what the layout calls the documents that the rank can speak of, by the rank's own numbers."""


class TellsLengths(Telling):
    """Tells the lengths of a rank's documents; the first is negated if it continues the last one of the rank before."""

    def __init__(self, name: str, lengths: Lengths, continues: Continues = None) -> None:
        super().__init__(name)
        self._lengths, self._continues = lengths, continues

    def words(self, batch: Any) -> list[int]:
        """The lengths."""
        try:
            told = [index(length) for length in self._lengths(batch)]
        except TypeError as error:
            raise InvalidArgumentError(f"{self._name}: a document's length is not an integer: {error}") from None
        if (wrong := next((length for length in told if not 1 <= length <= MOST_ROWS), None)) is not None:
            message = f"{self._name}: a document has length {wrong}, must be at least 1 and at most {MOST_ROWS}"
            refuse_cumulative(told, message)
            raise InvalidArgumentError(message)
        if self._continues is not None and self._continues(batch):
            if not told:
                raise InvalidArgumentError(f"{self._name}: a batch without documents is said to continue one")
            told[0] = -told[0]
        return told

    def layout(self, told: Sequence[Sequence[int]], idle_rows: Sequence[int]) -> Layout:
        """Documents in the order of the ranks. One that continues must follow one."""
        if not any(idle_rows) and all(length > 0 for lengths in told for length in lengths):
            return Layout.from_documents(told)
        ranks: list[list[tuple[int, int, int]]] = []
        document, end = -1, 0
        for rank, (lengths, rows) in enumerate(zip(told, idle_rows, strict=True)):
            segments = []
            for length in lengths:
                if length > 0:
                    document, end = document + 1, 0
                elif rank == 0 or not told[rank - 1]:
                    raise InvalidArgumentError(
                        f"{self._name}: the first document of rank {rank} is said to continue that of the rank before, "
                        "which has none"
                    )
                segments.append((document, end, end + abs(length)))
                end += abs(length)
            ranks.append(segments + _padding(rows))
        return Layout(ranks)

    def say(self, words: Sequence[int]) -> str:
        """The lengths."""
        return f"documents of {list(words)} rows"

    def numbers(self, told: Sequence[Sequence[int]]) -> list[dict[int, int]]:
        """A rank counts its documents from 0. Of one that continues it does not know the first rows."""
        found, document = [], -1
        for lengths in told:
            of_rank = {}
            for number, length in enumerate(lengths):
                if length > 0:
                    document += 1
                    of_rank[number] = document
            found.append(of_rank)
        return found


class TellsSegments(Telling):
    """Tells a rank's segments. Ranks that hold parts of the same document call it by the same number.

    Where batches may have branches, their number and they themselves come before the segments.
    """

    def __init__(self, name: str, segments: Segments, branches: Branches = None) -> None:
        super().__init__(name)
        self._segments, self._branches = segments, branches

    def words(self, batch: Any) -> list[int]:
        """The numbers of all segments, one after another."""
        words: list[int] = []
        if self._branches is not None:
            branches = checked_branches(self._name, self._branches(batch))
            words = [len(branches), *(n for one in branches for n in one)]
        for given in listed(self._name, "segments", self._segments(batch), "a list of (document, begin, end)"):
            segment = listed(self._name, "a segment", given, "(document, begin, end)")
            if len(segment) != 3 or not all(is_whole(n, PADDING) for n in segment) or not 0 <= segment[1] < segment[2]:
                raise InvalidArgumentError(
                    f"{self._name}: a segment is {given!r}; integers (document, begin, end) with 0 <= begin < end are "
                    f"expected, and document {PADDING} for padding"
                )
            words += map(index, segment)
        return words

    def layout(self, told: Sequence[Sequence[int]], idle_rows: Sequence[int]) -> Layout:
        """Documents in the order of their numbers, which may have gaps."""
        split = [self._split(words) for words in told]
        ranks = [segments for _, segments in split]
        documents = self._documents(told)
        numbers = {document: number for number, document in enumerate(documents)} | {PADDING: PADDING}
        segments = [
            [(numbers[document], begin, end) for document, begin, end in of_rank] + _padding(rows)
            for of_rank, rows in zip(ranks, idle_rows, strict=True)
        ]
        branches: dict[int, Begins] = {}
        for rank, (told_branches, _) in enumerate(split):
            for document, begins in told_branches.items():
                of_others = [begins] if isinstance(begins, int) else [of for of, _, _ in begins]
                if not all(one in numbers for one in (document, *of_others)):
                    why = f"; the ranks have rows of {documents}"
                elif branches.setdefault(document, begins) != begins:
                    why = (
                        f"; a rank before it: {_begins_with(branches[document])}. All ranks are expected to tell the "
                        "same, in the same form"
                    )
                else:
                    continue
                raise InvalidArgumentError(
                    f"{self._name}: rank {rank} tells that document {document} {_begins_with(begins)}{why}"
                )
        numbered = {
            numbers[document]: numbers[begins]
            if isinstance(begins, int)
            else [(numbers[of], begin, end) for of, begin, end in begins]
            for document, begins in branches.items()
        }
        try:
            return Layout(segments, branches=numbered)
        except InvalidArgumentError as error:
            called = "" if documents == [*range(len(documents))] else f"; in order, documents are called {documents}"
            raise InvalidArgumentError(f"{self._name}: the segments of the ranks: {error}{called}") from None

    def say(self, words: Sequence[int]) -> str:
        """The segments."""
        branches, segments = self._split(words)
        return f"segments {segments}" + (f", branches {branches}" if branches else "")

    def numbers(self, told: Sequence[Sequence[int]]) -> list[dict[int, int]]:
        """All ranks call a document alike, and may speak of each."""
        return [{document: number for number, document in enumerate(self._documents(told))}] * len(told)

    def _documents(self, told: Sequence[Sequence[int]]) -> list[int]:
        """What the ranks call their documents, in order."""
        return sorted({document for words in told for document, _, _ in self._split(words)[1]} - {PADDING})

    def _split(self, words: Sequence[int]) -> tuple[dict[int, Begins], list[tuple[int, int, int]]]:
        """The branches, and the segments."""
        first = 1 + 4 * words[0] if self._branches is not None and words else 0
        branches: dict[int, Begins] = {}
        ranges: dict[int, list[tuple[int, int, int]]] = {}
        for document, of, begin, end in (words[i : i + 4] for i in range(1, first, 4)):
            if begin < 0:
                branches[document] = of
            else:
                told = branches[document] = ranges.setdefault(document, [])
                if told and (told[-1][0], told[-1][2]) == (of, begin):  # they continue the last ones
                    told[-1] = (of, told[-1][1], end)
                else:
                    told.append((of, begin, end))
        return branches, [(words[i], words[i + 1], words[i + 2]) for i in range(first, len(words), 3)]


def _begins_with(begins: Begins) -> str:
    return f"branches off document {begins}" if isinstance(begins, int) else f"begins with {list(begins)}"


class TellsBidirectional(Telling):
    """Tells a rank's bidirectional rows before what another telling tells: their number, then their numbers.

    Of a document on several ranks, each of these may tell them, and at least one must.
    """

    def __init__(self, name: str, rows: Telling, bidirectional: Callable[[Any], Sequence[tuple[int, int, int]]]):
        super().__init__(name)
        self._rows, self._bidirectional = rows, bidirectional

    def words(self, batch: Any) -> list[int]:
        """The number of ranges, their numbers, and the words of the rows."""
        words: list[int] = []
        expected = "a list of (document, begin, end)"
        for given in listed(self._name, "bidirectional rows", self._bidirectional(batch), expected):
            one = listed(self._name, "bidirectional rows", given, "(document, begin, end)")
            if len(one) != 3 or not all(is_whole(n, 0, _MOST) for n in one):
                raise InvalidArgumentError(
                    f"{self._name}: bidirectional rows are {given!r}; integers (document, begin, end) from 0 to "
                    f"{_MOST} are expected"
                )
            words += map(index, one)
        return [len(words) // 3, *words, *self._rows.words(batch)]

    def layout(self, told: Sequence[Sequence[int]], idle_rows: Sequence[int]) -> Layout:
        """The layout of the rows, with the ranges of all ranks."""
        split = [self._split(words) for words in told]
        rows = [words for _, words in split]
        ranges: dict[int, set[tuple[int, int]]] = {}
        numbers_of = self._rows.numbers(rows)
        for rank, ((of_rank, _), numbers) in enumerate(zip(split, numbers_of, strict=True)):
            for document, begin, end in of_rank:
                if document not in numbers:
                    raise InvalidArgumentError(
                        f"{self._name}: rank {rank} tells bidirectional rows [{begin}, {end}) of document {document}; "
                        f"{sorted(numbers)} are those that it may speak of"
                    )
                ranges.setdefault(numbers[document], set()).add((begin, end))
        layout = self._rows.layout(rows, idle_rows)
        try:
            return layout.with_bidirectional({document: sorted(of) for document, of in ranges.items()})
        except InvalidArgumentError as error:
            called = {number: (name, rank) for rank, of in enumerate(numbers_of) for name, number in of.items()}
            names = {number: f"{name} on rank {rank}" for number, (name, rank) in called.items() if number in ranges}
            raise InvalidArgumentError(
                f"{self._name}: the bidirectional rows of the ranks: {error}; documents are called {names}"
            ) from None

    def say(self, words: Sequence[int]) -> str:
        """The rows and the ranges."""
        ranges, rows = self._split(words)
        return f"{self._rows.say(rows)}, bidirectional rows {ranges}"

    def numbers(self, told: Sequence[Sequence[int]]) -> list[dict[int, int]]:
        """As the telling of rows says."""
        return self._rows.numbers([self._split(words)[1] for words in told])

    @staticmethod
    def _split(words: Sequence[int]) -> tuple[list[tuple[int, int, int]], Sequence[int]]:
        if not words:  # a rank without a batch
            return [], words
        end = 1 + 3 * words[0]
        return [(words[i], words[i + 1], words[i + 2]) for i in range(1, end, 3)], words[end:]


def telling(
    name: str,
    lengths: Lengths | None,
    continues: Continues,
    segments: Segments | None,
    bidirectional: Bidirectional = None,
    branches: Branches = None,
) -> Telling:
    """What tells the rows of batches by exactly one of lengths and segments.

    Raises:
        InvalidArgumentError: none is given, or both; or `continues` without `lengths`, or `branches` without
            `segments`.
    """
    if (lengths is None) == (segments is None):
        raise InvalidArgumentError(f"{name}: give exactly one of lengths= and segments=")
    rows: Telling
    if segments is not None:
        if continues is not None:
            raise InvalidArgumentError(f"{name}: continues= needs lengths=; segments say it by themselves")
        rows = TellsSegments(name, segments, branches)
    else:
        assert lengths is not None
        if branches is not None:
            raise InvalidArgumentError(f"{name}: branches= needs segments=, which say where a branch's own rows begin")
        rows = TellsLengths(name, lengths, continues)
    return rows if bidirectional is None else TellsBidirectional(name, rows, bidirectional)


def _padding(rows: int) -> list[tuple[int, int, int]]:
    return [(PADDING, 0, rows)] if rows else []
