"""Documents and their noised rows, as the documents of a layout: see `Layout.block_diffusion`."""

from __future__ import annotations

from typing import NamedTuple

Segment = tuple[int, int, int]
Range = tuple[int, int]


class Noised(NamedTuple):
    """What a layout is made of: segments of each rank, branches, and bidirectional rows."""

    segments: list[list[Segment]]
    branches: dict[int, int]
    bidirectional: dict[int, list[Range]]


def noised(lengths: list[int], segments: list[list[Segment]], rows: int) -> Noised:
    """Adds the noised rows to segments of documents with these lengths, in blocks of `rows`.

    A block of noised rows is a branch of its document, which it leaves at its first row. The first block, which sees
    nothing of the document, is a document by itself.
    """
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

    def noised_rows(document: int, begin: int, end: int) -> list[Segment]:
        if document < 0:  # padding
            return [(document, 0, end - begin)]
        cut = []
        for block in range(begin // rows, -(-end // rows)):
            start, stop = blocks[document][block]
            cut.append((first[document] + block, max(start, begin), min(stop, end)))
        return cut

    both = [of_rank + [one for segment in of_rank for one in noised_rows(*segment)] for of_rank in segments]
    return Noised(both, branches, bidirectional)
