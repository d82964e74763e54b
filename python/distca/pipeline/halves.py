"""The halves of an iteration's micro-batches, for ping-pong inside of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distca.arguments import listed
from distca.errors import InvalidArgumentError
from distca.planner.halves import Half
from distca.planner.layout import Layout

#: The halves in words, by their numbers.
HALVES = ("first half", "second half")
_EXPECTED = "a pair of halves for each micro-batch, [distca.halves(layout) for layout in layouts],"


def checked_halves(halves: Any, layouts: Sequence[Layout]) -> list[tuple[Half, Half]]:
    """The halves of each micro-batch. Raises InvalidArgumentError unless they are those of these layouts."""
    pairs = [
        listed("PipelinePlans", "a micro-batch's halves", pair, "two halves")
        for pair in listed("PipelinePlans", "halves", halves, _EXPECTED)
    ]
    if len(pairs) != len(layouts):
        raise InvalidArgumentError(f"PipelinePlans: halves of {len(pairs)} micro-batches, there are {len(layouts)}")
    checked = []
    for number, (pair, layout) in enumerate(zip(pairs, layouts, strict=True)):
        if len(pair) != 2 or not all(isinstance(half, Half) for half in pair):
            raise InvalidArgumentError(
                f"PipelinePlans: halves of micro-batch {number} are {pair!r}; {_EXPECTED} is expected"
            )
        first, second = pair
        of_both = sorted(first.documents + second.documents)
        if not all(half.is_of(layout) for half in pair) or of_both != list(range(len(layout.document_lengths))):
            raise InvalidArgumentError(
                f"PipelinePlans: the halves of micro-batch {number} are not those of its layout; {_EXPECTED} is "
                "expected"
            )
        checked.append((first, second))
    return checked
