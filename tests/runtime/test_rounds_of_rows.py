"""Rows that go to servers in rounds: the bits of rows that go at once, in every way in which steps are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distca
from distca import testing
from distca.testing import _emulation
from support.batches import random_batch, random_tasks, rows_of_rank, scattered
from support.groups import compute, loopback_group, on_all_ranks, run_step
from support.oracle import NAMES
from support.recorded import one_step, set_rows, tensors_of

LENGTHS = (130, 3, 64, 90, 77, 200)
RANKS = 4
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
WAYS: dict[str, dict[str, Any]] = {
    "host": {},
    "threads": {"threads": 2},
    "late": {"reorder_seed": 3},
    "streams": {"streams": True},
    "two hosts": {"streams": True, "hosts": 2},
}


def _plan(seed: int, dtype: torch.dtype, **options: Any) -> distca.Plan:
    heads = distca.Heads(4, 2, 16, 24, dtype)
    layout = scattered(LENGTHS, RANKS, seed)
    return distca.plan(layout, heads, tasks=random_tasks(layout, heads.kv, seed), **options)


@DTYPES
@pytest.mark.parametrize("way", WAYS)
def test_rounds_give_the_bits_of_one_round(way: str, dtype: torch.dtype) -> None:
    for seed, retain_bytes in ((1, 0), (2, 2**20), (3, 5000)):
        one, several = (
            _plan(seed, dtype, retain_bytes=retain_bytes, round_bytes=round_bytes) for round_bytes in (2**40, 1)
        )
        assert {task.round for task in several.tasks} >= {0, 1, 2} > {task.round for task in one.tasks} - {-1}
        batch = random_batch(LENGTHS, one.heads, seed)
        for name, a, b in zip(NAMES, compute(batch, several, **WAYS[way]), compute(batch, one), strict=True):
            assert torch.equal(a, b), f"{name}, {retain_bytes} bytes are retained"


@pytest.mark.parametrize("streams", [False, True])
def test_steps_whose_peers_send_in_other_rounds_each_time_follow_one_another(streams: bool) -> None:
    """The slots are used again and again, by plans of one round and of three, with and without each peer's rows."""
    plans = [_plan(seed, torch.float32, round_bytes=2**40 if seed % 3 == 0 else 1) for seed in range(12)]
    batch = random_batch(LENGTHS, plans[0].heads, 4)
    with loopback_group(plans, streams=streams) as contexts:
        found = on_all_ranks(contexts, lambda rank, context: [run_step(batch, plan, context) for plan in plans])
    with loopback_group(plans) as contexts:
        expected = [
            on_all_ranks(contexts, lambda rank, context, plan=plan: run_step(batch, plan, context))
            for plan in [_plan(seed, torch.float32, round_bytes=2**40) for seed in range(12)]
        ]
    for rank, of_rank in enumerate(found):
        for number, results in enumerate(of_rank):
            for name, a, b in zip(NAMES, results, expected[number][rank], strict=True):
                assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)), f"step {number}, rank {rank}: {name}"


@pytest.mark.parametrize("first", [1, 2**40])
def test_a_recording_is_filled_again_by_plans_of_other_rounds(first: int) -> None:
    heads = distca.Heads(4, 2, 16, 24)
    rows = 64
    layouts = [distca.Layout.packed([rows * 3 // 8] * 8, ranks=3, tokens_per_rank=rows) for _ in range(6)]
    plans = [
        distca.plan(layout, heads, tasks=random_tasks(layout, heads.kv, seed), round_bytes=1 if seed % 2 else 2**40)
        for seed, layout in enumerate(layouts)
    ]
    recorded = distca.plan(layouts[0], heads, tasks=random_tasks(layouts[0], heads.kv, 9), round_bytes=first)

    def work(rank: int, context: distca.Context) -> list[list[torch.Tensor]]:
        tensors, results = tensors_of(99, rank, heads), []
        with context.record(headroom=4.0, rounds=4) as recording:
            returned = one_step(recorded, tensors, context)
        for seed, plan in enumerate(plans):
            set_rows(tensors, tensors_of(seed, rank, heads))
            recording.replan(plan.for_rank(rank))
            recording.replay()
            results.append([one.clone() for one in returned])
        return results

    with loopback_group([*plans, recorded], streams=True, timeout=10.0) as contexts:
        found = on_all_ranks(contexts, work)
    with loopback_group(plans) as contexts:
        expected = on_all_ranks(
            contexts,
            lambda rank, context: [
                one_step(plan, tensors_of(seed, rank, heads), context) for seed, plan in enumerate(plans)
            ],
        )
    for of_rank, right in zip(found, expected, strict=True):
        for mine, theirs in zip(of_rank, right, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("round_bytes", [1, 2**40])
def test_results_of_the_first_round_leave_before_the_rows_of_the_last_have_come(round_bytes: int) -> None:
    heads = distca.Heads(4, 2, 16)
    layout = distca.Layout.from_documents([[100, 100, 100], [1]])
    tasks = [*((document, 0, 100, 0, 2, 1) for document in range(3)), (3, 0, 1, 0, 2, 1)]
    plan = distca.plan(layout, heads, tasks=tasks, round_bytes=round_bytes)
    batch = random_batch(layout.document_lengths, heads, 5)
    link = distca.Link(bytes_per_second=1e6, latency=1e-4)  # the rows of a document take some 50 ms
    contexts = testing.loopback(2, heads=heads, max_tokens=1, heap_bytes=2 * plan.stats.slot_bytes, link=link)

    def forward(rank: int, context: distca.Context) -> None:
        q, k, v = (rows_of_rank(batch, layout, rank, tensor) for tensor in (batch.q, batch.k, batch.v))
        distca.core_attention(q, k, v, plan.for_rank(rank), context=context)

    try:
        on_all_ranks(contexts, forward)
        there, back = (_emulation.take_transfers(context._core) for context in contexts)
    finally:
        for context in contexts:
            context.close()
    first_result, last_row = min(begin for *_, begin, _ in back), max(end for *_, end in there)
    assert (first_result < last_row) == (round_bytes == 1)
