"""Documents packed one after another into steps or slots of equal size."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

NO_TARGET = -100


@dataclass(frozen=True)
class Piece:
    """Tokens [begin, end) of a document, packed into one step."""

    document: int
    begin: int
    end: int


def pack_steps(lengths: list[int], tokens: int, seed: int) -> Iterator[list[Piece]]:
    """Endless steps of exactly `tokens` tokens each.

    The documents come in a new order in each epoch, and are cut where a step is full.
    """
    step: list[Piece] = []
    room = tokens
    epoch = 0
    while True:
        order = list(range(len(lengths)))
        random.Random(f"{seed}/{epoch}").shuffle(order)
        for document in order:
            begin = 0
            while begin < lengths[document]:
                end = min(lengths[document], begin + room)
                step.append(Piece(document, begin, end))
                room -= end - begin
                begin = end
                if room == 0:
                    yield step
                    step, room = [], tokens
        epoch += 1
