"""Steps on an emulated GPU: the library's code for CUDA on streams that are threads (cuda_emulation/runtime).

Expected are the bits of the same steps on the host: the emulated ATen computes attention with the CPU's kernel, so what
is looked at is everything else. Heads of values have 8 or 16 columns, of which both add row sums in the same order.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import distca
import emulated_gpu
from compiled import COMPILER
from plan_reader import read_slice
from support import (
    NAMES,
    Batch,
    data_parallel,
    loopback_group,
    on_all_ranks,
    random_batch,
    random_tasks,
    rows_of_rank,
    run_step,
    scattered,
    spill,
    spill_with_empty_ranks,
)

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C++ compiler here")

LENGTHS = (100, 3, 64, 130)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GPU = {"streams": True, "attention": "flash", "timeout": 20.0}
"""What makes contexts on the emulated GPU."""

Tensors = list[torch.Tensor]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return emulated_gpu.build(tmp_path_factory)


@pytest.fixture(scope="module")
def gpu(library: Path) -> Iterator[ctypes.CDLL]:
    loaded = emulated_gpu.load(library)
    loaded.use_emulated_gpu(False)
    yield loaded
    loaded.leave_emulated_gpu()


def _assert_same(mine: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    for name, a, b in zip(NAMES, mine, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=name)


def _on_host_and_gpu(batch: Batch, plan: distca.Plan, fused: bool = True) -> list[list[tuple[torch.Tensor, ...]]]:
    """Of the host and of the emulated GPU what each rank returns."""
    results = []
    for options in ({}, GPU):
        with loopback_group(plan, **options) as contexts:
            results.append(on_all_ranks(contexts, lambda rank, context: run_step(batch, plan, context, fused=fused)))
    return results


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("make_layout", [data_parallel, spill_with_empty_ranks, scattered])
def test_steps_give_the_bits_of_steps_on_the_host(gpu, make_layout, ranks: int, dtype: torch.dtype) -> None:
    heads = distca.Heads(4, 2, 24, 16, dtype)
    layout = make_layout(LENGTHS, ranks, 5)
    plan = distca.plan(layout, heads, tasks=random_tasks(layout, heads.kv, 3))
    for right, mine in zip(*_on_host_and_gpu(random_batch(LENGTHS, heads, 2), plan), strict=True):
        _assert_same(mine, right)


@pytest.mark.parametrize("seeds", [range(12 * i, 12 * i + 12) for i in range(3)], ids=str)
def test_random_plans_give_the_bits_of_steps_on_the_host(gpu, seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        kv, dim = draw.choice([1, 2, 3]), 8 * draw.randint(1, 5)
        heads = distca.Heads(
            kv * draw.choice([1, 2, 3]), kv, dim, draw.choice([8, 16]), draw.choice([*DTYPES.values()])
        )
        lengths = [draw.choice([1, 7, 64, 65, 130]) for _ in range(draw.randint(1, 5))]
        layout = draw.choice([data_parallel, scattered, spill])(lengths, draw.choice([2, 3]), seed)
        window, retain = draw.choice([None, None, 20]), draw.choice([0, 0, 1 << 20])
        tasks = random_tasks(layout, kv, seed)
        plan = distca.plan(layout, heads, tasks=tasks, window=window, retain_bytes=retain)
        batch = random_batch(lengths, heads, seed)
        for right, mine in zip(*_on_host_and_gpu(batch, plan, fused=seed % 2 == 0), strict=True):
            _assert_same(mine, right)


def test_gradients_that_come_home_in_rounds_give_the_bits_of_the_host(gpu) -> None:
    heads = distca.Heads(2, 1, 8)
    plan = distca.plan(spill((1500, 100), 6), heads, tolerance=0.0, min_rows=1)
    assert max(read_slice(plan.for_rank(rank).tensor.tolist()).header.num_rounds for rank in range(6)) > 2
    for right, mine in zip(*_on_host_and_gpu(random_batch((1500, 100), heads, 2), plan, fused=False), strict=True):
        _assert_same(mine, right)


def test_row_sums_of_many_columns_differ_from_those_of_the_host_in_the_order_of_their_terms_alone(gpu) -> None:
    heads = distca.Heads(4, 2, 16, 72)
    plan = distca.plan(scattered(LENGTHS, 2, 5), heads)
    for right, mine in zip(*_on_host_and_gpu(random_batch(LENGTHS, heads, 2), plan), strict=True):
        for name, a, b in zip(NAMES, mine, right, strict=True):
            bound = 3e-6 if name in ("dq", "dk") else 0
            torch.testing.assert_close(a, b, rtol=bound, atol=bound, equal_nan=True, msg=name)


def test_two_steps_in_parts_at_once_give_the_bits_of_whole_steps(gpu) -> None:
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

    with loopback_group(plan, **GPU) as contexts:
        results = on_all_ranks(contexts, in_parts)
    with loopback_group(plan) as contexts:
        expected = on_all_ranks(contexts, lambda rank, context: [run_step(b, plan, context) for b in batches])
    for mine, right in zip(results, expected, strict=True):
        for a, b in zip(mine, right, strict=True):
            _assert_same(a, b)


def test_what_was_run_were_the_kernels(gpu) -> None:
    kernels = ("put_kernel", "signal_kernel", "await_kernel", "for_each_piece", "reduce_kernel", "row_dot_kernel")
    before = [gpu.emulated_launches(name.encode()) for name in kernels]
    heads = distca.Heads(4, 2, 16, 16)
    plan = distca.plan(scattered(LENGTHS, 2, 5), heads, tasks=random_tasks(scattered(LENGTHS, 2, 5), 2, 3))
    with loopback_group(plan, **GPU) as contexts:
        assert "emulated" in contexts[0].attention
        on_all_ranks(contexts, lambda rank, context: run_step(random_batch(LENGTHS, heads, 1), plan, context))
    for name, count in zip(kernels, before, strict=True):
        assert gpu.emulated_launches(name.encode()) > count, name


# ---- faults


def _forward(plan: distca.Plan, batch: Batch, rank: int, context: distca.Context) -> torch.Tensor:
    q, k, v = (rows_of_rank(batch, plan.layout, rank, t) for t in (batch.q, batch.k, batch.v))
    return distca.core_attention(q, k, v, plan.for_rank(rank), context=context)[0]


def _fault(context: distca.Context) -> Exception:
    """What `check` raises, once there is something to raise."""
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        try:
            context.check()
        except distca.DistcaError as error:
            return error
        time.sleep(0.001)
    raise AssertionError("no fault is reported")


def test_a_silent_peer_is_not_a_number_and_a_timeout_that_names_it(gpu) -> None:
    heads = distca.Heads(4, 2, 16, 16)
    plan = distca.plan(spill(LENGTHS, 2), heads, tolerance=0.0, min_rows=1)
    batch = random_batch(LENGTHS, heads, 1)
    with loopback_group(plan, **(GPU | {"timeout": 0.2})) as contexts:
        assert _forward(plan, batch, 0, contexts[0]).isnan().all()
        fault = _fault(contexts[0])
        assert isinstance(fault, distca.PeerTimeoutError)
        assert "rank 0 of 2, step 1 (forward)" in str(fault) and "waited 0.2 s for rank 1" in str(fault)


def test_a_peer_that_died_between_steps_ends_what_waits_for_it_on_the_device(gpu) -> None:
    heads = distca.Heads(4, 2, 16, 16)
    plan = distca.plan(spill(LENGTHS, 3), heads, tolerance=0.0, min_rows=1)
    batch = random_batch(LENGTHS, heads, 1)

    def work(rank: int, context: distca.Context) -> torch.Tensor | None:
        _forward(plan, batch, rank, context)
        if rank == 1:
            context._core.mark_died()
            return None
        try:
            return _forward(plan, batch, rank, context)
        except distca.DistcaError as error:
            assert "rank 1 died" in str(error), error
            return None

    with loopback_group(plan, **GPU) as contexts:
        for rank, out in enumerate(on_all_ranks(contexts, work)):
            assert out is None or out.isnan().all()
            if rank != 1:
                assert "rank 1 died" in str(_fault(contexts[rank]))


# ---- the emulator itself


MISUSE = {
    "free_what_a_kernel_reads": "freed that is still to be used by add_kernel",
    "free_the_source_of_a_copy": "freed that is still to be used by copy",
    "free_twice": "freed before",
    "launch_a_graph_over_freed_memory": "graph uses memory that was freed",
    "read_freed_memory": "set_kernel uses memory that was freed",
    "copy_beyond_the_end": "a copy goes beyond an allocation",
    "use_a_destroyed_event": "an event is used that was destroyed",
    "use_a_destroyed_stream": "a stream is used that was destroyed",
    "launch_no_block": "set_kernel is launched with a wrong grid",
    "launch_too_many_threads": "more than 1024 threads a block",
    "leave_threads_at_a_barrier": "of the 128 threads of a block of uneven_kernel 28 have ended",
    "write_beyond_the_end": "",  # a segmentation fault
}


@pytest.mark.parametrize("which", MISUSE)
def test_wrong_use_ends_the_program_and_says_why(library: Path, which: str) -> None:
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).misuse(sys.argv[2].encode())"
    command = [sys.executable, "-S", "-c", code, str(library), which]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode < 0, done
    assert MISUSE[which] in done.stderr


@pytest.mark.parametrize(
    ("which", "result"),
    {
        "reuse_a_source_too_early": 2,  # what was written there after the copy was queued
        "values_with_a_barrier": 0,
        "replay_a_fork_and_join": 1115,  # 2 x 5 + 1, then 2 x 7 + 1
        "replay_branches_that_wait_for_each_other": 0,
        # Numbers of errors, as CUDA's: 1000 times that of the call, and that of the end of the capture.
        "wait_for_an_event_from_outside": 905_901,
        "wait_outside_for_an_event_of_a_capture": 907_000,
        "leave_a_stream_unjoined": 904,
        "synchronise_a_capturing_stream": 900_901,
        "synchronise_the_device": 900_901,
        "query_a_captured_event": 907_901,
        "query_another_event": 900_901,
        "allocate": 900_901,
        "allocate_relaxed": 0,
        "allocate_in_a_relaxed_capture": 0,
        "allocate_elsewhere": 900_901,
        "allocate_elsewhere_thread_local": 0,
        "allocate_elsewhere_of_a_thread_local_capture": 0,
        "merge_two_captures": 902_901,
        "end_in_another_thread": 908_000,
        "end_another_stream": 903_000,
        "begin_twice": 401_000,
    }.items(),
)
def test_copies_barriers_and_captures_do_what_the_manual_says(gpu, which: str, result: int) -> None:
    assert gpu.outcome(which.encode()) == result


def test_a_barrier_that_is_missing_shows_in_what_a_kernel_computes(gpu) -> None:
    assert gpu.outcome(b"values_without_a_barrier") > 0
