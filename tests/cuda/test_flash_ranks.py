"""Ranks whose rows lie in memory of their backend and whose attention is ATen's: this runs on any GPU.

On the CPU a stand-in that follows the contract of ATen's CUDA kernels replaces its operator (flash_on_cpu.py). On a GPU
the ranks share it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distca
from support import flash_on_cpu
from support.batches import LAYOUTS, random_batch, random_ranges, random_tasks, rows_of_rank, scattered, spill
from support.branches import attention_of_tree, own_rows, random_tree
from support.gpus import no_gpu
from support.groups import compute, loopback_group, on_all_ranks, on_the_host, run_step, together
from support.oracle import ErrorPool, oracle, torch_attention
from support.score_features import eager_attention, random_sinks

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(bool(no_gpu()), reason=no_gpu()))
LENGTHS = (70, 1, 129, 64, 40)
BF16 = distca.Heads(4, 2, 32, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def _flash_on_cpu() -> None:
    flash_on_cpu.register()


@pytest.fixture(params=["cpu", CUDA])
def flash(request: pytest.FixtureRequest) -> dict[str, str]:
    """Options of a group that computes by ATen's flash attention."""
    return {"device": request.param, "attention": "flash"}


def mixed_plan(layout: distca.Layout, heads: distca.Heads, seed: int, **options: Any) -> distca.Plan:
    return distca.plan(layout, heads, tasks=random_tasks(layout, heads.kv, seed), **options)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "narrow"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_random_tasks_on_random_ranks_are_as_exact_as_pytorch(
    flash: dict[str, str], layout: Callable[..., distca.Layout], dtype: torch.dtype, narrow: bool
) -> None:
    heads = distca.Heads(4, 2, 16, dtype=dtype)
    pool = ErrorPool(dtype)
    for seed in range(-(-10_000 // (sum(LENGTHS) * heads.q))):
        batch = random_batch(LENGTHS, heads, seed)
        reduce_dtype = dtype if narrow else torch.float32
        plan = mixed_plan(layout(LENGTHS, 3, seed), heads, seed, reduce_dtype=reduce_dtype)
        ours = compute(batch, plan, fused=seed % 2 == 1, **flash)
        pool.add(ours, torch_attention(batch), oracle(batch))
    pool.check(1.5)  # parts of dk and dv are rounded before they are added


@pytest.mark.parametrize(
    ("mask", "window"), [("causal", 20), ("causal", 100), ("full", None), ("full", 20), ("full", 70)]
)
def test_masks_are_as_exact_as_pytorch(flash: dict[str, str], mask: str, window: int | None) -> None:
    pool = ErrorPool(BF16.dtype)
    for seed in range(-(-10_000 // (sum(LENGTHS) * BF16.q))):
        batch, layout = random_batch(LENGTHS, BF16, seed), scattered(LENGTHS, 3, seed)
        plan = distca.plan(layout, BF16, mask=mask, window=window, tasks=random_tasks(layout, BF16.kv, seed))
        pool.add(compute(batch, plan, **flash), torch_attention(batch, mask, window), oracle(batch, None, mask, window))
    pool.check(1.5)


@pytest.mark.parametrize("window", [None, 1, 20, 100])
def test_rows_that_see_each_other_are_as_exact_as_pytorch(flash: dict[str, str], window: int | None) -> None:
    pool = ErrorPool(BF16.dtype)
    for seed in range(-(-10_000 // (sum(LENGTHS) * BF16.q))):
        batch, ranges = random_batch(LENGTHS, BF16, seed), random_ranges(LENGTHS, seed)
        layout = scattered(LENGTHS, 3, seed).with_bidirectional(ranges)
        plan = distca.plan(layout, BF16, window=window, tasks=random_tasks(layout, BF16.kv, seed))
        pool.add(
            compute(batch, plan, **flash),
            torch_attention(batch, window=window, bidirectional=ranges),
            oracle(batch, window=window, bidirectional=ranges),
        )
    pool.check(1.5)


@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "narrow"])
def test_branches_are_as_exact_as_pytorch_also_with_scores_of_their_own(flash: dict[str, str], narrow: bool) -> None:
    pool, options = ErrorPool(BF16.dtype), {"reduce_dtype": BF16.dtype if narrow else torch.float32}
    for seed in range(6):
        tree = random_tree(seed)
        batch, layout = random_batch(tree.lengths, BF16, seed), tree.layout(3, seed)
        # Documents with a window of no effect are computed by calls of their own, and add to the same gradients.
        scores = [distca.Scores(window=None if d % 2 else 2**20) for d in range(len(tree.lengths))]
        plan = distca.plan(layout, BF16, scores=scores, tasks=random_tasks(layout, BF16.kv, seed), **options)
        mine = own_rows(batch, tree)
        ours = [one[mine] for one in compute(batch, plan, **flash)]
        pool.add(
            ours,
            attention_of_tree(batch, tree, BF16.dtype, fused=True),
            attention_of_tree(batch, tree, torch.float64),
        )
    pool.check(1.5)


def test_gradients_as_small_as_their_dtype_can_hold_are_as_exact(flash: dict[str, str]) -> None:
    # Backward takes in place of out a tensor made from squares of dout, which are zero in fp32.
    pool = ErrorPool(BF16.dtype)
    for seed in range(9):
        batch = random_batch(LENGTHS, BF16, seed)
        small = type(batch)(**{**vars(batch), "dout": batch.dout * 2.0**-90})
        ours = compute(small, mixed_plan(scattered(LENGTHS, 3, seed), BF16, seed), **flash)
        scaled = [*ours[:2], *(t.double() * 2.0**90 for t in ours[2:])]
        pool.add([*ours[:2], *(t.to(BF16.dtype) for t in scaled[2:])], torch_attention(batch), oracle(batch))
    pool.check(1.5)


def test_a_gradient_of_zeros_gives_zeros(flash: dict[str, str]) -> None:
    batch = random_batch(LENGTHS, BF16, 1)
    zero = type(batch)(**{**vars(batch), "dout": torch.zeros_like(batch.dout)})
    for t in compute(zero, mixed_plan(spill(LENGTHS, 3), BF16, 1), **flash)[2:]:
        assert (t == 0).all()


def test_rows_that_come_late_and_out_of_order_change_nothing(flash: dict[str, str]) -> None:
    batch, plan = random_batch(LENGTHS, BF16, 2), mixed_plan(scattered(LENGTHS, 4, 2), BF16, 2)
    if flash["device"] == "cuda":
        pytest.skip("on a GPU puts are not reordered: streams exclude it")
    in_order, late = compute(batch, plan, **flash), compute(batch, plan, reorder_seed=7, **flash)
    for a, b in zip(in_order, late, strict=True):
        assert torch.equal(a, b)


def test_several_steps_use_both_slots_again(flash: dict[str, str]) -> None:
    batch = random_batch(LENGTHS, BF16, 3)
    plans = [mixed_plan(scattered(LENGTHS, 3, seed), BF16, seed) for seed in range(3)]
    with loopback_group(plans, **flash) as contexts:
        for plan in plans:
            results = on_all_ranks(contexts, lambda _, context, plan=plan: run_step(batch, plan, context))
            ours = together(batch.lengths, plan.layout, results)
            for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), ours, oracle(batch), strict=True):
                torch.testing.assert_close(a.double(), b, rtol=0.03, atol=0.03, msg=name)


def test_sinks_take_their_share_on_every_server(flash: dict[str, str]) -> None:
    batch, sinks = random_batch(LENGTHS, BF16, 4), random_sinks(BF16.q, 4)
    plan = mixed_plan(scattered(LENGTHS, 3, 4), BF16, 4)
    exact = eager_attention(batch, torch.float64, 0.0, sinks)

    def work(rank: int, context: distca.Context) -> tuple[torch.Tensor, ...]:
        tensors = (rows_of_rank(batch, plan.layout, rank, t).to(context.device) for t in (batch.q, batch.k, batch.v))
        q, k, v = (t.requires_grad_() for t in tensors)
        leaf = sinks.to(context.device, copy=True).requires_grad_()
        dout = rows_of_rank(batch, plan.layout, rank, batch.dout).to(context.device).nan_to_num(0.0)
        with torch.autograd.set_multithreading_enabled(False):
            out, lse = distca.core_attention(q, k, v, plan.for_rank(rank), context=context, sinks=leaf)
            out.backward(dout)
        return on_the_host((out, lse, q.grad, k.grad, v.grad, leaf.grad), context)

    with loopback_group(plan, **flash) as contexts:
        results = on_all_ranks(contexts, work)
    ours = together(batch.lengths, plan.layout, results)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), ours, exact, strict=False):
        error = (a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()
        assert error < (1e-6 if name == "lse" else 2.0**-7), (name, error)
    torch.testing.assert_close(sum(r[5] for r in results).double(), exact[5], rtol=0.02, atol=0.05)


def test_a_rank_without_rows_serves(flash: dict[str, str]) -> None:
    batch = random_batch(LENGTHS, BF16, 5)
    layout = distca.Layout([[(d, 0, n) for d, n in enumerate(LENGTHS)], []])
    tasks = [(d, 0, n, 0, 2, 1) for d, n in enumerate(LENGTHS)]
    plan = distca.plan(layout, BF16, tasks=tasks)

    def work(rank: int, context: distca.Context) -> tuple[torch.Tensor, ...] | None:
        if rank == 0:
            return run_step(batch, plan, context)
        for phase in ("forward", "backward"):
            distca.serve(plan.for_rank(1), phase, context=context)
        return None

    with loopback_group(plan, **flash) as contexts:
        out = on_all_ranks(contexts, work)[0][0]
    torch.testing.assert_close(out.double(), oracle(batch)[0], rtol=0.02, atol=0.02)


def test_what_flash_lacks_is_refused_before_anything_moves(flash: dict[str, str]) -> None:
    heads = distca.Heads(2, 1, 16, 24, torch.bfloat16)
    plan = distca.plan(distca.Layout.from_documents([[5]]), heads)
    with loopback_group(plan, **flash) as [context]:
        q, k, v = (
            torch.zeros(5, n, dim, dtype=heads.dtype, device=context.device) for n, dim in ((2, 16), (1, 16), (1, 24))
        )
        for _ in range(2):  # the context still works afterwards
            with pytest.raises(distca.InvalidArgumentError, match="head dim 16, v has 24; equal ones are supported"):
                distca.core_attention(q, k, v, plan, context=context)
        assert context.step == 0


def test_a_context_says_where_it_is_and_whether_its_bits_depend_on_the_plan(flash: dict[str, str]) -> None:
    plan = distca.plan(distca.Layout.from_documents([[5]]), BF16)
    with loopback_group(plan, **flash) as [context]:
        assert context.device == {"cpu": "cpu", "cuda": "cuda:0"}[flash["device"]]
        assert (context.attention, context.plan_independent) == ("ATen's flash attention", False)
    with loopback_group(plan) as [context]:
        assert context.device == "cpu" and context.attention.startswith("CPU kernel, ") and context.plan_independent


@pytest.mark.parametrize(
    ("device", "error", "message"),
    [
        ("mps", distca.InvalidArgumentError, "device = 'mps'; cpu and cuda are supported"),
        ("gpu", distca.InvalidArgumentError, "device = 'gpu'; "),
        ("cuda:77", distca.DeviceError, "device = 'cuda:77'"),
    ],
)
def test_a_device_that_is_not_there_is_named(device: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        distca.init(max_tokens=8, heads=BF16, device=device)
    with pytest.raises(error, match=message):
        distca.loopback(2, max_tokens=8, heads=BF16, device=device)


def test_another_kind_of_attention_is_refused() -> None:
    with pytest.raises(distca.InvalidArgumentError, match='attention = "slow"; "auto", "own" and "flash" are allowed'):
        distca.init(max_tokens=8, heads=BF16, attention="slow")


@pytest.mark.skipif(bool(no_gpu()), reason=no_gpu())
def test_tensors_on_another_device_than_the_context_are_an_error_that_says_what_to_change() -> None:
    plan = distca.plan(distca.Layout.from_documents([[5]]), BF16)
    q, k, v = (torch.zeros(5, n, 32, dtype=BF16.dtype, device="cuda") for n in (4, 2, 2))
    with loopback_group(plan) as [context], pytest.raises(distca.InvalidArgumentError, match='device="cuda:0"'):
        distca.core_attention(q, k, v, plan, context=context)


@pytest.mark.skipif(bool(no_gpu()), reason=no_gpu())
def test_a_group_of_one_rank_made_by_init_computes_on_the_gpu() -> None:
    batch, plan = random_batch(LENGTHS, BF16, 6), distca.plan(distca.Layout.from_documents([LENGTHS]), BF16)
    with distca.init(max_tokens=sum(LENGTHS), heads=BF16, device="cuda", name="gpu") as context:
        out, lse = run_step(batch, plan, context)[:2]
    torch.testing.assert_close(out.double(), oracle(batch)[0], rtol=0.02, atol=0.02)
    assert not math.isnan(lse.sum().item())


def test_two_steps_in_parts_that_overlap_give_what_whole_ones_do(flash: dict[str, str]) -> None:
    batches = [random_batch(LENGTHS, BF16, seed) for seed in (7, 8)]
    plans = [mixed_plan(scattered(LENGTHS, 3, seed), BF16, seed) for seed in (7, 8)]

    def work(rank: int, context: distca.Context) -> list[tuple[torch.Tensor, ...]]:
        leaves, steps = [], []
        for batch, plan in zip(batches, plans, strict=True):
            tensors = (batch.q, batch.k, batch.v)
            q, k, v = (rows_of_rank(batch, plan.layout, rank, t).to(context.device) for t in tensors)
            leaves.append([t.requires_grad_() for t in (q, k, v)])
        douts = [
            rows_of_rank(batch, plan.layout, rank, batch.dout).to(context.device)
            for batch, plan in zip(batches, plans, strict=True)
        ]
        for of_batch, plan in zip(leaves, plans, strict=True):
            steps.append(distca.dispatch(*of_batch, plan.for_rank(rank), context=context))
        for step in steps:
            distca.attend(step)
        outs = [distca.collect(step) for step in steps]
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward([out for out, _ in outs], douts)
        return [
            on_the_host((*out, *(leaf.grad for leaf in of_batch)), context)
            for out, of_batch in zip(outs, leaves, strict=True)
        ]

    with loopback_group(plans, **flash) as contexts:
        results = on_all_ranks(contexts, work)
    for i, (batch, plan) in enumerate(zip(batches, plans, strict=True)):
        ours = together(batch.lengths, plan.layout, [of_rank[i] for of_rank in results])
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), ours, compute(batch, plan, **flash), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0 if flash["device"] == "cpu" else 1e-2, msg=name)
