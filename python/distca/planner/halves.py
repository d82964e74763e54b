"""Two halves of a micro-batch for ping-pong, balanced in attention and in every rank's tokens."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import torch

from distca.arguments import check_type, is_whole
from distca.errors import InvalidArgumentError
from distca.planner.layout import PADDING, Chunk, Layout, Window


@dataclasses.dataclass(frozen=True)
class Half:
    """One half of a micro-batch: some of the documents of a layout, as a layout of its own.

    Attributes:
        layout: the layout of these documents alone, numbered from 0 in their order. A rank's rows may end with padding:
            the idle rows of a rank without any document, and what fills up a multiple.
        documents: the documents' numbers in the whole layout, ascending.
    """

    layout: Layout
    documents: list[int]
    _whole: Layout = dataclasses.field(repr=False)

    def rows(self, rank: int) -> torch.Tensor:
        """Indices of this half's rows in the rank's whole token tensor, in order, int64; its padding is left out."""
        mine, parts, first = set(self.documents), [torch.zeros(0, dtype=torch.int64, device="cpu")], 0
        for document, begin, end in self._whole.segments(rank):
            if document in mine:
                parts.append(torch.arange(first, first + end - begin, device="cpu"))
            first += end - begin
        return torch.cat(parts)

    def is_of(self, layout: Layout) -> bool:
        """Whether this is a half of a layout with these segments."""
        whole, ranks = self._whole, range(layout.num_ranks)
        return (
            whole.num_ranks == layout.num_ranks
            and all(whole.segments(r) == layout.segments(r) for r in ranks)
            and whole.bidirectional == layout.bidirectional
            and whole.branches == layout.branches
        )

    def take(self, whole: torch.Tensor, rank: int, *, dim: int = 0, fill: float = 0) -> torch.Tensor:
        """The rows of this half, taken from a tensor of all the rank's rows.

        Args:
            whole: a tensor whose dimension `dim` is that of the rank's rows.
            rank: the rank.
            dim: the dimension of the rows.
            fill: the value in the half's padding.

        Returns:
            A new tensor with the rows of this half, and its padding behind them.
        """
        rows = self.rows(rank).to(whole.device)
        taken = whole.index_select(dim, rows)
        shape = list(whole.shape)
        shape[dim] = self.layout.num_rows(rank) - len(rows)
        return torch.cat([taken, whole.new_full(shape, fill)], dim) if shape[dim] else taken


def join_halves(parts: Sequence[torch.Tensor], halves: tuple[Half, Half], rank: int, *, dim: int = 0) -> torch.Tensor:
    """A tensor of all the rank's rows, of which `Half.take` would take these parts again.

    Gradients reach both parts, even one without rows: all ranks then make the same calls in backward.

    Args:
        parts: a tensor of each half, whose dimension `dim` is that of the half's rows.
        halves: the halves of one layout.
        rank: the rank.
        dim: the dimension of the rows.

    Returns:
        A new tensor. Padding rows of the layout, which are in neither half, are 0; padding of a half is left out.
    """
    rows = torch.cat([half.rows(rank) for half in halves])
    zeros = list(parts[0].shape)
    zeros[dim] = 1
    own = [part.narrow(dim, 0, len(half.rows(rank))) for part, half in zip(parts, halves, strict=True)]
    of_row = torch.full((halves[0]._whole.num_rows(rank),), len(rows), device="cpu")
    of_row[rows] = torch.arange(len(rows), device="cpu")
    return torch.cat([*own, parts[0].new_zeros(zeros)], dim).index_select(dim, of_row.to(parts[0].device))


def halves(layout: Layout, *, window: Window = None, idle_rows: int = 0, multiple_of: int = 1) -> tuple[Half, Half]:
    """Deals the documents of a layout out to two halves with about equal attention and, on every rank, equal tokens.

    This is a pure function of its arguments. Therefore every rank finds the same halves. Documents stay whole, and
    those that share rows stay together: a document that is longer than all others together is a half that the other
    cannot match. Padding is in neither half.

    Args:
        layout: the layout of the micro-batch.
        window: the layers' window; by default a row sees all of its document, or all up to itself. With a
            `distca.Chunk` it sees those of its chunk. Rows that see both sides have about the same shares.
        idle_rows: rows of padding for a rank that has no row in a half, for models that cannot take an empty tensor.
        multiple_of: each rank's rows of a half are padded to a multiple of this number, for models that share them out.

    Returns:
        The first and the second half.

    Raises:
        InvalidArgumentError: an argument is out of range.

    Examples:
        >>> first, second = distca.halves(distca.Layout.from_documents([[4, 4], [3, 3]]))
        >>> first.documents, second.documents
        ([0, 2], [1, 3])
        >>> second.rows(0)  # of rank 0's token tensor
        tensor([4, 5, 6, 7])
    """
    check_type("halves", "layout", layout, Layout, "distca.Layout.from_documents([[100, 20], [80]])")
    if window is not None and not isinstance(window, Chunk) and not is_whole(window, 1):
        raise InvalidArgumentError(f"halves: window = {window!r}; None or a positive number of keys is allowed")
    for name, value, least in (("idle_rows", idle_rows, 0), ("multiple_of", multiple_of, 1)):
        if not is_whole(value, least):
            raise InvalidArgumentError(f"halves: {name} = {value!r}; at least {least} is allowed")
    own_rows, bidirectional, clusters = layout._own_rows(), layout.bidirectional, layout._core.clusters
    number = {cluster: i for i, cluster in enumerate(sorted(set(clusters)))}
    tokens: list[dict[int, int]] = [defaultdict(int) for _ in number]  # of documents that share rows, by rank
    pairs = [0] * len(number)
    for rank in range(layout.num_ranks):
        for document, begin, end in layout.segments(rank):
            if document != PADDING:
                tokens[number[clusters[document]]][rank] += end - begin
    for document, rows in enumerate(own_rows):
        more = sum((end - begin) * (end - begin - 1) // 2 for begin, end in bidirectional.get(document, ()))
        more -= visible_pairs(rows.start, window)
        pairs[number[clusters[document]]] += visible_pairs(rows.stop, window) + more
    dealt = _deal(pairs, tokens, layout.num_ranks)
    second = [dealt[number[cluster]] for cluster in clusters]
    first = [not one for one in second]
    return _half(layout, first, idle_rows, multiple_of), _half(layout, second, idle_rows, multiple_of)


def visible_pairs(length: int, window: Window) -> int:
    """Pairs of a row and a key of a document that its rows see under the causal mask."""
    if isinstance(window, Chunk):
        chunks, rest = divmod(length, window.rows)
        return chunks * visible_pairs(window.rows, None) + visible_pairs(rest, None)
    seen = min(length, window or length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def _half(layout: Layout, taken: list[bool], idle_rows: int, multiple_of: int) -> Half:
    documents = [document for document, one in enumerate(taken) if one]
    number = {document: i for i, document in enumerate(documents)}
    segments = [
        [(number[document], begin, end) for document, begin, end in layout.segments(rank) if document in number]
        for rank in range(layout.num_ranks)
    ]
    for of_rank in segments:
        rows = sum(end - begin for _, begin, end in of_rank)
        padding = 0 if rows else idle_rows
        padding += -(rows + padding) % multiple_of
        if padding:
            of_rank.append((PADDING, 0, padding))
    bidirectional = {number[d]: ranges for d, ranges in layout.bidirectional.items() if d in number}
    branches = {
        number[d]: [(number[of], begin, end) for of, begin, end in ranges]
        for d, ranges in layout.branches.items()
        if d in number
    }
    half = Layout(segments, branches=branches).with_bidirectional(bidirectional)
    half._longest_of_whole = layout.longest_document  # both halves then have the same RoPE frequencies
    return Half(half, documents, layout)


class _Difference:
    """First half minus second half, each quantity as a fraction of the whole: attention, and each rank's tokens."""

    def __init__(self, pairs: list[int], tokens: list[dict[int, int]], num_ranks: int) -> None:
        totals = [sum(pairs), *[0] * num_ranks]
        for of in tokens:
            for rank, n in of.items():
                totals[1 + rank] += n
        self.weights = [
            [(0, cost / totals[0]), *((1 + rank, n / totals[1 + rank]) for rank, n in sorted(of.items()))]
            for cost, of in zip(pairs, tokens, strict=True)
        ]
        self.value = [0.0] * (1 + num_ranks)

    def change(self, document: int, factor: float) -> float:
        """How much the sum of squares grows if the document counts `factor` times more."""
        return sum(factor * weight * (2 * self.value[i] + factor * weight) for i, weight in self.weights[document])

    def add(self, document: int, factor: float) -> None:
        for i, weight in self.weights[document]:
            self.value[i] += factor * weight


