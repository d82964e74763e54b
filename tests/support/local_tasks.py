"""Tasks of local attention."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch


def whole(lengths: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """A task for each document."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [(end - length, end, end - length, end) for end, length in zip(ends, lengths, strict=True)]


def whole_documents(lengths: Sequence[int]) -> torch.Tensor:
    """A task for each document, as `distca.attention` takes them."""
    return torch.tensor(whole(lengths), dtype=torch.int64)


def cut(lengths: Sequence[int], seed: int) -> list[tuple[int, int, int, int]]:
    """Tasks that cut every document at random rows, in any order."""
    rng = random.Random(seed)
    tasks = []
    for begin, end, *_ in whole(lengths):
        cuts = sorted({begin, end, *(rng.randrange(begin, end) for _ in range(3))})
        tasks += [(a, b, begin, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    rng.shuffle(tasks)
    return tasks
