"""Rows in front of pieces of documents, which may lie on other ranks: what a short convolution looks back at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from distca.planner.layout import Layout
from distca.planner.pieces import (
    Piece,
    kept_with_layout,
    num_rows_of,
    one_after_another,
    part_of,
    pieces_of,
    row_numbers,
)

if TYPE_CHECKING:
    from distca.connect.row_exchange import RowExchange


@dataclass(frozen=True)
class Halos:
    """How each piece of a document on a rank gets the rows in front of it, and how they get there.

    Attributes:
        is_moved: whether rows go from rank to rank.
        leave: the numbers of the rows that leave, by the rank that they go to.
        num_leave, num_come: how many rows go to each rank, and come from it.
        take: for each row of a piece, and for those in front of it, its number among this rank's rows and, after them,
            those that came and a row of zeros, which is in front of documents.
        own: where this rank's own rows are among these.
    """

    is_moved: bool
    leave: torch.Tensor
    num_leave: list[int]
    num_come: list[int]
    take: torch.Tensor
    own: torch.Tensor

    def pad(self, rows: torch.Tensor, exchange: RowExchange | None) -> torch.Tensor:
        """The pieces of this rank, each behind its halo.

        Args:
            rows: this rank's rows ``[T, ...]``.
            exchange: between the ranks, where rows move.
        """
        have = [rows]
        if self.is_moved:
            assert exchange is not None
            have.append(exchange.move(rows.index_select(0, self.leave), self.num_leave, self.num_come))
        have.append(rows.new_zeros(1, *rows.shape[1:]))
        return torch.cat(have).index_select(0, self.take)


@kept_with_layout
def halos(layout: Layout, rank: int, width: int, device: torch.device | str = "cpu") -> Halos:
    """The halos of a rank's pieces.

    Args:
        layout: the layout of all ranks.
        rank: this rank.
        width: how many rows in front of a row are looked at.
        device: where the rows are.
    """
    device = torch.device(device)
    documents, padding = pieces_of(layout, rank)
    here: list[tuple[Piece, list[Piece]]] = [(piece, []) for (piece,) in padding]  # with what is in front of it
    go: list[list[Piece]] = [[] for _ in range(layout.num_ranks)]
    come: list[list[Piece]] = [[] for _ in range(layout.num_ranks)]
    is_moved = False
    for document, pieces in enumerate(documents):
        for piece in pieces:
            if not piece.is_own:
                continue
            first = max(0, piece.begin - width)
            before = part_of(pieces, first, piece.begin, document, first)
            is_moved = is_moved or any(part.rank != piece.rank for part in before)
            if piece.rank == rank:
                here.append((piece, before))
            for part in before:
                if part.rank == rank != piece.rank:
                    go[piece.rank].append(part)
                if part.rank != rank == piece.rank:
                    come[part.rank].append(part)

    num_rows = layout.num_rows(rank)
    came = one_after_another(come, num_rows)
    zeros = torch.tensor([num_rows + sum(num_rows_of(come))], device="cpu")
    take, own, begin = [zeros[:0]], [zeros[:0]], 0
    for piece, before in sorted(here, key=lambda one: one[0].row):
        missing = width - sum(num_rows_of([before]))
        take += [zeros.expand(missing), row_numbers((came.get(part, part.row), part) for part in before)]
        take.append(row_numbers([(piece.row, piece)]))
        begin += width
        own.append(row_numbers([(begin, piece)]))
        begin += piece.length
    return Halos(
        is_moved=is_moved,
        leave=row_numbers((part.row, part) for of_rank in go for part in of_rank).to(device),
        num_leave=num_rows_of(go),
        num_come=num_rows_of(come),
        take=torch.cat(take).to(device),
        own=torch.cat(own).to(device),
    )
