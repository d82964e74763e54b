"""`distca bench pipeline`: attention of a pipeline's ticks, balanced over all stages, inside each, and not at all.

Beside it stand the arenas of these plans, and tables of ticks that hold less. Only the planner runs. Ticks are
synchronous: a tick takes as long as its largest load. A backward tick counts `PipelineStats.backward_cost` times.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

import distca
from distca.apps.bench.harness import Result, Row
from distca.apps.common.timing import seconds
from distca.apps.common.workloads import draw_documents, pretrain_lengths, read_lengths
from distca.pipeline import PipelinePlans, smallest_slots, tick_table

HEADS = distca.Heads(q=32, kv=8, dim=128, dtype=torch.bfloat16)
TOLERANCE = 0.02
#: Data ranks of a stage, stages, micro-batches, tokens a rank.
SHAPES = [
    (data, stages, microbatches, tokens)
    for data, stages, microbatches in ((4, 4, 8), (8, 4, 8), (16, 2, 8), (8, 8, 16))
    for tokens in (32_768, 65_536, 131_072)
]
#: How unbalanced an iteration may be for small arenas.
IMBALANCE = 1.05
#: What trades ticks or chunks for memory.
TRADES: tuple[dict[str, Any], ...] = ({}, {"in_flight": 4}, {"in_flight": 2}, {"chunks": 2}, {"chunks": 4})
#: The iteration whose planning time is compared with that of as many single plans.
LARGE = (64, 8, 32, 8_192)
SMALL = (8, 8, 16, 8_192)


def run(rounds: int | None = None, short: bool = False) -> Result:
    """Plans on one core. Times are the least of `rounds`, iterations and single plans in turns."""
    rounds = rounds or (1 if short else 3)
    lengths = read_lengths(pretrain_lengths())
    rows = [row for shape in (SHAPES[:1] if short else SHAPES) for row in _balance(lengths, *shape)]
    rows += [row for trade in TRADES for row in _ticks(4, 16, trade)]
    rows += _planning_time(lengths, *(SMALL if short else LARGE), rounds)
    details = {
        "lengths": pretrain_lengths().name,
        "heads": [HEADS.q, HEADS.kv, HEADS.dim],
        "dtype": "bfloat16",
        "tolerance": TOLERANCE,
        "cost": "pairs",
        "rounds": rounds,
    }
    return Result("pipeline", rows, details)


def _layouts(lengths: list[int], data: int, microbatches: int, tokens: int) -> list[distca.Layout]:
    drawn = [draw_documents(lengths, data, tokens, seed=number) for number in range(microbatches)]
    return [distca.Layout.from_documents(of_ranks) for of_ranks in drawn]


def _stages(data: int, stages: int) -> list[list[int]]:
    return [[stage * data + rank for rank in range(data)] for stage in range(stages)]


def _balance(lengths: list[int], data: int, stages: int, microbatches: int, tokens: int) -> list[Row]:
    layouts = _layouts(lengths, data, microbatches, tokens)
    make = functools.partial(PipelinePlans, layouts, HEADS, stages=_stages(data, stages), tolerance=TOLERANCE)
    plans = make()
    stats = plans.stats
    small = smallest_slots(make, imbalance=IMBALANCE)
    of_stage = [distca.plan(layout, HEADS, tolerance=TOLERANCE) for layout in layouts]
    inside = mean = 0.0
    for tick, of_tick in zip(plans.table, stats.ticks, strict=True):
        weight = 1.0 if tick.phase == "forward" else stats.backward_cost
        inside += weight * max(max(of_stage[work.microbatch].stats.load) for work in tick.work if work is not None)
        mean += weight * of_tick.mean
    bytes_inside = stages * sum(sum(made.stats.bytes.values()) for made in of_stage)
    name = f"DP {data} x PP {stages}, {microbatches} micro-batches, {tokens // 1024}K tokens a rank"
    return [
        Row(f"{name}: largest loads over the ideal", stats.imbalance_after, "x", at_most=1 + TOLERANCE),
        Row(f"{name}: balanced inside each stage", inside / mean, "x"),
        Row(f"{name}: not balanced", stats.imbalance_before, "x"),
        Row(f"{name}: bytes over those of balance inside each stage", stats.bytes / bytes_inside, "x"),
        Row(f"{name}: largest arena", stats.slot_bytes / 1e6, "MB"),
        Row(f"{name}: largest arena over the mean of the ranks", plans.memory().imbalance("arena"), "x"),
        Row(f"{name}: largest arena, loads up to {IMBALANCE}", small.stats.slot_bytes / 1e6, "MB"),
        Row(f"{name}: the same over the mean of the ranks", small.memory().imbalance("arena"), "x"),
    ]


def _ticks(stages: int, microbatches: int, trade: dict[str, Any]) -> list[Row]:
    """Length and memory of a table. A tick has the layers of one chunk."""
    table = tick_table(stages, microbatches, **trade)
    option = ", ".join(f"{name}={value}" for name, value in trade.items()) or "default"
    name = f"{stages} stages, {microbatches} micro-batches, {option}"
    return [
        Row(f"{name}: ticks, each of a whole stage", len(table) / table.chunks, "ticks"),
        Row(f"{name}: in flight on the first stage", table.in_flight(0) / table.chunks, "micro-batches"),
        Row(f"{name}: in flight with 1F1B", table.in_flight_of_1f1b(0) / table.chunks, "micro-batches"),
        Row(f"{name}: ticks in which a stage only serves", 100 - 200 * microbatches * table.chunks / len(table), "%"),
    ]


def _planning_time(
    lengths: list[int], data: int, stages: int, microbatches: int, tokens: int, rounds: int
) -> list[Row]:
    layouts = _layouts(lengths, data, microbatches, tokens)
    whole = PipelinePlans(layouts, HEADS, stages=_stages(data, stages), tolerance=TOLERANCE)
    ranks, ticks = whole.num_ranks, len(whole.table)
    single = [whole.plan(number, 0).layout for number in range(ticks)]

    def iteration() -> None:
        PipelinePlans(layouts, HEADS, stages=_stages(data, stages), tolerance=TOLERANCE)

    def one_by_one() -> None:
        for layout in single:
            distca.plan(layout, HEADS, tolerance=TOLERANCE)

    times = [(seconds(iteration), seconds(one_by_one)) for _ in range(rounds)]
    of_iteration, of_single = (min(of_way) for of_way in zip(*times, strict=True))
    name = f"{ranks} ranks ({data} x {stages}, {microbatches} micro-batches), {ticks} plans"
    return [
        Row(f"{name}: time", 1e3 * of_iteration, "ms"),
        Row(f"{name}: time over as many single plans", of_iteration / of_single, "x", at_most=1.2),
    ]