_MOST_SWAPS = 64  # every pair of this many documents is tried


def _deal(pairs: list[int], tokens: list[dict[int, int]], num_ranks: int) -> list[bool]:
    """For each document whether it is in the second half.

    The costliest documents are placed first, each where it helps most. Then moves and swaps improve the result.
    """
    difference = _Difference(pairs, tokens, num_ranks)
    order = sorted(range(len(pairs)), key=lambda document: (-pairs[document], document))
    sign = [1.0] * len(pairs)
    for document in order:
        sign[document] = 1.0 if difference.change(document, 1.0) <= difference.change(document, -1.0) else -1.0
        difference.add(document, sign[document])

    def move(document: int) -> None:
        difference.add(document, -2.0 * sign[document])
        sign[document] = -sign[document]

    def helps(*documents: int) -> bool:
        """Moves the documents to their other halves. Moves them back unless that is better."""
        before = sum(x * x for x in difference.value)
        for document in documents:
            move(document)
        if sum(x * x for x in difference.value) < before - 1e-12:
            return True
        for document in documents:
            move(document)
        return False

    few = order[:_MOST_SWAPS]
    for _ in range(4):
        better = False
        for document in order:
            if difference.change(document, -2.0 * sign[document]) < -1e-12:
                move(document)
                better = True
        for i, one in enumerate(few):
            for other in few[i + 1 :]:
                better |= sign[one] != sign[other] and helps(one, other)
        if not better:
            break
    return [one < 0 for one in sign]
