"""What layouts that are made of others consist of: documents with their noised rows (`Layout.block_diffusion`), and
chunks of documents (`Layout.chunked`).
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from distca.errors import InvalidArgumentError

Segment: TypeAlias = tuple[int, int, int]
Range: TypeAlias = tuple[int, int]


class Derived(NamedTuple):
    """What a layout is made of: segments of each rank, what documents begin with, and bidirectional rows."""

    segments: list[list[Segment]]
    branches: dict[int, int | list[Segment]]
    bidirectional: dict[int, list[Range]]


def noised(lengths: list[int], segments: list[list[Segment]], rows: int) -> Derived:
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
    branches: dict[int, int | list[Segment]] = {}
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
    return Derived(both, branches, bidirectional)


def chunked(
    own: list[range],
    segments: list[list[Segment]],
    branches: dict[int, list[Segment]],
    bidirectional: dict[int, list[Range]],
    rows: int,
) -> Derived:
    """Makes each chunk of `rows` rows of a document a document. `own` are the rows of each that it shares with none
    before it.

    Raises:
        InvalidArgumentError: rows that see each other lie in two chunks.
    """
    first, total = [], 0  # the number that the chunk of a document's row 0 has or, in a branch, would have
    for of_document in own:
        first.append(total - of_document.start // rows)
        total = first[-1] + -(-of_document.stop // rows)

    def in_chunks(document: int, begin: int, end: int) -> list[Segment]:
        if document < 0:  # padding
            return [(document, 0, end - begin)]
        cut = []
        for chunk in range(begin // rows, -(-end // rows)):
            start = chunk * rows
            cut.append((first[document] + chunk, max(begin - start, 0), min(end - start, rows)))
        return cut

    ranges_of: dict[int, list[Range]] = {}
    for document, ranges in bidirectional.items():
        for begin, end in ranges:
            chunk, start = begin // rows, begin // rows * rows
            if end > start + rows:
                raise InvalidArgumentError(
                    f"layout: bidirectional rows [{begin}, {end}) of document {document} lie in several chunks of "
                    f"{rows} rows; rows that see each other are expected in one"
                )
            ranges_of.setdefault(first[document] + chunk, []).append((begin - start, end - start))
    shared_by: dict[int, int | list[Segment]] = {}
    for document, begins in branches.items():
        chunk = own[document].start // rows  # of all its chunks the first one alone may share rows
        at, shared = 0, list[Segment]()
        for of, begin, end in begins:
            shift, at = at - begin, at + end - begin
            begin = max(begin, chunk * rows - shift)
            while begin < end:
                in_chunk, take = begin % rows, min(end - begin, rows - begin % rows)
                shared.append((first[of] + begin // rows, in_chunk, in_chunk + take))
                begin += take
        if shared:
            shared_by[first[document] + chunk] = shared
    cut = [[one for segment in of_rank for one in in_chunks(*segment)] for of_rank in segments]
    return Derived(cut, shared_by, ranges_of)
