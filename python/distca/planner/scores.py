"""What makes the scores of a document: `Scores`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from distca.arguments import is_float32, is_whole, listed
from distca.errors import InvalidArgumentError

_MOST_WINDOW = 2**31  # rows of the longest document

#: The masks by their numbers in the core.
MASKS = ("causal", "full")


class Scores(NamedTuple):
    """What makes the scores of the documents of one layer, for plans in which documents are of different layers.

    Attributes:
        mask: ``"causal"``, or ``"full"``: every row of a document sees all of it, or what the window leaves.
        window: a row sees keys that are less than ``window`` rows away: its own, the ``window - 1`` before it and,
            with the full mask, the ``window - 1`` after it.
        scale: factor on the logits. None leaves it to the calls of `core_attention`, where all ranks pass the same.
        softcap: if positive, logits become ``softcap * tanh(scale * q k^T / softcap)``. None leaves it to the calls.
    """

    mask: str = "causal"
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None

    def check(self, function: str) -> None:
        """Raises InvalidArgumentError if a value is out of range."""
        if not isinstance(self.mask, str) or self.mask not in MASKS:
            raise InvalidArgumentError(f"{function}: mask = {self.mask!r}; {', '.join(map(repr, MASKS))} are allowed")
        if self.window is not None and not is_whole(self.window, 1, _MOST_WINDOW):
            raise InvalidArgumentError(
                f"{function}: window = {self.window!r}; None or an integer from 1 to {_MOST_WINDOW} is allowed"
            )
        if self.scale is not None and not is_float32(self.scale, -math.inf):
            raise InvalidArgumentError(f"{function}: scale = {self.scale!r}; None or a finite float32 is allowed")
        if self.softcap is not None and not is_float32(self.softcap, 0.0):
            raise InvalidArgumentError(
                f"{function}: softcap = {self.softcap!r}; None, 0 (none) or a positive finite float32 is allowed"
            )


class ScoresOfDocuments(list[Scores]):
    """One for each document, and `otherwise`, which a plan without documents has."""

    def __init__(self, of_documents: Iterable[Scores], otherwise: Scores) -> None:
        super().__init__(of_documents)
        self.otherwise = otherwise


def numbered(function: str, of_documents: Any, num_documents: int) -> tuple[list[Scores], list[int]]:
    """The different scores in order of appearance, at least one, and for each document the number of its own."""
    given: Sequence[Scores] = listed(function, "scores", of_documents, "one distca.Scores for each document")
    if len(given) != num_documents:
        raise InvalidArgumentError(f"{function}: scores of {len(given)} documents; the layout has {num_documents}")
    numbers: dict[Scores, int] = {}
    different = []
    for one in given:
        if not isinstance(one, Scores):
            raise InvalidArgumentError(f"{function}: scores of a document are {one!r}; a distca.Scores is expected")
        try:
            is_new = one not in numbers
        except TypeError:  # what cannot be hashed is wrong
            is_new = True
        if is_new:
            one.check(function)
            numbers[one] = len(numbers)
            different.append(one._replace(scale=_float(one.scale), softcap=_float(one.softcap)))
    if not different:
        different = [of_documents.otherwise if isinstance(of_documents, ScoresOfDocuments) else Scores()]
    return different, [numbers[one] for one in given]


def _float(value: Any) -> float | None:
    return None if value is None else float(value)
