"""`distca bench shards`: how the kernel's rate depends on the length of the tasks that a document is cut into."""

from __future__ import annotations

from functools import partial

import torch

import distca
from distca.apps.bench.harness import Result, Row
from distca.apps.common.timing import alternate, median_ratio

ROWS, HEADS, DIM = 4096, 8, 64
LENGTHS = (1, 4, 16, 64, 128, 256, 512, 1024, 4096)


def run(rounds: int | None = None, short: bool = False) -> Result:
    """Forward of one causal document, whole and cut into tasks of equal length, in turns."""
    rounds = rounds or (3 if short else 9)
    q, k, v = torch.randn(3, ROWS, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    works = [
        partial(
            distca.attention, q, k, v, torch.tensor([(i, i + length, 0, i + length) for i in range(0, ROWS, length)])
        )
        for length in LENGTHS
    ]
    times = alternate(works, rounds)
    rows = [
        Row(f"tasks of {length} rows: rate / rate of the whole document", median_ratio(times[-1], of_length), "x")
        for length, of_length in zip(LENGTHS[:-1], times, strict=False)
    ]
    return Result("shards", rows, {"rows": ROWS, "heads": HEADS, "dim": DIM, "dtype": "float32", "rounds": rounds})
