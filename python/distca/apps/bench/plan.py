"""`distca bench plan`: balance, bytes and time of plans for 32 to 512 ranks, and how the time grows up to 4,096."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

import distca
from distca.apps.bench.harness import Result, Row
from distca.apps.common.timing import seconds
from distca.apps.common.workloads import draw_documents, pretrain_lengths, read_lengths

HEADS = distca.Heads(q=32, kv=8, dim=128, dtype=torch.bfloat16)
TOKENS_PER_RANK = 131_072
RANKS_PER_NODE = 8
TOLERANCE = 0.01
#: Ranks and tokens a rank; the last layout has 200,000 documents.
GROWTH = ((8, TOKENS_PER_RANK), (64, TOKENS_PER_RANK), (512, TOKENS_PER_RANK), (4096, 184_320))


class Wanted(NamedTuple):
    """What a plan for so many ranks should reach: gigabytes of a forward pass, and milliseconds."""

    ranks: int
    total_gb: float
    between_nodes_gb: float
    milliseconds: float | None


# Total bytes are those of the plans that DistCA's released planner makes of these batches. Between nodes the bound is
# 0.7 (32 ranks) or 0.55 of that planner's bytes.
WANTED = (
    Wanted(32, 11.3, 0.7 * 10.3, None),
    Wanted(64, 22.6, 0.55 * 21.8, 0.5),
    Wanted(256, 109.9, 0.55 * 105.5, None),
    Wanted(512, 217.7, 0.55 * 216.0, 5.0),
)


def run(rounds: int | None = None, short: bool = False) -> Result:
    """Plans on one core. A time is the least of ``rounds``, and covers all statistics and the slice of one rank."""
    rounds = rounds or 20
    lengths = read_lengths(pretrain_lengths())
    rows: list[Row] = []
    for wanted in WANTED:
        rows += _rows(wanted, _layout(lengths, wanted.ranks), rounds)
    for ranks, tokens in GROWTH[:-1] if short else GROWTH:
        layout = _layout(lengths, ranks, tokens)
        milliseconds = _least_ms(layout, max(1, rounds // 4))
        documents = len(layout.document_lengths)
        rows.append(
            Row(f"{ranks} ranks, {documents:,} documents: time a document", 1e3 * milliseconds / documents, "us")
        )
    details = {
        "lengths": pretrain_lengths().name,
        "tokens_per_rank": TOKENS_PER_RANK,
        "heads": [HEADS.q, HEADS.kv, HEADS.dim],
        "dtype": "bfloat16",
        "ranks_per_node": RANKS_PER_NODE,
        "tolerance": TOLERANCE,
        "cost": "pairs",
        "objective": "forward",
        "rounds": rounds,
    }
    return Result("plan", rows, details)


def _layout(lengths: list[int], ranks: int, tokens_per_rank: int = TOKENS_PER_RANK) -> distca.Layout:
    return distca.Layout.from_documents(draw_documents(lengths, ranks, tokens_per_rank))


def _plan(layout: distca.Layout) -> distca.Plan:
    return distca.plan(layout, HEADS, rank=0, tolerance=TOLERANCE, ranks_per_node=RANKS_PER_NODE, objective="forward")


def _least_ms(layout: distca.Layout, rounds: int) -> float:
    return 1e3 * min(seconds(lambda: _plan(layout).stats.bytes_lower_bound) for _ in range(rounds))


def _rows(wanted: Wanted, layout: distca.Layout, rounds: int) -> list[Row]:
    made = _plan(layout)
    stats = made.stats
    forward = [stats.bytes[message] for message in ("forward_in", "forward_out")]
    between = [stats.bytes_between_nodes[message] for message in ("forward_in", "forward_out")]
    milliseconds = _least_ms(layout, rounds)
    # Keys with their indices are records of 16 bytes.
    keys = torch.randint(2**60, (len(layout.document_lengths),), generator=torch.Generator().manual_seed(0))
    sort_ms = 1e3 * min(seconds(functools.partial(torch.sort, keys)) for _ in range(rounds))
    name = f"{wanted.ranks} ranks"
    return [
        Row(f"{name}: largest / mean load before", stats.imbalance_before, "x"),
        Row(f"{name}: largest / mean load", stats.imbalance_after, "x", at_most=1 + TOLERANCE),
        Row(f"{name}: forward bytes", sum(forward) / 1e9, "GB", at_most=wanted.total_gb),
        Row(f"{name}: forward bytes between nodes", sum(between) / 1e9, "GB", at_most=wanted.between_nodes_gb),
        Row(f"{name}: time", milliseconds, "ms", at_most=wanted.milliseconds),
        Row(f"{name}: time / sorting a record for each document", milliseconds / sort_ms, "x"),
    ]
