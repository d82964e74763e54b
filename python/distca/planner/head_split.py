"""Documents that are cut between ranks, computed by all of them at once: each has all rows, of some heads."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from distca.planner.layout import Layout
from distca.planner.pieces import Piece, kept_with_layout, num_rows_of, one_after_another, pieces_of, row_numbers


class Documents(NamedTuple):
    """Documents that lie one after another.

    Attributes:
        lengths: the rows of each.
        cu_seqlens: int32 ``[N + 1]``: where each begins, and the end of the last one.
    """

    lengths: list[int]
    cu_seqlens: torch.Tensor


@dataclass(frozen=True)
class HeadSplit:
    """Which rows of cut documents go where, so that every rank has all of them of its own heads, and back.

    A document is cut if what it sees lies on several ranks. Others are computed where they are, with all heads.

    Attributes:
        whole: this rank's documents that are not cut. Each run of padding is one.
        whole_rows: the numbers of their rows, one document after another; None if they are all rows, as they lie.
        is_moved: whether there are documents that are cut.
        leave: the numbers of this rank's rows that cut documents see.
        num_come: how many such rows each rank has.
        take: the numbers, among those that come, of the rows of cut documents, one document after another.
        cut: the documents that are cut.
        give: the numbers of the rows, among those of cut documents, that go back, by rank.
        num_give: how many go back to each rank.
        place: for each row of this rank its number among those of whole documents and, after them, those that came
            back, which are in the same order from all ranks.
    """

    whole: Documents
    whole_rows: torch.Tensor | None
    is_moved: bool
    leave: torch.Tensor
    num_come: list[int]
    take: torch.Tensor
    cut: Documents
    give: torch.Tensor
    num_give: list[int]
    place: torch.Tensor


def heads_of_rank(num_heads: int, rank: int, num_ranks: int) -> range:
    """The heads that a rank computes of cut documents: as many as the others, or one more."""
    return range(num_heads * rank // num_ranks, num_heads * (rank + 1) // num_ranks)


@kept_with_layout
def head_split(layout: Layout, rank: int, device: torch.device | str = "cpu") -> HeadSplit:
    """How the ranks share documents that are cut.

    Args:
        layout: the layout of all ranks.
        rank: this rank.
        device: where the rows are.
    """
    device = torch.device(device)
    documents, padding = pieces_of(layout, rank)
    whole, cut = list(padding), []
    for pieces in documents:
        ranks = {piece.rank for piece in pieces}
        if len(ranks) > 1:
            cut.append(pieces)
        elif rank in ranks:
            whole.append(pieces)
    whole.sort(key=lambda pieces: min(piece.row for piece in pieces if piece.is_own))

    # What cut documents see of each rank, each row once: shared rows are seen by several.
    seen = [_rows_seen(cut, on) for on in range(layout.num_ranks)]
    num_come = list(map(len, seen))
    begins = [sum(num_come[:on]) for on in range(layout.num_ranks)]
    take = [
        begins[piece.rank] + torch.searchsorted(seen[piece.rank], row_numbers([(piece.row, piece)]))
        for pieces in cut
        for piece in pieces
    ]
    computed = one_after_another(cut, 0)
    give = [
        [piece for pieces in cut for piece in pieces if piece.is_own and piece.rank == on] for on in range(len(seen))
    ]

    num_rows = layout.num_rows(rank)
    rows_of_whole = row_numbers((piece.row, piece) for pieces in whole for piece in pieces)
    place = torch.zeros(num_rows, dtype=torch.int64, device="cpu")
    result = one_after_another(whole, 0) | one_after_another([give[rank]], len(rows_of_whole))
    for piece, begin in result.items():
        if piece.is_own:
            place[piece.row : piece.row + piece.length] = torch.arange(begin, begin + piece.length, device="cpu")
    is_as_it_lies = torch.equal(rows_of_whole, torch.arange(num_rows, device="cpu"))
    return HeadSplit(
        whole=_documents(whole, device),
        whole_rows=None if is_as_it_lies else rows_of_whole.to(device),
        is_moved=bool(cut),
        leave=seen[rank].to(device),
        num_come=num_come,
        take=torch.cat([rows_of_whole[:0], *take]).to(device),
        cut=_documents(cut, device),
        give=row_numbers((computed[piece], piece) for of_rank in give for piece in of_rank).to(device),
        num_give=num_rows_of(give),
        place=place.to(device),
    )


def _documents(documents: list[list[Piece]], device: torch.device) -> Documents:
    lengths = num_rows_of(documents)
    return Documents(lengths, torch.tensor([*itertools.accumulate(lengths, initial=0)], dtype=torch.int32).to(device))


def _rows_seen(documents: list[list[Piece]], rank: int) -> torch.Tensor:
    """The numbers of the rows of a rank that some documents see, in ascending order."""
    return row_numbers((p.row, p) for pieces in documents for p in pieces if p.rank == rank).unique()
