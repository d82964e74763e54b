"""Which rows of which documents lie on which rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, TypeAlias

import torch

from distca import _C
from distca.arguments import is_whole, listed
from distca.errors import InvalidArgumentError
from distca.planner.derived import chunked, noised
from distca.planner.layout_arguments import (
    MOST_ROWS,
    Begins,
    bad_length,
    bad_segment,
    checked_branches,
    lists_of_ranks,
    refuse_cumulative,
)
from distca.planner.layout_arguments import PADDING as PADDING


@dataclass(frozen=True)
class Chunk:
    """Attention in chunks, in the place of a window: a row sees the keys of its chunk up to itself.

    A document is cut into chunks from its first row on. It is for `plans` and `halves`, and for layers such as those of
    Llama 4.

    Attributes:
        rows: rows of a chunk.

    Raises:
        InvalidArgumentError: `rows` is no positive integer.
    """

    rows: int

    def __post_init__(self) -> None:
        if not is_whole(self.rows, 1, MOST_ROWS):
            raise InvalidArgumentError(f"Chunk: rows = {self.rows!r}; an integer from 1 to {MOST_ROWS} is expected")


#: What a layer's rows see of their document: the last so many rows, a chunk of it, or all of it (None).
Window: TypeAlias = int | Chunk | None


class Layout:
    """Which rows of which documents each rank holds, in the order of its packed token tensor.

    Args:
        ranks: for each rank its segments ``(document, begin, end)``: rows ``[begin, end)`` of a document. Documents are
            numbered from 0 without gaps and are covered exactly once. Document ``-1`` is padding of ``end - begin``
            rows.
        branches: documents whose first rows are those of others, each with what it begins with. A document's number
            stands for all rows that it has before this one's own: ``{1: 0, 2: 0}`` for two answers to one prompt. A
            list of rows ``(document, begin, end)``, own ones of any other documents, stands for these in this order:
            ``{2: [(0, 0, 100), (1, 0, 50)]}`` for a question to two passages that do not see each other. The segments
            of a branch begin at the first row of its own, ``r``: what it begins with are rows ``[0, r)``. Its rows see
            these and its own, as its mask says, as if they were one document. Rows of other branches they do not see. A
            branch may have branches: each names the document that has the row before its own first one. Shared rows
            are computed once, and lie on a rank once.

    Raises:
        InvalidArgumentError: a document is not covered exactly once, or a number is wrong. The message names the
            document, the rank and the rows.

    Examples:
        >>> layout = distca.Layout([[(0, 0, 4), (1, 4, 6), (2, 4, 7)]], branches={1: 0, 2: 0})
        >>> layout.position_ids(0)
        tensor([0, 1, 2, 3, 4, 5, 4, 5, 6])
        >>> distca.Layout([[(0, 0, 3), (1, 0, 2)], [(2, 5, 7)]], branches={2: [(0, 0, 3), (1, 0, 2)]}).branches
        {2: [(0, 0, 3), (1, 0, 2)]}
    """

    _longest_of_whole: int | None = None  # set if this is a half of a layout

    def __init__(
        self, ranks: Sequence[Sequence[tuple[int, int, int]]], *, branches: Mapping[int, Begins] | None = None
    ) -> None:
        ranks = [
            [tuple(listed("layout", "a segment", segment, "(document, begin, end)")) for segment in of_rank]
            for of_rank in lists_of_ranks(ranks, "segments (document, begin, end)")
        ]
        if any(len(segment) != 3 for of_rank in ranks for segment in of_rank):
            raise bad_segment(ranks)
        try:
            segments = [[(index(d), index(b), index(e)) for d, b, e in of_rank] for of_rank in ranks]
            self._core = _core(segments, checked_branches("layout", {} if branches is None else branches))
        except TypeError:
            raise bad_segment(ranks) from None

    def __getstate__(self) -> dict[str, Any]:
        """The segments. They are checked again when the layout is made from them."""
        segments = [self.segments(rank) for rank in range(self.num_ranks)]
        return {
            "segments": segments,
            "longest_of_whole": self._longest_of_whole,
            "shared": self._core.shared,
            "bidirectional": self._core.bidirectional,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickles of earlier versions have pairs of branches, or lack these.
        self._core = _C.Layout(state["segments"], state.get("branches", []), state.get("shared", []))
        if rows := state.get("bidirectional"):
            self._core = self._core.with_bidirectional(rows)
        if state["longest_of_whole"] is not None:
            self._longest_of_whole = state["longest_of_whole"]

    @classmethod
    def _wrap(cls, core: _C.Layout) -> Layout:
        layout = cls.__new__(cls)
        layout._core = core
        return layout

    @classmethod
    def from_documents(cls, lengths: Sequence[Sequence[int]]) -> Layout:
        """A layout of whole documents on each rank (data parallel), numbered over the ranks in order.

        Args:
            lengths: for each rank the lengths of its documents, in tokens. A rank may have none.

        Raises:
            InvalidArgumentError: a length is out of range.

        Examples:
            >>> layout = distca.Layout.from_documents([[4, 2], [3]])
            >>> layout.segments(0)  # (document, begin, end)
            [(0, 0, 4), (1, 0, 2)]
            >>> layout.position_ids(0)
            tensor([0, 1, 2, 3, 0, 1])
        """
        lengths = lists_of_ranks(lengths, "lengths")
        for rank, of_rank in enumerate(lengths):
            refuse_cumulative(of_rank, f"layout: the first document on rank {rank} has length 0")
        try:
            return cls._wrap(_C.Layout.from_documents([[index(n) for n in rank] for rank in lengths]))
        except TypeError:
            raise bad_length((f" on rank {rank}", n) for rank, of in enumerate(lengths) for n in of) from None

    @classmethod
    def packed(cls, lengths: Sequence[int], *, ranks: int, tokens_per_rank: int) -> Layout:
        """A layout of documents one after another. One that does not fit on a rank continues on the next.

        Args:
            lengths: lengths in tokens; their sum is at most ``ranks * tokens_per_rank``.
            ranks: number of ranks; the last ones may stay empty.
            tokens_per_rank: tokens that fit on one rank.

        Raises:
            InvalidArgumentError: a number is out of range, or the documents do not fit.

        Examples:
            >>> layout = distca.Layout.packed([4, 5], ranks=2, tokens_per_rank=6)
            >>> layout.segments(0), layout.segments(1)
            ([(0, 0, 4), (1, 0, 2)], [(1, 2, 5)])
        """
        lengths = listed("layout", "lengths", lengths, "a list of lengths")
        refuse_cumulative(lengths)
        try:
            return cls._wrap(_C.Layout.packed([index(n) for n in lengths], ranks, tokens_per_rank))
        except TypeError:
            raise bad_length(("", n) for n in lengths) from None

    @classmethod
    def head_tail(
        cls, lengths: Sequence[int], *, ranks: int, longer_than: int = 0, context: int | None = None
    ) -> Layout:
        """A context-parallel layout: ``2 * ranks`` chunks a document; rank r holds the r-th chunk from either end.

        Args:
            lengths: lengths in tokens. They may be any; no padding is needed.
            ranks: number of ranks.
            longer_than: only documents of more tokens are cut like that. The others fill the ranks up to equal rows,
                one after another, and are cut where a rank is full. With half of the mean rows of a rank the long
                documents are on all ranks, and nearly all short ones are whole.
            context: the number of neighbouring ranks that share a document; by default all. Groups of so many ranks,
                the last one of fewer if need be, get equal shares of all rows, one after another. Each cuts its share
                as above. A document that does not fit into a group goes on in the next. The keys of a document travel
                to more ranks if more share it, and the time to plan grows with the cube of this number: give it where
                there are many ranks.

        Raises:
            InvalidArgumentError: a number is out of range.

        Examples:
            >>> layout = distca.Layout.head_tail([8], ranks=2)
            >>> layout.segments(0), layout.segments(1)
            ([(0, 0, 2), (0, 6, 8)], [(0, 2, 4), (0, 4, 6)])
            >>> layout = distca.Layout.head_tail([3, 8, 1], ranks=2, longer_than=6)
            >>> layout.segments(0), layout.segments(1)
            ([(1, 0, 2), (1, 6, 8), (0, 0, 2)], [(1, 2, 4), (1, 4, 6), (0, 2, 3), (2, 0, 1)])
            >>> layout = distca.Layout.head_tail([8, 8], ranks=4, context=2)
            >>> layout.segments(0), layout.segments(2)
            ([(0, 0, 2), (0, 6, 8)], [(1, 0, 2), (1, 6, 8)])
        """
        lengths = listed("layout", "lengths", lengths, "a list of lengths")
        refuse_cumulative(lengths)
        if not is_whole(longer_than, 0, MOST_ROWS):
            raise InvalidArgumentError(f"layout: longer_than is {longer_than!r}; 0 to {MOST_ROWS} tokens are allowed")
        if context is not None and not is_whole(context, 1):
            raise InvalidArgumentError(
                f"layout: context = {context!r}; a number of ranks, or None for all, is expected"
            )
        try:
            return cls._wrap(_C.Layout.head_tail([index(n) for n in lengths], ranks, longer_than, context))
        except TypeError:
            raise bad_length(("", n) for n in lengths) from None

    @classmethod
    def spread(cls, lengths: Sequence[int], *, ranks: int) -> Layout:
        """The homes to take where a loader may choose them: a long document lies on many ranks, short ones whole.

        All ranks have equal rows, to a row. A server needs all keys of a document that it computes a part of, and they
        leave through the ports of the document's homes. The keys that leave are as many as the document's length times
        its servers, whose number grows with its squared length. Therefore a document lies on ``ranks`` times the share
        of its cubed length in all cubed lengths, on neighbouring ranks (rank 0 is the neighbour of the last one), if
        these are at least 1.5 times as many as its rows fill. Each holds a part from either end, as with `head_tail`.
        The others fill the ranks one after another, and are cut where a rank is full.

        docs/simulator.md, "From 64 to 1,024 GPUs", compares modelled steps with those of `packed`.

        Args:
            lengths: lengths in tokens.
            ranks: number of ranks.

        Raises:
            InvalidArgumentError: a number is out of range.

        Examples:
            >>> layout = distca.Layout.spread([40, 6, 8, 2, 8, 26, 30], ranks=4)
            >>> [layout.num_rows(rank) for rank in range(4)]
            [30, 30, 30, 30]
            >>> layout.segments(0)  # of the longest document, whose rows fill 1.3 ranks, a part from either end
            [(0, 0, 6), (0, 33, 40), (1, 0, 6), (2, 0, 8), (3, 0, 2), (4, 0, 1)]
        """
        lengths = listed("layout", "lengths", lengths, "a list of lengths")
        refuse_cumulative(lengths)
        try:
            return cls._wrap(_C.Layout.spread([index(n) for n in lengths], ranks))
        except TypeError:
            raise bad_length(("", n) for n in lengths) from None

    @classmethod
    def join(cls, parts: Sequence[tuple[Layout, Sequence[int]]], *, num_ranks: int) -> Layout:
        """One layout of several, each on ranks of its own. Documents are numbered on from part to part.

        Args:
            parts: layouts, each with the ranks that hold it: rank r of the layout becomes rank ``ranks[r]``.
            num_ranks: number of ranks of the whole. Ranks that no part names have no rows.

        Raises:
            InvalidArgumentError: a part names too few or too many ranks, or ranks that another part has or that do not
                exist.

        Examples:
            >>> first, second = distca.Layout.from_documents([[4], [3]]), distca.Layout.from_documents([[2, 2]])
            >>> whole = distca.Layout.join([(first, [0, 1]), (second, [3])], num_ranks=4)
            >>> [whole.segments(rank) for rank in range(4)]
            [[(0, 0, 4)], [(1, 0, 3)], [], [(2, 0, 2), (3, 0, 2)]]
        """
        if not is_whole(num_ranks, 1):
            raise InvalidArgumentError(f"layout: num_ranks = {num_ranks!r}; a positive integer is expected")
        cores, longest = [], 0
        for layout, ranks in parts:
            if not isinstance(layout, Layout):
                raise InvalidArgumentError(f"layout: a part is a {type(layout).__name__}; a distca.Layout is expected")
            ranks = listed("layout", "the ranks of a part", ranks, "a list of ranks")
            try:
                cores.append((layout._core, [index(rank) for rank in ranks]))
            except TypeError:
                raise InvalidArgumentError(f"layout: a part is put on ranks {ranks}; integers are expected") from None
            longest = max(longest, layout.longest_document)
        whole = cls._wrap(_C.Layout.join(cores, num_ranks))
        whole._longest_of_whole = longest or None  # parts may be halves
        return whole

    def with_bidirectional(self, rows: Mapping[int, Iterable[tuple[int, int]]]) -> Layout:
        """The same rows, some of which also see the rows after them: a prefix, or the tokens of an image.

        Under the causal mask each row of ``[begin, end)`` sees what the mask lets it see, and all rows after it up to
        ``end``. Without a window these rows see each other; a window still hides keys that lie further back. Other rows
        see what they saw. This is the mask of prefix language models (arXiv 1910.10683), of PaliGemma (arXiv
        2407.07726), and of Gemma 3 and 4 with images. The full mask lets all rows see each other anyway.

        Args:
            rows: for each document that has any, ranges ``(begin, end)`` of such rows. Ranges of a document do not
                overlap; two that touch stay two. They may go over the borders of ranks. They take the place of those
                that this layout has.

        Raises:
            InvalidArgumentError: a document does not exist, or a range is not one of its rows or overlaps another.

        Examples:
            >>> layout = distca.Layout.from_documents([[6, 4]]).with_bidirectional({0: [(0, 2), (3, 5)]})
            >>> layout.bidirectional
            {0: [(0, 2), (3, 5)]}
        """
        given: list[tuple[int, int, int]] = []
        expected = "a mapping of documents to lists of (begin, end), such as {0: [(0, 256)]},"
        if not isinstance(rows, Mapping):
            raise InvalidArgumentError(f"layout: bidirectional rows are {rows!r}; {expected} is expected")
        for document, ranges in rows.items():
            if not is_whole(document, 0, len(self.document_lengths) - 1):
                raise InvalidArgumentError(
                    f"layout: bidirectional rows of document {document!r}; the layout has documents 0 to "
                    f"{len(self.document_lengths) - 1}"
                )
            for one in listed("layout", f"the bidirectional rows of document {document!r}", ranges, expected):
                ends = list(one) if isinstance(one, Iterable) else []
                if len(ends) != 2 or not all(is_whole(n, 0, MOST_ROWS) for n in ends):
                    raise InvalidArgumentError(
                        f"layout: a range of bidirectional rows of document {document!r} is {one!r}; integers "
                        f"(begin, end) from 0 to {MOST_ROWS} are expected, in a list: {{0: [(0, 256)]}}"
                    )
                given.append((index(document), index(ends[0]), index(ends[1])))
        layout = Layout._wrap(self._core.with_bidirectional(given))
        layout._longest_of_whole = self._longest_of_whole
        return layout

    def block_diffusion(self, rows: int) -> Layout:
        """Each rank's rows and, after them, the same rows once more in the same order, noised, with the mask of block
        diffusion language models (BD3-LM, arXiv 2503.09573).

        Documents are cut into blocks of `rows` from their first row on. A row of a document sees its own block and all
        before it. A noised row sees the noised rows of its block, and the document's rows of all blocks before that
        one. So it is under the causal mask; a window hides what lies further back. A rank's tokens are
        ``torch.cat([clean, noised])``; `position_ids` are those of the document in both.

        The noised blocks are documents of their own, numbered after the layout's documents: branches (`Layout`) with
        bidirectional rows.

        Args:
            rows: rows of a block. The last block of a document may have fewer.

        Raises:
            InvalidArgumentError: `rows` is no positive integer, or documents share rows or have bidirectional ones
                already.

        Examples:
            >>> layout = distca.Layout.from_documents([[5], [2]]).block_diffusion(2)
            >>> layout.segments(0), layout.segments(1)
            ([(0, 0, 5), (2, 0, 2), (3, 2, 4), (4, 4, 5)], [(1, 0, 2), (5, 0, 2)])
            >>> layout.branches
            {3: [(0, 0, 2)], 4: [(0, 0, 4)]}
        """
        if not is_whole(rows, 1):
            raise InvalidArgumentError(f"layout: blocks of {rows!r} rows; a positive integer is expected")
        for given, what in ((self.branches, "share rows"), (self.bidirectional, "have rows that see later ones")):
            if given:
                raise InvalidArgumentError(
                    f"layout: block_diffusion makes branches and bidirectional rows itself; documents {what} already"
                )
        made = noised(self.document_lengths, [self.segments(rank) for rank in range(self.num_ranks)], index(rows))
        layout = Layout(made.segments, branches=made.branches).with_bidirectional(made.bidirectional)
        layout._longest_of_whole = self._longest_of_whole
        return layout

    def chunked(self, rows: int) -> Layout:
        """The same rows, where each chunk of a document is a document: for layers whose rows see their chunk alone.

        `position_ids` of the result count from the first row of each chunk; those of the model are this layout's.

        Args:
            rows: rows of a chunk. Each document is cut from its first row on.

        Raises:
            InvalidArgumentError: `rows` is no positive integer, or rows that see each other lie in two chunks.

        Examples:
            >>> layout = distca.Layout([[(0, 0, 5)], [(0, 5, 9), (1, 0, 2)]]).chunked(4)
            >>> layout.segments(0), layout.segments(1)
            ([(0, 0, 4), (1, 0, 1)], [(1, 1, 4), (2, 0, 1), (3, 0, 2)])
        """
        rows = Chunk(rows).rows
        segments = [self.segments(rank) for rank in range(self.num_ranks)]
        made = chunked(self._own_rows(), segments, self.branches, self.bidirectional, rows)
        return Layout(made.segments, branches=made.branches).with_bidirectional(made.bidirectional)

    def _own_rows(self) -> list[range]:
        """The rows of each document without those that a branch shares."""
        return [range(*rows) for rows in zip(self._core.first_rows, self._core.document_lengths, strict=True)]

    @property
    def branches(self) -> dict[int, list[tuple[int, int, int]]]:
        """For each document whose first rows are those of others, these rows: own rows ``(document, begin, end)``."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for document, of, begin, end in self._core.shared:
            found.setdefault(document, []).append((of, begin, end))
        return found

    @property
    def bidirectional(self) -> dict[int, list[tuple[int, int]]]:
        """For each document that has any, the ranges of its rows that see each other: see `with_bidirectional`."""
        found: dict[int, list[tuple[int, int]]] = {}
        for document, begin, end in self._core.bidirectional:
            found.setdefault(document, []).append((begin, end))
        return found

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self._core.num_ranks

    @property
    def document_lengths(self) -> list[int]:
        """Length of every document, in tokens; of a branch with the rows that it shares."""
        return self._core.document_lengths

    @property
    def longest_document(self) -> int:
        """Length of the longest document, in tokens. A half (`distca.halves`) keeps that of its whole layout."""
        return self._longest_of_whole or max(self.document_lengths, default=1)

    def num_rows(self, rank: int) -> int:
        """Rows of the rank's token tensor, padding included."""
        return self._core.num_rows(rank)

    def segments(self, rank: int) -> list[tuple[int, int, int]]:
        """The rank's segments ``(document, begin, end)``, in row order."""
        return self._core.segments(rank)

    def position_ids(self, rank: int) -> torch.Tensor:
        """Position of each row of the rank in its document, int64 ``[T]``; 0 for padding."""
        parts = [
            torch.arange(begin, end, device="cpu")
            if document != PADDING
            else torch.zeros(end - begin, dtype=torch.int64, device="cpu")
            for document, begin, end in self.segments(rank)
        ]
        return torch.cat([torch.zeros(0, dtype=torch.int64, device="cpu"), *parts])

    def __repr__(self) -> str:
        rows = [self.num_rows(rank) for rank in range(self.num_ranks)]
        found = self._core.bidirectional
        besides = f", {len(found)} bidirectional ranges" if found else ""
        branches = f" ({len(self.branches)} branches)" if self.branches else ""
        return f"Layout({self.num_ranks} ranks, {len(self.document_lengths)} documents{branches}, rows {rows}{besides})"


def _core(segments: list[list[tuple[int, int, int]]], branches: list[tuple[int, int, int, int]]) -> _C.Layout:
    """The layout with these branches, as `checked_branches` gives them."""
    return _C.Layout(
        segments, [(d, of) for d, of, begin, _ in branches if begin < 0], [b for b in branches if b[2] >= 0]
    )
