"""Rows of documents that are cut between ranks, or that begin with rows of others: brought together, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from distca.planner.layout import Layout
from distca.planner.pieces import Piece, kept_with_layout, num_rows_of, one_after_another, pieces_of, row_numbers

if TYPE_CHECKING:
    from distca.connect.row_exchange import RowExchange


@dataclass(frozen=True)
class Gathering:
    """Which whole documents a rank has once every document has all that it sees on one rank, and how rows get there.

    Documents that have it anyway stay where they are. The others go, the longest first, to the rank that has the fewest
    rows by then, where rows that it has anyway do not count. All ranks conclude alike.

    Attributes:
        lengths: the rows of each whole document on this rank, and of each run of padding. A rank without documents
            takes one row of its own as one, or a row of zeros, because a module that runs on documents must run on all
            ranks: its weights may be spread over them.
        is_moved: whether rows go from rank to rank.
        leave: the numbers of the rows that leave, by the rank that they go to.
        num_leave, num_come: how many rows go to each rank, and come from it.
        take: for each row of these documents its number among this rank's rows and, after them, those that came.
        give: the numbers of the rows, among those of the documents, that go back, by rank.
        num_give, num_return: how many rows go back to each rank, and come back from it.
        place: for each row of this rank its number among those of the documents and, after them, those that came back.
    """

    lengths: list[int]
    is_moved: bool
    leave: torch.Tensor
    num_leave: list[int]
    num_come: list[int]
    take: torch.Tensor
    give: torch.Tensor
    num_give: list[int]
    num_return: list[int]
    place: torch.Tensor

    def gather(self, rows: torch.Tensor, exchange: RowExchange | None) -> torch.Tensor:
        """The rows of this rank's whole documents.

        Args:
            rows: this rank's rows ``[T, ...]``.
            exchange: between the ranks, where rows move.
        """
        have = [rows]
        if self.is_moved:
            assert exchange is not None
            have.append(exchange.move(rows.index_select(0, self.leave), self.num_leave, self.num_come))
        if not any(map(len, have)):
            have.append(rows.new_zeros(1, *rows.shape[1:]))
        return torch.cat(have).index_select(0, self.take)

    def scatter(self, rows: torch.Tensor, exchange: RowExchange | None) -> torch.Tensor:
        """The reverse of `gather`."""
        have = [rows]
        if self.is_moved:
            assert exchange is not None
            have.append(exchange.move(rows.index_select(0, self.give), self.num_give, self.num_return))
        return torch.cat(have).index_select(0, self.place)


@kept_with_layout
def gathering(layout: Layout, rank: int, device: torch.device | str = "cpu") -> Gathering | None:
    """How documents get together; None if each of them lies on one rank, all that it sees in a row.

    Args:
        layout: the layout of all ranks.
        rank: this rank.
        device: where the rows are.
    """
    device = torch.device(device)
    documents, padding = pieces_of(layout, rank)
    if all(len(pieces) == 1 for pieces in documents):
        return None
    owners = _owners(layout, documents)

    # Documents of this rank in the order of its rows, then those of which it has none of their own.
    num_rows = layout.num_rows(rank)
    here = [*padding, *(pieces for pieces, owner in zip(documents, owners, strict=True) if owner == rank)]
    here.sort(key=lambda pieces: next((p.row for p in pieces if p.rank == rank and p.is_own), num_rows))
    go: list[list[Piece]] = [[] for _ in range(layout.num_ranks)]
    come: list[list[Piece]] = [[] for _ in range(layout.num_ranks)]
    for pieces, owner in zip(documents, owners, strict=True):
        for piece in pieces:
            if piece.rank == rank != owner:
                go[owner].append(piece)
            if piece.rank != rank == owner:
                come[piece.rank].append(piece)
    give, back = _own(come), _own(go)

    first = {piece: piece.row for pieces in here for piece in pieces if piece.rank == rank}
    first |= one_after_another(come, num_rows)  # the number of a piece's first row among those that are here
    computed = one_after_another(here, 0)
    returned = one_after_another(back, max(sum(num_rows_of(here)), 1))
    place = torch.zeros(num_rows, dtype=torch.int64, device="cpu")
    for piece, begin in (computed | returned).items():
        if piece.rank == rank and piece.is_own:
            place[piece.row : piece.row + piece.length] = torch.arange(begin, begin + piece.length, device="cpu")
    take = row_numbers((first[piece], piece) for pieces in here for piece in pieces) if here else place.new_zeros(1)
    return Gathering(
        lengths=num_rows_of(here) or [1],
        is_moved=any(p.rank != owner for pieces, owner in zip(documents, owners, strict=True) for p in pieces),
        leave=row_numbers((piece.row, piece) for of_rank in go for piece in of_rank).to(device),
        num_leave=num_rows_of(go),
        num_come=num_rows_of(come),
        take=take.to(device),
        give=row_numbers((computed[piece], piece) for of_rank in give for piece in of_rank).to(device),
        num_give=num_rows_of(give),
        num_return=num_rows_of(back),
        place=place.to(device),
    )


def _own(of_ranks: list[list[Piece]]) -> list[list[Piece]]:
    return [[piece for piece in of_rank if piece.is_own] for of_rank in of_ranks]


def _owners(layout: Layout, documents: list[list[Piece]]) -> list[int]:
    """The rank on which each document is whole."""
    owners = [pieces[0].rank for pieces in documents]
    lengths, load, apart = num_rows_of(documents), [0] * layout.num_ranks, []
    for document, pieces in enumerate(documents):
        if all(piece.rank == owners[document] for piece in pieces):
            load[owners[document]] += lengths[document]
        else:
            apart.append(document)
    for document in sorted(apart, key=lambda document: -lengths[document]):
        has = [0] * layout.num_ranks
        for piece in documents[document]:
            has[piece.rank] += piece.length
        owner = min(range(layout.num_ranks), key=lambda rank: load[rank] - has[rank])
        owners[document] = owner
        load[owner] += lengths[document]
    return owners
