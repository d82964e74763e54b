"""Steps on an emulated GPU: the library's code for CUDA on streams that are threads (emulation/runtime).

The expected results are the bits of the same steps on the host. Attention is computed by the CPU's kernel, in the order
of the streams, so that this tests everything but attention (test_emulated_attention.py has that). Heads of values have
8 or 16 columns, because host and device then add row sums in the same order.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch

import distca
from distca.testing import _emulation
from emulation.emulated_gpu import OPTIONS, EmulatedGpu
from support.batches import (
    Batch,
    data_parallel,
    random_batch,
    random_tasks,
    rows_of_rank,
    scattered,
    spill,
    spill_with_empty_ranks,
)
from support.branches import branched
from support.groups import fault_of_check, forward_of_rank, loopback_group, on_all_ranks, run_step
from support.oracle import NAMES
from support.plan_reader import read_slice

LENGTHS = (100, 3, 64, 130)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Tensors = list[torch.Tensor]
T = TypeVar("T")


def _assert_same(mine: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    for name, a, b in zip(NAMES, mine, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=name)


def _on_host_and_gpu(batch: Batch, plan: distca.Plan, fused: bool = True) -> list[list[tuple[torch.Tensor, ...]]]:
    """What each rank returns, on the host and on the emulated GPU."""
    results = []
    for options in ({}, OPTIONS):
        with loopback_group(plan, **options) as contexts:
            results.append(on_all_ranks(contexts, lambda rank, context: run_step(batch, plan, context, fused=fused)))
    return results


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("make_layout", [data_parallel, spill_with_empty_ranks, scattered])
def test_steps_give_the_bits_of_steps_on_the_host(
    gpu: EmulatedGpu, make_layout, ranks: int, dtype: torch.dtype
) -> None:
    heads = distca.Heads(4, 2, 24, 16, dtype)
    layout = make_layout(LENGTHS, ranks, 5)
    plan = distca.plan(layout, heads, tasks=random_tasks(layout, heads.kv, 3))
    for right, mine in zip(*_on_host_and_gpu(random_batch(LENGTHS, heads, 2), plan), strict=True):
        _assert_same(mine, right)


@pytest.mark.parametrize("seeds", [range(12 * i, 12 * i + 12) for i in range(3)], ids=str)
def test_random_plans_give_the_bits_of_steps_on_the_host(gpu: EmulatedGpu, seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        kv, dim = draw.choice([1, 2, 3]), 8 * draw.randint(1, 5)
        heads = distca.Heads(
            kv * draw.choice([1, 2, 3]), kv, dim, draw.choice([8, 16]), draw.choice([*DTYPES.values()])
        )
        lengths = [draw.choice([1, 7, 64, 65, 130]) for _ in range(draw.randint(1, 5))]
        layout = draw.choice([data_parallel, scattered, spill])(lengths, draw.choice([2, 3]), seed)
        if draw.random() < 0.3:
            layout = branched(layout, seed)
            lengths = layout.document_lengths
        window, retain = draw.choice([None, None, 20]), draw.choice([0, 0, 1 << 20])
        tasks = random_tasks(layout, kv, seed)
        reduce_dtype = draw.choice([torch.float32, heads.dtype])
        plan = distca.plan(
            layout,
            heads,
            tasks=tasks,
            window=window,
            retain_bytes=retain,
            reduce_dtype=reduce_dtype,
            round_bytes=draw.choice([1, None]),
        )
        batch = random_batch(lengths, heads, seed)
        for right, mine in zip(*_on_host_and_gpu(batch, plan, fused=seed % 2 == 0), strict=True):
            _assert_same(mine, right)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_gradients_that_come_home_in_rounds_give_the_bits_of_the_host(gpu: EmulatedGpu, dtype: torch.dtype) -> None:
    heads = distca.Heads(2, 1, 8, dtype=dtype)
    plan = distca.plan(spill((1500, 100), 6), heads, tolerance=0.0, min_rows=1, reduce_dtype=dtype)
    assert max(read_slice(plan.for_rank(rank).tensor.tolist()).header.num_rounds for rank in range(6)) > 2
    for right, mine in zip(*_on_host_and_gpu(random_batch((1500, 100), heads, 2), plan, fused=False), strict=True):
        _assert_same(mine, right)


def test_row_sums_of_many_columns_differ_from_those_of_the_host_in_the_order_of_their_terms_alone(
    gpu: EmulatedGpu,
) -> None:
    heads = distca.Heads(4, 2, 16, 72)
    plan = distca.plan(scattered(LENGTHS, 2, 5), heads)
    for right, mine in zip(*_on_host_and_gpu(random_batch(LENGTHS, heads, 2), plan), strict=True):
        for name, a, b in zip(NAMES, mine, right, strict=True):
            bound = 3e-6 if name in ("dq", "dk") else 0
            torch.testing.assert_close(a, b, rtol=bound, atol=bound, equal_nan=True, msg=name)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_gradient_of_lse_gives_the_bits_of_steps_on_the_host(gpu: EmulatedGpu, dtype: torch.dtype) -> None:
    heads = distca.Heads(4, 2, 24, 16, dtype)
    plan = distca.plan(scattered(LENGTHS, 3, 5), heads, tasks=random_tasks(scattered(LENGTHS, 3, 5), 2, 3))
    batch = random_batch(LENGTHS, heads, 2)
    dlse = torch.randn(heads.q, sum(LENGTHS), generator=torch.Generator().manual_seed(1)).T

    def work(rank: int, context: distca.Context) -> Tensors:
        tensors = (batch.q, batch.k, batch.v, batch.dout, dlse)
        q, k, v, dout, of_lse = (rows_of_rank(batch, plan.layout, rank, t) for t in tensors)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out, lse = distca.core_attention(*leaves, plan.for_rank(rank), context=context)
        torch.autograd.backward([out, lse], [dout, of_lse])
        return [out.detach(), lse.detach(), *(t.grad for t in leaves)]

    results = []
    for options in ({}, OPTIONS):
        with loopback_group(plan, **options) as contexts:
            results.append(on_all_ranks(contexts, work))
            for context in contexts:
                context.check()
    for right, mine in zip(*results, strict=True):
        _assert_same(mine, right)


def test_two_steps_in_parts_at_once_give_the_bits_of_whole_steps(gpu: EmulatedGpu) -> None:
    heads = distca.Heads(4, 2, 16, 16)
    plan = distca.plan(spill(LENGTHS, 3), heads, tolerance=0.0, min_rows=1)
    batches = [random_batch(LENGTHS, heads, seed) for seed in (1, 2)]
    ops = torch.ops.distca

    def in_parts(rank: int, context: distca.Context) -> list[Tensors]:
        words, name = plan.for_rank(rank).tensor, context.name
        tensors = [[rows_of_rank(b, plan.layout, rank, t) for t in (b.q, b.k, b.v, b.dout)] for b in batches]
        steps = [ops.dispatch(*t[:3], words, context=name) for t in tensors]
        for step in steps:
            ops.attend(step, context=name)
        forward = [ops.collect(step, context=name) for step in steps]
        steps = [
            ops.dispatch_backward(t[3], *t[:3], *result, words, context=name)
            for t, result in zip(tensors, forward, strict=True)
        ]
        for step in steps:
            ops.attend(step, context=name)
        return [[*f, *ops.collect_backward(s, context=name)] for f, s in zip(forward, steps, strict=True)]

    with loopback_group(plan, **OPTIONS) as contexts:
        results = on_all_ranks(contexts, in_parts)
    with loopback_group(plan) as contexts:
        expected = on_all_ranks(contexts, lambda rank, context: [run_step(b, plan, context) for b in batches])
    for mine, right in zip(results, expected, strict=True):
        for a, b in zip(mine, right, strict=True):
            _assert_same(a, b)


def test_steps_in_parts_on_two_streams_at_once_give_the_bits_of_whole_steps(gpu: EmulatedGpu) -> None:
    """Each of two steps has a stream of its own, and the host waits for none before the end of ten pairs."""
    heads, lengths = distca.Heads(4, 2, 16, 16), (400, 3, 250)
    layouts = [scattered(lengths, 3, seed) for seed in (0, 1)]
    plans = [distca.plan(one, heads, tasks=random_tasks(one, 2, 1), round_bytes=1) for one in layouts]
    batches = [random_batch(lengths, heads, i) for i in (0, 1)]
    ops = torch.ops.distca

    def in_parts(rank: int, context: distca.Context) -> list[Tensors]:
        words, name = [plan.for_rank(rank).tensor for plan in plans], context.name
        tensors = [
            [rows_of_rank(b, plan.layout, rank, t) for t in (b.q, b.k, b.v, b.dout)]
            for b, plan in zip(batches, plans, strict=True)
        ]

        def on_both(call: Callable[[int], T]) -> list[T]:
            results = []
            for i in (0, 1):
                with gpu.stream(1 + i):
                    results.append(call(i))
            return results

        def forward(i: int) -> int:
            return ops.dispatch(*tensors[i][:3], words[i], context=name)

        results = []
        for _ in range(10):
            steps = on_both(forward)
            on_both(lambda i, steps=steps: ops.attend(steps[i], context=name))
            found = on_both(lambda i, steps=steps: ops.collect(steps[i], context=name))

            def backward(i: int, found: list[Tensors] = found) -> int:
                return ops.dispatch_backward(tensors[i][3], *tensors[i][:3], *found[i], words[i], context=name)

            steps = on_both(backward)
            on_both(lambda i, steps=steps: ops.attend(steps[i], context=name))
            grads = on_both(lambda i, steps=steps: ops.collect_backward(steps[i], context=name))
            results += [[*f, *g] for f, g in zip(found, grads, strict=True)]
        on_both(lambda _: gpu.synchronize())
        return results

    with loopback_group(plans, **OPTIONS) as contexts, gpu.steps_do_not_wait():
        results = on_all_ranks(contexts, in_parts)
    with loopback_group(plans) as contexts:
        expected = on_all_ranks(
            contexts,
            lambda rank, context: [run_step(b, plan, context) for b, plan in zip(batches, plans, strict=True)],
        )
    for mine, right in zip(results, expected, strict=True):
        for a, b in zip(mine, 10 * right, strict=True):
            _assert_same(a, b)


def test_what_was_run_were_the_kernels(gpu: EmulatedGpu) -> None:
    kernels = ("put_kernel", "signal_kernel", "await_kernel", "copy_kernel", "reduce_kernel", "row_delta_kernel")
    before = [gpu.launches(name) for name in kernels]
    heads = distca.Heads(4, 2, 16, 16)
    plan = distca.plan(scattered(LENGTHS, 2, 5), heads, tasks=random_tasks(scattered(LENGTHS, 2, 5), 2, 3))
    with loopback_group(plan, **OPTIONS) as contexts:
        assert "emulated" in contexts[0].attention
        on_all_ranks(contexts, lambda rank, context: run_step(random_batch(LENGTHS, heads, 1), plan, context))
    for name, count in zip(kernels, before, strict=True):
        assert gpu.launches(name) > count, name
        # A launch that loads a kernel may wait for a rank that waits for this one.
        assert not gpu.was_loaded_by_a_launch(name), name


def test_a_gpu_that_kernels_were_not_compiled_for_is_an_error_that_says_how_to(gpu: EmulatedGpu) -> None:
    plan = distca.plan(distca.Layout.from_documents([[8]]), distca.Heads(2, 1, 8))
    said = "no kernel image.*; build distca with a TORCH_CUDA_ARCH_LIST that has this GPU's compute capability"
    with gpu.without_kernels(), pytest.raises(distca.DeviceError, match=said), loopback_group(plan, **OPTIONS):
        pass


def test_many_steps_whose_tables_take_turns_in_memory_give_the_bits_of_the_host(gpu: EmulatedGpu) -> None:
    heads = distca.Heads(2, 1, 8)
    layout = scattered(LENGTHS, 2, 5)
    plans = [distca.plan(layout, heads, tasks=random_tasks(layout, heads.kv, seed)) for seed in range(20)]
    batch = random_batch(LENGTHS, heads, 1)
    results = []
    for options in ({}, OPTIONS):
        with loopback_group(plans, **options) as contexts:
            results.append(on_all_ranks(contexts, lambda rank, c: [run_step(batch, plan, c) for plan in plans]))
    for right, mine in zip(*results, strict=True):
        for a, b in zip(mine, right, strict=True):
            _assert_same(a, b)


def test_a_host_that_is_many_steps_ahead_waits_before_it_uses_memory_of_tables_again(gpu: EmulatedGpu) -> None:
    heads = distca.Heads(2, 1, 8)
    layout = scattered(LENGTHS, 2, 5)
    plans = [distca.plan(layout, heads, tasks=random_tasks(layout, heads.kv, seed)) for seed in range(30)]
    batch = random_batch(LENGTHS, heads, 1)
    is_ahead = threading.Event()

    def work(rank: int, context: distca.Context) -> list[torch.Tensor]:
        tensors = [rows_of_rank(batch, layout, rank, t) for t in (batch.q, batch.k, batch.v)]
        results = []
        if rank == 1:
            assert is_ahead.wait(20)
        for number, plan in enumerate(plans):
            results.append(distca.core_attention(*tensors, plan.for_rank(rank), context=context))
            if number == 6:
                is_ahead.set()  # half of the 128 tables that may be under way are used by now
        gpu.synchronize()
        return [out for out, _ in results]

    with loopback_group(plans, **OPTIONS) as contexts, gpu.steps_do_not_wait():
        results = on_all_ranks(contexts, work)
    with loopback_group(plans[0]) as contexts:
        expected = on_all_ranks(contexts, lambda rank, context: forward_of_rank(plans[0], batch, rank, context))
    for mine, right in zip(results, expected, strict=True):
        assert all(torch.equal(one, right) for one in mine)  # the plan does not change any row's result


def test_steps_on_another_stream_come_after_those_before(gpu: EmulatedGpu) -> None:
    heads = distca.Heads(2, 1, 8)
    layout = scattered(LENGTHS, 2, 5)
    plans = [distca.plan(layout, heads, tasks=random_tasks(layout, heads.kv, seed)) for seed in range(16)]
    batch = random_batch(LENGTHS, heads, 1)

    def work(rank: int, context: distca.Context) -> list[torch.Tensor]:
        tensors = [rows_of_rank(batch, layout, rank, t) for t in (batch.q, batch.k, batch.v)]
        results = []
        for number, plan in enumerate(plans):
            with gpu.stream(number // 2 % 2):  # the slots take turns, and a slot's next step is on the other stream
                results.append(distca.core_attention(*tensors, plan.for_rank(rank), context=context))
        for number in range(2):
            with gpu.stream(number):
                gpu.synchronize()
        return [out for out, _ in results]

    with loopback_group(plans, **OPTIONS) as contexts, gpu.steps_do_not_wait():
        results = on_all_ranks(contexts, work)
    with loopback_group(plans[0]) as contexts:
        expected = on_all_ranks(contexts, lambda rank, context: forward_of_rank(plans[0], batch, rank, context))
    for mine, right in zip(results, expected, strict=True):
        assert all(torch.equal(one, right) for one in mine)


# ---- faults


def test_a_silent_peer_is_not_a_number_and_a_timeout_that_names_it(gpu: EmulatedGpu) -> None:
    heads = distca.Heads(4, 2, 16, 16)
    plan = distca.plan(spill(LENGTHS, 2), heads, tolerance=0.0, min_rows=1)
    batch = random_batch(LENGTHS, heads, 1)
    with loopback_group(plan, **(OPTIONS | {"timeout": 0.2})) as contexts:
        assert forward_of_rank(plan, batch, 0, contexts[0]).isnan().all()
        fault = fault_of_check(contexts[0])
        assert isinstance(fault, distca.PeerTimeoutError)
        assert "rank 0 of 2, step 1 (forward)" in str(fault) and "waited 0.2 s for rank 1" in str(fault)


def test_a_peer_that_died_between_steps_ends_what_waits_for_it_on_the_device(gpu: EmulatedGpu) -> None:
    heads = distca.Heads(4, 2, 16, 16)
    plan = distca.plan(spill(LENGTHS, 3), heads, tolerance=0.0, min_rows=1)
    batch = random_batch(LENGTHS, heads, 1)

    def work(rank: int, context: distca.Context) -> torch.Tensor | None:
        forward_of_rank(plan, batch, rank, context)
        if rank == 1:
            _emulation.mark_died(context._core)
            return None
        try:
            return forward_of_rank(plan, batch, rank, context)
        except distca.DistcaError as error:
            assert "rank 1 died" in str(error), error
            return None

    with loopback_group(plan, **OPTIONS) as contexts:
        for rank, out in enumerate(on_all_ranks(contexts, work)):
            assert out is None or out.isnan().all()
            if rank != 1:
                assert "rank 1 died" in str(fault_of_check(contexts[rank]))
