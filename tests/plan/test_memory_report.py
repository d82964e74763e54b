"""`distca.memory_report`: what a heap takes, before anything runs."""

from __future__ import annotations

import pytest
import torch

import distca
from support.batches import data_parallel, random_batch
from support.groups import compute, loopback_group

HEADS = distca.Heads(2, 1, 16)


def skewed(length: int, ranks: int = 2) -> distca.Layout:
    return distca.Layout.from_documents([[length], *([[64]] * (ranks - 1))])


def test_the_report_is_of_the_largest_arena_of_each_rank_over_all_plans() -> None:
    small, large = (distca.plan(skewed(n), HEADS, min_rows=8) for n in (256, 1024))
    report = distca.memory_report(small, large)
    for rank in range(2):
        for phase in ("forward", "backward"):
            of_plans = [plan.stats.arena_bytes[phase][rank] for plan in (small, large)]
            assert report.arenas[rank][phase] in of_plans
            assert report.arenas[rank][phase].total == max(sum(arena) for arena in of_plans)
    largest = max(report.arenas[rank][phase].total for rank in range(2) for phase in ("forward", "backward"))
    assert report.slot_bytes == largest and report.heap_bytes == 2 * largest
    assert report.capacity is None and not report.trades_balance


def test_a_heap_of_the_reported_size_is_just_enough() -> None:
    layout = data_parallel((200, 31, 64, 300), 2)
    plan = distca.plan(layout, HEADS, tolerance=0.01, min_rows=8)
    batch = random_batch((200, 31, 64, 300), HEADS, seed=1)
    heap_bytes = distca.memory_report(plan).heap_bytes
    options = {"max_tokens": 1, "heads": HEADS}
    for context in distca.loopback(2, heap_bytes=heap_bytes, **options):
        with context:
            assert context.slot_bytes >= plan.stats.slot_bytes
    with pytest.raises(distca.CapacityError):
        for context in distca.loopback(2, heap_bytes=heap_bytes - 128, **options):
            with context:
                rows = torch.zeros(plan.for_rank(context.rank).num_rows, 2, 16)
                distca.core_attention(rows, rows[:, :1], rows[:, :1], plan.for_rank(context.rank), context=context)
    assert all(torch.isfinite(t).all() for t in compute(batch, plan))


def test_it_says_what_memory_costs_in_balance_and_what_would_mend_it() -> None:
    layout = skewed(1024)
    free = distca.plan(layout, HEADS, tolerance=0.01, min_rows=8)
    capacity = free.stats.slot_bytes // 2
    tight = distca.plan(layout, HEADS, tolerance=0.01, min_rows=8, capacity=capacity)
    report = distca.memory_report(tight)
    assert report.trades_balance and report.slot_bytes <= capacity
    assert report.imbalance == [tight.stats.imbalance_after] and report.imbalance[0] > 1.01
    assert report.wanted_slot_bytes == free.stats.slot_bytes
    assert f"heap_bytes={2 * free.stats.slot_bytes}" in str(report)
    assert "memory costs balance" not in str(distca.memory_report(free))


def test_a_plan_within_its_tolerance_costs_no_balance() -> None:
    layout = distca.Layout.from_documents([[256, 100], [64], [64]])
    free = distca.plan(layout, HEADS, tolerance=0.3, min_rows=8)
    other = distca.plan(layout, HEADS, tolerance=0.3, min_rows=8, capacity=free.stats.slot_bytes - 1)
    assert other.stats.slot_bytes < other.stats.wanted_slot_bytes and other.stats.binding is None
    report = distca.memory_report(other)
    assert not report.trades_balance and "memory costs balance" not in str(report)


def test_the_report_of_a_context_has_its_heap() -> None:
    plan = distca.plan(skewed(256), HEADS, min_rows=8)
    with loopback_group(plan, heap_bytes=1 << 20) as contexts:
        report = distca.memory_report(plan, context=contexts[1])
        assert (report.capacity, report.heap_bytes) == (1 << 19, 1 << 20)
        assert f"of {1 << 19:,} bytes" in str(report)


def test_it_says_what_is_kept_beside_the_heap_in_all_layers() -> None:
    small, large = (distca.plan(skewed(n), HEADS, min_rows=8, retain_bytes=1 << 30) for n in (256, 1024))
    kept = [max(plan.stats.retained_bytes[rank] for plan in (small, large)) for rank in range(2)]
    assert kept[0] == 0 < kept[1]
    report = distca.memory_report(small, large, layers=12)
    assert report.retained_bytes == [0, 12 * kept[1]]
    assert f"up to {12 * kept[1]:,} bytes (rank 1) are kept from forward to backward" in str(report)
    resending = distca.memory_report(distca.plan(skewed(1024), HEADS, min_rows=8))
    assert resending.retained_bytes == [0, 0] and "kept" not in str(resending)
    assert large.memory(layers=12) == distca.memory_report(large, layers=12)
    with pytest.raises(distca.errors.InvalidArgumentError, match="layers = 0; at least 1"):
        distca.memory_report(small, layers=0)


def test_every_rank_and_phase_has_a_line() -> None:
    lines = str(distca.memory_report(distca.plan(skewed(256, ranks=3), HEADS, min_rows=8))).splitlines()
    assert [line.split()[:2] for line in lines[1:7]] == [[str(r), p] for r in range(3) for p in ("forward", "backward")]


def test_mistakes_are_named() -> None:
    plan = distca.plan(skewed(64), HEADS)
    with pytest.raises(distca.errors.InvalidArgumentError, match="plans for \\[\\] ranks"):
        distca.memory_report()
    with pytest.raises(distca.errors.InvalidArgumentError, match=r"\[2, 3\] ranks"):
        distca.memory_report(plan, distca.plan(skewed(64, ranks=3), HEADS))
    with pytest.raises(distca.errors.InvalidArgumentError, match="no context 'nowhere'"):
        distca.memory_report(plan, context="nowhere")
    with (
        loopback_group(distca.plan(skewed(64, ranks=3), HEADS)) as contexts,
        pytest.raises(distca.errors.InvalidArgumentError, match="plans for 2 ranks and context .* of 3"),
    ):
        distca.memory_report(plan, context=contexts[0])
