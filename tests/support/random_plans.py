"""Random layouts and plans for property tests."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st

import distca
from support.batches import random_ranges, random_tasks, scattered
from support.branches import random_tree
from support.plan_reader import own_rows

HEADS = [
    distca.Heads(4, 1, 16, 24),
    distca.Heads(2, 2, 24, 8, torch.bfloat16),
    distca.Heads(3, 3, 8, dtype=torch.float16),
]
MASKS = (("causal", None), ("causal", 1), ("causal", 50), ("causal", 64), ("causal", 150))
MASKS += (("full", None), ("full", 1), ("full", 64), ("full", 90))
COSTS = (distca.CostModel(), distca.CostModel(3, 40), distca.CostModel(0, 1))


# In the first model, pairs of small tasks cost twice as much. In the second, costs rise and fall from size to size, as
# on no device.
RATED = (
    distca.CostModel(rates=(*[(2048,)] * 7, (1024,))),
    distca.CostModel(5, 3, rates=((3000, 100, 5000, 1024, 4000),) * 3 + ((200, 3000, 70, 1024, 1024),) * 4),
)


class Made(NamedTuple):
    plan: distca.Plan
    cost: distca.CostModel
    servers: set[int]
    ranks_per_node: int | None


@st.composite
def layouts(draw: st.DrawFn) -> distca.Layout:
    layout = draw(_layouts())
    if draw(st.booleans()):
        return layout
    firsts = [rows.start for rows in own_rows(layout)]
    return layout.with_bidirectional(random_ranges(layout.document_lengths, draw(st.integers(0, 10**6)), firsts))


@st.composite
def _layouts(draw: st.DrawFn) -> distca.Layout:
    lengths = draw(st.lists(st.sampled_from((1, 2, 5, 31, 63, 64, 65, 127, 129, 200, 331)), max_size=7))
    ranks = draw(st.integers(1, 6))
    kind = draw(st.sampled_from(("packed", "documents", "scattered", "head_tail", "branches")))
    if kind == "branches":
        seed = draw(st.integers(0, 10**6))
        return random_tree(seed, draw(st.integers(1, 7))).layout(ranks, seed)
    if kind == "packed":
        spare = draw(st.sampled_from((0, 1, 64, 1000)))
        return distca.Layout.packed(lengths, ranks=ranks, tokens_per_rank=-(-sum(lengths) // ranks) + spare or 1)
    if kind == "documents":
        of_ranks: list[list[int]] = [[] for _ in range(ranks)]
        for length in lengths:
            of_ranks[draw(st.integers(0, ranks - 1))].append(length)
        return distca.Layout.from_documents(of_ranks)
    if kind == "head_tail":
        return distca.Layout.head_tail(lengths, ranks=ranks)
    return scattered(lengths, ranks, draw(st.integers(0, 10**6)))


def retain_bytes(ranks: int) -> st.SearchStrategy[int | list[int]]:
    some = st.sampled_from((0, 1, 64, 5000, 20_000, 100_000, 2**40))
    return st.just(0) | some | st.lists(some, min_size=ranks, max_size=ranks)


@st.composite
def plans(draw: st.DrawFn) -> Made:
    cost = draw(st.sampled_from(COSTS + RATED))
    mask, window = draw(st.sampled_from(MASKS))
    layout = draw(layouts())
    balance = draw(st.sampled_from((True, True, True, False)))
    servers = draw(st.none() | st.sets(st.integers(0, layout.num_ranks - 1), min_size=1)) if balance else None
    heads = draw(st.sampled_from(HEADS))
    ranks_per_node = draw(st.none() | st.integers(1, 4))
    tasks = None
    if draw(st.booleans()):
        tasks = random_tasks(layout, heads.kv, draw(st.integers(0, 10**6)), None if servers is None else list(servers))
    plan = distca.plan(
        layout,
        heads,
        mask=mask,
        window=window,
        servers=None if servers is None else sorted(servers),
        tolerance=draw(st.sampled_from((0.0, 0.01, 0.05, 0.3, 1.0))),
        min_rows=draw(st.sampled_from((1, 10, 64, 500))),
        balance=balance,
        cost=cost,
        tasks=tasks,
        ranks_per_node=ranks_per_node,
        retain_bytes=draw(retain_bytes(layout.num_ranks)),
        round_bytes=draw(st.sampled_from((1, 3000, 2**20))),
        reduce_dtype=draw(st.sampled_from((torch.float32, heads.dtype))),
    )
    return Made(plan, cost, servers or set(range(layout.num_ranks)), ranks_per_node)
