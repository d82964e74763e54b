"""core_attention compared with PyTorch in float64, wherever the rows live and whoever computes them.

Arenas, returned tensors and the inputs' padding rows are filled with NaN before every step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

import distca
from distca.testing import _emulation
from support.batches import (
    LAYOUTS,
    LENGTHS,
    data_parallel,
    needle_batch,
    random_batch,
    random_tasks,
    rows_of_rank,
    scattered,
    spill,
    spill_with_empty_ranks,
)
from support.groups import compute, loopback_group, on_all_ranks, run_step, together
from support.oracle import NAMES, ErrorPool, oracle, torch_attention
from support.ranks import launch

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
HEADS = {
    "gqa4": (8, 2, 64, None),
    "mqa": (8, 1, 32, None),
    "mha": (8, 8, 16, None),
    "dim8": (8, 4, 8, None),
    "dim256": (8, 2, 256, None),
    "dim512": (8, 4, 512, None),
    "wider_values": (8, 4, 24, 40),
    "narrower_values": (8, 2, 128, 64),
    "much_wider_values": (8, 8, 40, 200),
}
SMALL_HEADS = itertools.cycle(["gqa4", "mqa", "mha", "dim8", "wider_values"])


def _check_against_pytorch(
    heads: distca.Heads, plan_of_seed: dict[int, distca.Plan], *, fused: bool, reorder: bool = True
) -> None:
    pool = ErrorPool(heads.dtype)
    for seed, plan in plan_of_seed.items():
        batch = random_batch(LENGTHS, heads, seed)
        ours = compute(batch, plan, reorder_seed=seed if reorder else None, fused=fused)
        pool.add(ours, torch_attention(batch), oracle(batch))
    pool.check()


@DTYPES
@pytest.mark.parametrize(
    ("ranks", "layout", "heads"),
    [(ranks, layout, next(SMALL_HEADS)) for ranks in (1, 2, 3, 8) for layout in LAYOUTS],
)
def test_loopback_ranks_are_as_exact_as_pytorch(ranks: int, layout: str, heads: str, dtype: torch.dtype) -> None:
    shape = distca.Heads(*HEADS[heads], dtype=dtype)
    plans = {
        seed: distca.plan(LAYOUTS[layout](LENGTHS, ranks, seed), shape, tolerance=0.0, min_rows=min_rows)
        for seed, min_rows in ((11, 1), (12, 64))
    }
    _check_against_pytorch(shape, plans, fused=False)


@DTYPES
@pytest.mark.parametrize("heads", HEADS)
def test_every_head_shape_is_as_exact_as_pytorch_from_views_of_a_fused_projection(
    heads: str, dtype: torch.dtype
) -> None:
    shape = distca.Heads(*HEADS[heads], dtype=dtype)
    plans = {seed: distca.plan(scattered(LENGTHS, 3, seed), shape, tolerance=0.0, min_rows=1) for seed in (21, 22)}
    _check_against_pytorch(shape, plans, fused=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("mask", "window"),
    [("causal", 1), ("causal", 17), ("causal", 64), ("causal", 100), ("full", None), ("full", 70)],
)
def test_windows_and_full_masks_are_as_exact_as_pytorch_and_the_same_bits_in_every_layout(
    mask: str, window: int | None, dtype: torch.dtype
) -> None:
    shape = distca.Heads(8, 2, 32, dtype=dtype)
    pool = ErrorPool(dtype)
    for seed in (31, 32):
        batch = random_batch(LENGTHS, shape, seed)
        layouts = [distca.Layout.head_tail(LENGTHS, ranks=3), scattered(LENGTHS, 3, seed), spill(LENGTHS, 8)]
        plans = [distca.plan(layout, shape, mask=mask, window=window, tolerance=0.0, min_rows=1) for layout in layouts]
        tasks = random_tasks(layouts[0], shape.kv, seed)
        plans.append(distca.plan(layouts[0], shape, mask=mask, window=window, tasks=tasks))
        results = [compute(batch, plan, reorder_seed=seed) for plan in plans]
        for name, first, *others in zip(NAMES, *results, strict=True):
            if name in ("out", "lse", "dq"):
                assert all(torch.equal(first, other) for other in others), name
        theirs, exact = torch_attention(batch, mask, window), oracle(batch, mask=mask, window=window)
        for ours in results:
            pool.add(ours, theirs, exact)
    pool.check()


@pytest.mark.parametrize(("ranks", "long_from"), [(1, 0), (2, 0), (3, 0), (8, 0), (3, 0.5), (8, 0.5)])
def test_head_tail_layouts_and_float16_are_as_exact_as_pytorch(ranks: int, long_from: float) -> None:
    shape = distca.Heads(8, 2, 64, dtype=torch.float16)
    longer_than = int(long_from * sum(LENGTHS) / ranks)
    assert not longer_than or min(LENGTHS) <= longer_than < max(LENGTHS)
    layout = distca.Layout.head_tail(LENGTHS, ranks=ranks, longer_than=longer_than)
    plans = {seed: distca.plan(layout, shape, tolerance=0.0, min_rows=1) for seed in (33, 34)}
    _check_against_pytorch(shape, plans, fused=True)


@DTYPES
@pytest.mark.parametrize(("ranks", "heads"), [(3, "mha"), (5, "much_wider_values")])
def test_rows_exchanged_for_heads_give_the_bits_of_rows_at_home(ranks: int, heads: str, dtype: torch.dtype) -> None:
    """But for gradients of keys, to which several servers contribute, in another order and number."""
    shape = distca.Heads(*HEADS[heads], dtype=dtype)
    lengths = (300, 65, 600, 1, 170)
    pool = ErrorPool(dtype)
    for seed, mask, window in ((41, "causal", None), (42, "full", None), (43, "causal", 400), (44, "full", 350)):
        layout = distca.Layout.head_tail(lengths, ranks=ranks)
        plan = distca.plan(layout, shape, mask=mask, window=window, min_rows=1, overlap=seed == 42)
        assert 2 in plan.stats.head_parallel, "the rows of the longest document are exchanged"
        batch = random_batch(lengths, shape, seed)
        ours = compute(batch, plan, reorder_seed=seed, fused=True)
        at_home = compute(batch, distca.plan(layout, shape, mask=mask, window=window, balance=False))
        for name, exchanged, rows in zip(NAMES, ours, at_home, strict=True):
            if name in ("out", "lse", "dq"):
                assert torch.equal(exchanged, rows), name
        pool.add(ours, torch_attention(batch, mask, window), oracle(batch, mask=mask, window=window))
    pool.check()


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16])
def test_dedicated_servers_give_the_same_bits_as_their_rows_homes(default: torch.dtype) -> None:
    shape = distca.Heads(4, 2, 32)
    batch = random_batch(LENGTHS, shape, 35)
    layout = distca.Layout([*(scattered(LENGTHS, 2, 5).segments(rank) for rank in range(2)), [], []])
    plan = distca.plan(layout, shape, servers=[2, 3], tolerance=0.01)

    def work(rank: int, context: distca.Context) -> tuple[torch.Tensor, ...]:
        if rank < 2:
            return run_step(batch, plan, context)
        for phase in ("forward", "backward"):
            distca.serve(plan.for_rank(rank), phase, context=context)
        return ()

    torch.set_default_dtype(default)
    try:
        with loopback_group(plan, reorder_seed=3) as contexts:
            served = on_all_ranks(contexts, work)
    finally:
        torch.set_default_dtype(torch.float32)
    ours = together(batch.lengths, layout, served[:2])
    at_home = compute(batch, distca.plan(layout, shape, balance=False))
    for name, served_rows, home_rows in zip(NAMES, ours, at_home, strict=True):
        if name in ("out", "lse", "dq"):
            assert torch.equal(served_rows, home_rows), name


@DTYPES
@pytest.mark.parametrize(
    ("layout", "heads"),
    [("data_parallel", "gqa4"), ("spill", "mha"), ("spill_with_empty_ranks", "dim8"), ("scattered", "wider_values")],
)
def test_ranges_of_heads_on_different_servers_are_as_exact_as_pytorch(
    layout: str, heads: str, dtype: torch.dtype
) -> None:
    shape = distca.Heads(*HEADS[heads], dtype=dtype)
    plans = {}
    for seed in (27, 28):
        where = LAYOUTS[layout](LENGTHS, 3, seed)
        plans[seed] = distca.plan(where, shape, tasks=random_tasks(where, shape.kv, seed))
        assert any(task.kv_head_end - task.kv_head_begin < shape.kv for task in plans[seed].tasks)
    _check_against_pytorch(shape, plans, fused=True)


def test_rows_computed_at_home_are_as_exact_as_pytorch() -> None:
    shape = distca.Heads(8, 2, 32)
    plans = {seed: distca.plan(scattered(LENGTHS, 3, seed), shape, balance=False) for seed in (23, 24)}
    _check_against_pytorch(shape, plans, fused=False)


def test_a_document_over_eight_ranks_whose_gradients_come_home_in_rounds_is_as_exact_as_pytorch() -> None:
    shape = distca.Heads(4, 2, 16)
    lengths = (1500,)
    pool = ErrorPool(shape.dtype)
    for seed in (25, 26):
        plan = distca.plan(spill(lengths, 8), shape, tolerance=0.0, min_rows=1)
        batch = random_batch(lengths, shape, seed)
        pool.add(compute(batch, plan, reorder_seed=seed), torch_attention(batch), oracle(batch))
    pool.check()


def test_gradients_that_come_home_at_once_are_bitwise_those_that_come_in_rounds() -> None:
    shape = distca.Heads(4, 2, 16, dtype=torch.bfloat16)
    in_rounds, at_once = (
        distca.plan(spill((1500,), 8), shape, tolerance=0.0, min_rows=1, overlap=overlap) for overlap in (False, True)
    )
    assert at_once.stats.slot_bytes > in_rounds.stats.slot_bytes
    batch = random_batch((1500,), shape, seed=27)
    for ours, theirs in zip(compute(batch, at_once, reorder_seed=27), compute(batch, in_rounds), strict=True):
        assert torch.equal(ours, theirs)


# ---- processes ----

SHM_HEADS = {"fp32": (8, 2, 32, None, torch.float32), "bf16": (8, 1, 24, 40, torch.bfloat16)}
SHM_LAYOUTS = (spill, scattered, data_parallel, spill_with_empty_ranks)


def _shm_plans(heads: distca.Heads, ranks: int) -> list[distca.Plan]:
    return [
        distca.plan(
            layout(LENGTHS, ranks, seed),
            heads,
            tolerance=0.0,
            min_rows=1,
            capacity=2**40,
            retain_bytes=seed % 2 * 2**40,
            round_bytes=1,
        )
        for seed, layout in enumerate(SHM_LAYOUTS)
    ]


def _shm_rank(ranks: int) -> dict[str, list[tuple[torch.Tensor, ...]]]:
    results = {}
    for name, shape in SHM_HEADS.items():
        heads = distca.Heads(*shape)
        plans = _shm_plans(heads, ranks)
        heap_bytes = 2 * max(plan.stats.slot_bytes for plan in plans)
        with distca.init(
            transport="shm", max_tokens=1, heads=heads, heap_bytes=heap_bytes, timeout=60.0, name=f"exactness/{name}"
        ) as context:
            assert context.transport == "shm"
            _emulation.fill_with_nan(context._core)
            results[name] = [
                run_step(random_batch(LENGTHS, heads, seed), plan, context) for seed, plan in enumerate(plans)
            ]
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_shm_processes_are_as_exact_as_pytorch_and_bitwise_equal_to_loopback(ranks: int) -> None:
    of_ranks = launch(_shm_rank, ranks, ranks=ranks)
    for name, shape in SHM_HEADS.items():
        heads = distca.Heads(*shape)
        pool = ErrorPool(heads.dtype)
        for seed, plan in enumerate(_shm_plans(heads, ranks)):
            batch = random_batch(LENGTHS, heads, seed)
            ours = together(LENGTHS, plan.layout, [results[name][seed] for results in of_ranks])
            for what, a, b in zip(NAMES, ours, compute(batch, plan), strict=True):
                assert torch.equal(a, b), f"{name}, {plan.layout}: {what} differs from loopback"
            pool.add(ours, torch_attention(batch), oracle(batch))
        pool.check()


# ---- needles ----


@DTYPES
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_key_that_dominates_a_row_is_the_key_of_that_document_row_and_head(
    layout: str, ranks: int, dtype: torch.dtype
) -> None:
    lengths = (*LENGTHS, 300)
    heads = distca.Heads(4, 2, 64, 16, dtype)
    batch, expected = needle_batch(lengths, heads, seed=31)
    plan = distca.plan(LAYOUTS[layout](lengths, ranks, 31), heads, tolerance=0.0, min_rows=1)
    out, lse, dq, dk, dv = compute(batch, plan, reorder_seed=31)
    assert torch.equal(out, expected)
    # The dominating score is 16 * 64 / sqrt(64), and its probability is 1 to the last bit.
    assert torch.equal(lse, torch.full_like(lse, 128.0))
    rounding = 1e-5 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(dv.double(), oracle(batch)[4], rtol=rounding, atol=rounding)
    assert dq.abs().max() <= 100 * rounding and dk.abs().max() <= 100 * rounding


# ---- gradients of every form ----


@DTYPES
def test_an_expanded_gradient_gives_what_the_same_gradient_in_full_gives(dtype: torch.dtype) -> None:
    heads = distca.Heads(4, 2, 16, 24, dtype)
    batch = random_batch(LENGTHS, heads, 41)
    ones = dataclasses.replace(batch, dout=torch.ones_like(batch.dout))
    plan = distca.plan(spill(LENGTHS, 3), heads, tolerance=0.0, min_rows=1)

    def step(rank: int, context: distca.Context) -> tuple[torch.Tensor, ...]:
        q, k, v = (rows_of_rank(batch, plan.layout, rank, t).requires_grad_() for t in (batch.q, batch.k, batch.v))
        out, lse = distca.core_attention(q, k, v, plan.for_rank(rank), context=context)
        out.sum().backward()
        return out.detach(), lse, q.grad, k.grad, v.grad

    with loopback_group(plan) as contexts:
        expanded = together(LENGTHS, plan.layout, on_all_ranks(contexts, step))
    for name, a, b in zip(NAMES, expanded, compute(ones, plan), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[1:], ids=str)
def test_a_gradient_of_any_strides_gives_what_a_contiguous_one_gives(order: tuple[int, ...]) -> None:
    heads = distca.Heads(4, 2, 16)
    batch = random_batch((70, 33), heads, 42)
    plan = distca.plan(spill(batch.lengths, 2), heads, tolerance=0.0, min_rows=1)
    back = [order.index(axis) for axis in range(3)]

    def step(rank: int, context: distca.Context) -> tuple[torch.Tensor, ...]:
        q, k, v = (rows_of_rank(batch, plan.layout, rank, t).requires_grad_() for t in (batch.q, batch.k, batch.v))
        out, lse = distca.core_attention(q, k, v, plan.for_rank(rank), context=context)
        dout = rows_of_rank(batch, plan.layout, rank, batch.dout).permute(order).contiguous().permute(back)
        assert not dout.is_contiguous()
        out.backward(dout)
        return out.detach(), lse, q.grad, k.grad, v.grad

    with loopback_group(plan) as contexts:
        permuted = together(batch.lengths, plan.layout, on_all_ranks(contexts, step))
    for name, a, b in zip(NAMES, permuted, compute(batch, plan), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("scale", [0.0, 0.3, -0.2])
def test_the_scale_that_is_given_is_the_one_used(scale: float) -> None:
    batch = random_batch(LENGTHS, distca.Heads(4, 2, 16), 43)
    ours = compute(batch, distca.plan(spill(LENGTHS, 2), batch.heads, tolerance=0.0), scale=scale)
    for name, a, b in zip(NAMES, ours, oracle(batch, scale), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


# ---- bitwise ----

BITWISE_HEADS = [(6, 3, 40, 24, torch.float32), (4, 2, 32, None, torch.bfloat16)]


def _plans_of_one_batch(heads: distca.Heads) -> dict[str, distca.Plan]:
    eight = scattered(LENGTHS, 8, 5)
    return {
        "1 rank": distca.plan(spill(LENGTHS, 1), heads),
        "1 rank, padded": distca.plan(scattered(LENGTHS, 1, 3), heads),
        "2 ranks at home": distca.plan(spill(LENGTHS, 2), heads, balance=False),
        "2 ranks exact": distca.plan(spill(LENGTHS, 2), heads, tolerance=0.0, min_rows=1),
        "2 ranks by rows": distca.plan(
            spill(LENGTHS, 2), heads, tolerance=0.0, min_rows=1, cost=distca.CostModel(0, 1)
        ),
        "3 ranks, whole documents": distca.plan(data_parallel(LENGTHS, 3, 1), heads, tolerance=0.0, min_rows=1),
        "3 ranks, scattered": distca.plan(scattered(LENGTHS, 3, 2), heads, tolerance=0.3, min_rows=16),
        "8 ranks loose": distca.plan(eight, heads, tolerance=0.5),
        "8 ranks exact": distca.plan(eight, heads, tolerance=0.0, min_rows=1),
        "8 ranks, heads apart": distca.plan(eight, heads, tasks=random_tasks(eight, heads.kv, 51)),
        "8 ranks, some empty": distca.plan(spill_with_empty_ranks(LENGTHS, 8), heads, tolerance=0.0, min_rows=7),
    }


@pytest.mark.parametrize("heads", BITWISE_HEADS, ids=["fp32", "bf16"])
def test_out_lse_and_dq_are_bitwise_the_same_whatever_the_plan_the_ranks_and_the_threads(
    heads: tuple[int, int, int, int | None, torch.dtype],
) -> None:
    shape = distca.Heads(*heads)
    batch = random_batch(LENGTHS, shape, 51)
    plans = _plans_of_one_batch(shape)
    assert len({plan.digest for plan in plans.values()}) == len(plans)
    first = compute(batch, plans["1 rank"])
    for (name, plan), threads in zip(plans.items(), itertools.cycle((2, 1, 3)), strict=False):
        # The context checks the cost model; here only the tasks matter.
        cost = distca.CostModel(0, 1) if name == "2 ranks by rows" else distca.CostModel()
        with loopback_group(plan, reorder_seed=51, cost=cost) as contexts:
            results = on_all_ranks(contexts, lambda rank, context, plan=plan: run_step(batch, plan, context), threads)
        again = together(LENGTHS, plan.layout, results)
        for what, a, b in zip(NAMES[:3], again, first, strict=False):
            assert torch.equal(a, b), f"{what} of plan {name!r} with {threads} threads differs in {(a != b).sum()} bits"


@pytest.mark.parametrize("heads", BITWISE_HEADS, ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_plan_gives_bitwise_the_same_gradients_in_every_run(
    ranks: int, heads: tuple[int, int, int, int | None, torch.dtype]
) -> None:
    shape = distca.Heads(*heads)
    batch = random_batch(LENGTHS, shape, 52)
    layout = scattered(LENGTHS, ranks, 52)
    plan = distca.plan(layout, shape, tasks=random_tasks(layout, shape.kv, 52))
    first = compute(batch, plan)
    for threads, reorder_seed in ((1, None), (1, 1), (2, 2), (3, 3)):
        again = compute(batch, plan, threads=threads, reorder_seed=reorder_seed)
        for name, a, b in zip(NAMES, again, first, strict=True):
            assert torch.equal(a, b), f"{name}, {threads} threads, reorder_seed {reorder_seed}"


def test_padding_rows_come_back_as_nothing() -> None:
    """Padding rows come out with out and gradients 0 and lse -inf, although every padding row that goes in is NaN."""
    heads = distca.Heads(2, 1, 8)
    layout = distca.Layout([[(-1, 0, 5), (0, 0, 3), (-1, 0, 66)], [(-1, 0, 2)], [(0, 3, 9), (-1, 0, 1)]])
    batch = random_batch((9,), heads, 61)
    plan = distca.plan(layout, heads, tolerance=0.0, min_rows=1)
    with loopback_group(plan) as contexts:
        results = on_all_ranks(contexts, lambda rank, context: run_step(batch, plan, context))
    for rank, padding in enumerate([[*range(5), *range(8, 74)], [0, 1], [6]]):
        out, lse, dq, dk, dv = (t[padding] for t in results[rank])
        assert (lse == -math.inf).all()
        for t in (out, dq, dk, dv):
            assert (t == 0).all()
    for a, b in zip(together((9,), layout, results), oracle(batch), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


@DTYPES
def test_what_an_earlier_step_has_left_in_scratch_memory_touches_no_row(dtype: torch.dtype) -> None:
    """Not even NaN, nor in rows whose first key lies after the first ones of their document."""
    shape = distca.Heads(4, 2, 32, dtype=dtype)
    plan = distca.plan(distca.Layout.from_documents([[900]]), shape, window=100)
    batch = random_batch((900,), shape, 51)
    poisoned = dataclasses.replace(batch, v=torch.full_like(batch.v, math.nan))
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # one thread alone begins with the first rows, which see the first keys
    try:
        with loopback_group(plan) as [context]:
            run_step(poisoned, plan, context)
            after = run_step(batch, plan, context)
        with loopback_group(plan) as [context]:
            alone = run_step(batch, plan, context)
    finally:
        torch.set_num_threads(before)
    for name, a, b in zip(NAMES, after, alone, strict=True):
        assert torch.equal(a, b), name
