"""Rows of a document that see each other: prefixes and images, in plans."""

from __future__ import annotations

import math

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
        theirs = torch_attention(batch, window=window, bidirectional=ranges)
        exact = oracle(batch, window=window, bidirectional=ranges)
        for ours in results:
            pool.add(ours, theirs, exact)
    pool.check()


@DTYPES
def test_a_range_of_a_whole_document_has_the_bits_of_the_full_mask_and_ranges_of_single_rows_those_of_the_causal_one(
    dtype: torch.dtype,
) -> None:
    shape = distca.Heads(4, 2, 24, 40, dtype=dtype)
    batch, layout = random_batch(LENGTHS, shape, 53), scattered(LENGTHS, 3, 53)
    whole = layout.with_bidirectional({d: [(0, length)] for d, length in enumerate(LENGTHS)})
    rows = layout.with_bidirectional({d: [(i, i + 1) for i in range(length)] for d, length in enumerate(LENGTHS)})
    tasks = random_tasks(layout, shape.kv, 53)
    for ranges, mask in ((whole, "full"), (rows, "causal")):
        ours = compute(batch, distca.plan(ranges, shape, tasks=tasks))
        other = compute(batch, distca.plan(layout, shape, mask=mask, tasks=tasks))
        for name, a, b in zip(NAMES, ours, other, strict=True):
            assert torch.equal(a, b), (mask, name)


@pytest.mark.parametrize("window", [None, 40])
@DTYPES
def test_under_the_full_mask_ranges_say_nothing(dtype: torch.dtype, window: int | None) -> None:
    shape = distca.Heads(4, 2, 24, 40, dtype=dtype)
    batch, layout = random_batch(LENGTHS, shape, 57), scattered(LENGTHS, 3, 57)
    ranges = layout.with_bidirectional(random_ranges(LENGTHS, 57))
    assert ranges.bidirectional
    found = [compute(batch, distca.plan(of, shape, mask="full", window=window)) for of in (layout, ranges)]
    for name, a, b in zip(NAMES, *found, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@DTYPES
def test_what_a_row_may_not_see_does_not_touch_it(dtype: torch.dtype, poison: float) -> None:
    """Keys and values of later ranges are poisoned for rows before them, and rows of dout for keys that they miss."""
    shape, length = distca.Heads(4, 2, 32, dtype=dtype), 200
    for begin, end in ((31, 33), (63, 129), (64, 128), (5, 200), (127, 128)):
        batch = random_batch((length,), shape, begin)
        layout = distca.Layout([[(0, 0, 70), (0, 130, 200)], [(0, 70, 130)]]).with_bidirectional({0: [(begin, end)]})
        plan = distca.plan(layout, shape, tolerance=0.0, min_rows=1)
        clean = compute(batch, plan)
        batch.k[begin:], batch.v[begin:], batch.dout[begin:] = poison, poison, poison
        poisoned = compute(batch, plan)
        for name in ("out", "lse", "dq"):
            ours, theirs = (results[NAMES.index(name)][:begin] for results in (poisoned, clean))
            assert torch.equal(ours, theirs), (name, begin, end)
        batch = random_batch((length,), shape, begin)
        batch.dout[:begin] = poison  # rows before the range see none of its keys
        batch.q[:begin] = poison
        poisoned = compute(batch, plan)
        for name in ("dk", "dv"):
            ours, theirs = (results[NAMES.index(name)][begin:] for results in (poisoned, clean))
            assert torch.equal(ours, theirs), (name, begin, end)
