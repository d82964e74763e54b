"""Where the rows of documents lie: the pieces of each, on which rank, and in what order."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch

from distca.planner.layout import PADDING, Layout

_Made = TypeVar("_Made")
_Arguments = ParamSpec("_Arguments")


def kept_with_layout(make: Callable[_Arguments, _Made]) -> Callable[_Arguments, _Made]:
    """Decorates a function of a layout, which comes first, and of other arguments: it runs once for each of these as
    long as the layout lives.
    """
    kept: weakref.WeakKeyDictionary[Layout, dict[Any, _Made]] = weakref.WeakKeyDictionary()

    @functools.wraps(make)
    def find(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Made:
        layout, *others = cast("tuple[Layout, Any]", args)
        made = kept.setdefault(layout, {})
        key = (*others, *kwargs.items())
        if key not in made:
            with torch.inference_mode(False):  # otherwise no backward could keep its tensors
                made[key] = make(*args, **kwargs)
        return made[key]

    return find


class Piece(NamedTuple):
    """Rows of a document that follow each other on a rank.

    Attributes:
        document: the document; `PADDING` for padding.
        begin: the first of them, of all rows that the document sees.
        length: their number.
        rank: the rank that has them.
        row: the number of the first one among its rows.
        is_own: whether they are the document's own, and not shared.
    """

    document: int
    begin: int
    length: int
    rank: int
    row: int
    is_own: bool = True


def pieces_of(layout: Layout, rank: int) -> tuple[list[list[Piece]], list[list[Piece]]]:
    """The pieces of all that each document sees, in order, and each run of padding on this rank."""
    own: list[list[Piece]] = [[] for _ in layout.document_lengths]
    padding: list[list[Piece]] = []
    for on in range(layout.num_ranks):
        row = 0
        for document, begin, end in layout.segments(on):
            piece = Piece(document, begin, end - begin, on, row)
            row += piece.length
            if document != PADDING:
                own[document].append(piece)
            elif on == rank:
                padding.append([piece])
    own = [_joined(sorted(pieces)) for pieces in own]
    documents = list(own)
    for document, shared in layout.branches.items():
        before: list[Piece] = []
        begin = 0
        for other, first, last in shared:
            before += part_of(own[other], first, last, document, begin)
            begin += last - first
        documents[document] = before + own[document]
    return documents, padding


def _joined(pieces: list[Piece]) -> list[Piece]:
    """The same rows; pieces that follow each other on a rank are one."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].rank == piece.rank and joined[-1].row + joined[-1].length == piece.row:
            before = joined.pop()
            piece = before._replace(length=before.length + piece.length)
        joined.append(piece)
    return joined


def part_of(pieces: list[Piece], first: int, last: int, document: int, begin: int) -> list[Piece]:
    """The rows ``[first, last)`` of another document that `document` sees from its row `begin` on."""
    parts = []
    for piece in pieces:
        low, high = max(first, piece.begin), min(last, piece.begin + piece.length)
        if low < high:
            row = piece.row + low - piece.begin
            parts.append(Piece(document, begin + low - first, high - low, piece.rank, row, is_own=False))
    return parts


def num_rows_of(pieces: Sequence[Sequence[Piece]]) -> list[int]:
    """How many rows each of these has."""
    return [sum(piece.length for piece in some) for some in pieces]


def one_after_another(pieces: list[list[Piece]], begin: int) -> dict[Piece, int]:
    """The number of each piece's first row, if they lie one after another from `begin` on."""
    flat = [piece for some in pieces for piece in some]
    return dict(zip(flat, itertools.accumulate((p.length for p in flat), initial=begin), strict=False))


def row_numbers(pieces: Iterable[tuple[int, Piece]]) -> torch.Tensor:
    """The numbers of the rows of pieces, each of which is given with that of its first row."""
    parts = [torch.arange(begin, begin + piece.length, device="cpu") for begin, piece in pieces]
    return torch.cat([torch.zeros(0, dtype=torch.int64, device="cpu"), *parts])


def whole_pieces(layout: Layout, rank: int) -> list[tuple[int, int, int]]:
    """The rank's segments ``(document, begin, end)``. Those that follow each other in a document are one."""
    pieces: list[tuple[int, int, int]] = []
    for document, begin, end in layout.segments(rank):
        if pieces and document != PADDING and pieces[-1][0] == document and pieces[-1][2] == begin:
            begin = pieces.pop()[1]
        pieces.append((document, begin, end))
    return pieces


def cut_document(layout: Layout) -> tuple[int, int] | None:
    """A document whose own rows do not follow each other on a rank, and that rank; None if those of all do. The same on
    all ranks.
    """
    own = layout._own_rows()
    for rank in range(layout.num_ranks):
        for document, begin, end in whole_pieces(layout, rank):
            if document != PADDING and range(begin, end) != own[document]:
                return document, rank
    return None
