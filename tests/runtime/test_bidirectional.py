"""Rows of a document that see each other: prefixes and images, in plans."""

from __future__ import annotations

import pytest
import torch

import distca
from support.batches import LENGTHS, random_batch, random_ranges, random_tasks, scattered, spill
from support.groups import compute
from support.oracle import NAMES, ErrorPool, oracle, torch_attention

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


@DTYPES
@pytest.mark.parametrize("window", [None, 1, 17, 100])
def test_rows_that_see_each_other_are_as_exact_as_pytorch_and_the_same_bits_in_every_layout(
    window: int | None, dtype: torch.dtype
) -> None:
    shape = distca.Heads(8, 2, 32, dtype=dtype)
    pool = ErrorPool(dtype)
    for seed in (51, 52):
        batch, ranges = random_batch(LENGTHS, shape, seed), random_ranges(LENGTHS, seed)
        layouts = [
            layout.with_bidirectional(ranges)
            for layout in (distca.Layout.head_tail(LENGTHS, ranks=3), scattered(LENGTHS, 3, seed), spill(LENGTHS, 8))
        ]
        plans = [distca.plan(layout, shape, window=window, tolerance=0.0, min_rows=1) for layout in layouts]
        plans.append(distca.plan(layouts[0], shape, window=window, tasks=random_tasks(layouts[0], shape.kv, seed)))
        results = [compute(batch, plan, reorder_seed=seed) for plan in plans]
        for name, first, *others in zip(NAMES, *results, strict=True):
            if name in ("out", "lse", "dq"):
                assert all(torch.equal(first, other) for other in others), name
        for ours in results:
            pool.add(
                ours,
                torch_attention(batch, window=window, bidirectional=ranges),
                oracle(batch, window=window, bidirectional=ranges),
            )
    pool.check()
