"""The layout of a step of block diffusion: `Layout.block_diffusion`."""

from __future__ import annotations

from distca.arguments import is_whole
from distca.errors import InvalidArgumentError
from distca.planner.layout import PADDING, Layout

Segments = list[tuple[int, int, int]]


def block_diffusion(layout: Layout, rows: int) -> Layout:
    """See `Layout.block_diffusion`. A block of noised rows is a branch of its document, which it leaves at its first
    row; the first block, which sees nothing of the document, is a document by itself.
    """
    if not is_whole(rows, 1):
        raise InvalidArgumentError(f"layout: blocks of {rows!r} rows; a positive integer is expected")
    for given, what in ((layout.branches, "share rows"), (layout.bidirectional, "have rows that see later ones")):
        if given:
            raise InvalidArgumentError(
                f"layout: block_diffusion makes branches and bidirectional rows itself, and documents {what} already"
            )
    lengths = layout.document_lengths
    blocks = [[(start, min(start + rows, length)) for start in range(0, length, rows)] for length in lengths]
    first, total = [], len(lengths)  # the number of each document's first block
    for of_document in blocks:
        first.append(total)
        total += len(of_document)
    bidirectional = dict(enumerate(blocks))
    branches = {}
    for document, of_document in enumerate(blocks):
        for block, ends in enumerate(of_document):
            bidirectional[first[document] + block] = [ends]
            if block > 0:
                branches[first[document] + block] = document

    def noised(document: int, begin: int, end: int) -> Segments:
        if document == PADDING:
            return [(PADDING, 0, end - begin)]
        return [
            (first[document] + block, max(start, begin), min(stop, end))
            for block, (start, stop) in enumerate(blocks[document][: -(-end // rows)])
            if stop > begin
        ]

    segments = []
    for rank in range(layout.num_ranks):
        of_rank = layout.segments(rank)
        segments.append(of_rank + [one for segment in of_rank for one in noised(*segment)])
    return Layout(segments, branches=branches).with_bidirectional(bidirectional)
