"""The arguments of layouts, checked; messages name what is wrong in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, TypeAlias

from distca.arguments import is_whole, listed
from distca.errors import InvalidArgumentError

#: The document number of padding rows in a layout.
PADDING = -1

#: The most rows of a document or of a rank.
MOST_ROWS = 2**31

#: What a branch begins with: all rows of another document, or these own rows (document, begin, end) of others.
Begins: TypeAlias = int | Sequence[tuple[int, int, int]]


def checked_branches(name: str, branches: Any) -> list[tuple[int, int, int, int]]:
    """The branches as rows (document, of, begin, end), with begin and end -1 where all rows of another one are meant.
    Raises InvalidArgumentError, whose text begins with the name, for what are no branches.
    """
    expected = (
        "a mapping of documents to what they begin with is expected: to another document, as in {1: 0, 2: 0}, or to "
        "rows of others, as in {2: [(0, 0, 100), (1, 0, 50)]}"
    )
    if not isinstance(branches, Mapping):
        raise InvalidArgumentError(f"{name}: branches = {branches!r}; {expected}")
    found = []
    for document, begins in branches.items():
        if is_whole(document, 0) and is_whole(begins, 0):
            found.append((index(document), index(begins), -1, -1))
            continue
        ranges = list(begins) if isinstance(begins, Iterable) and not isinstance(begins, str) else []
        rows = [list(one) if isinstance(one, Iterable) else [] for one in ranges]
        if not is_whole(document, 0) or not rows:
            raise InvalidArgumentError(f"{name}: branches = {{..., {document!r}: {begins!r}}}; {expected}")
        for one, numbers in zip(ranges, rows, strict=True):
            if len(numbers) != 3 or not all(is_whole(n, 0) for n in numbers):
                raise InvalidArgumentError(
                    f"{name}: branches: document {document} begins with {one!r}; integers (document, begin, end) from "
                    "0 on are expected"
                )
            of, begin, end = map(index, numbers)
            found.append((index(document), of, begin, end))
    return found


def lists_of_ranks(value: Any, what: str) -> list[list[Any]]:
    ranks = listed("layout", "its argument", value, f"a list of {what} for each rank")
    return [
        listed("layout", f"rank {r}", of, f"a list of {what} for each rank, [[...], [...]],")
        for r, of in enumerate(ranks)
    ]


def bad_length(lengths: Iterable[tuple[str, Any]]) -> InvalidArgumentError:
    """The error for lengths that are not all integers in range, each given with the place where it stands."""
    for document, (where, n) in enumerate(lengths):
        if not is_whole(n, 1, MOST_ROWS):
            return InvalidArgumentError(
                f"layout: document {document}{where} has length {n!r}; integers from 1 to {MOST_ROWS} are allowed"
            )
    return InvalidArgumentError("layout: numbers of ranks and tokens are integers below 2**63")


def refuse_cumulative(lengths: Sequence[Any], begin: str = "layout: document 0 has length 0") -> None:
    """Raises InvalidArgumentError, whose text begins so, for lengths that begin with 0 and never decrease."""
    if len(lengths) < 2 or not is_whole(lengths[0], 0, 0):
        return
    if all(is_whole(n, 0) for n in lengths) and lengths[0] < lengths[-1] and list(lengths) == sorted(lengths):
        raise InvalidArgumentError(
            f"{begin}; these look like cumulative lengths (cu_seqlens): give the length of each document, "
            "cu_seqlens.diff().tolist()"
        )


def bad_segment(ranks: Iterable[Iterable[Any]]) -> InvalidArgumentError:
    for rank, segments in enumerate(ranks):
        for number, segment in enumerate(segments):
            if len(segment) != 3 or not all(is_whole(n, PADDING, MOST_ROWS) for n in segment):
                return InvalidArgumentError(
                    f"layout: rank {rank}, segment {number} is {segment!r}; integers (document, begin, end) up to "
                    f"{MOST_ROWS} are allowed"
                )
    return InvalidArgumentError("layout: a list of segments (document, begin, end) for each rank is expected")
