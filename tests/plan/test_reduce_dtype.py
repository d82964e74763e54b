"""Plans whose contributions to key gradients travel in the dtype of the heads."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections import Counter

import pytest
import torch

import distca
from support.batches import spill
from support.plan_reader import ADD, ASSIGN, TENSORS, read_slice

BF16 = distca.Heads(8, 2, 64, 32, torch.bfloat16)
RANKS, ROWS = 4, 256


def _plan(heads: distca.Heads, *, mask: str = "full", reduce_dtype: torch.dtype = torch.float32) -> distca.Plan:
    """A document over all ranks, each of which computes its own rows."""
    return distca.plan(spill((RANKS * ROWS,), RANKS), heads, mask=mask, balance=False, reduce_dtype=reduce_dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_contributions_of_several_servers_are_half_the_bytes(dtype: torch.dtype) -> None:
    heads = dataclasses.replace(BF16, dtype=dtype)
    wide, narrow = _plan(heads), _plan(heads, reduce_dtype=dtype)
    numbers = RANKS * (RANKS - 1) * ROWS * heads.kv * (heads.dim + 32)  # each rank has some of each other rank's keys
    assert (wide.stats.bytes["backward_out"], narrow.stats.bytes["backward_out"]) == (4 * numbers, 2 * numbers)
    moved: Counter[str] = Counter()
    for transfer in narrow.transfers:
        moved[f"{transfer.message} {transfer.tensor}"] += transfer.bytes
    assert moved["backward_out dk"] + moved["backward_out dv"] == 2 * numbers
    assert wide.tasks == narrow.tasks and wide.digest != narrow.digest
    for message in ("forward_in", "forward_out", "backward_in"):
        assert wide.stats.bytes[message] == narrow.stats.bytes[message]


def test_contributions_take_half_the_memory_at_both_ends_and_sums_are_in_fp32() -> None:
    wide, narrow = (
        _plan(BF16, reduce_dtype=dtype).stats.arena_bytes["backward"] for dtype in (torch.float32, BF16.dtype)
    )
    row = BF16.kv * (BF16.dim + 32)
    for before, after in zip(wide, narrow, strict=True):
        others, own = (RANKS - 1) * ROWS * row, ROWS * row
        assert (before.scratch, after.scratch) == (4 * others + 4 * own, 2 * others + 4 * own)
        assert before.home_in == 2 * after.home_in
        assert before.server_in == after.server_in


def test_what_one_server_alone_contributes_travels_as_before() -> None:
    layout = distca.Layout.from_documents([[2000], [10]])
    tasks = [(0, 0, 2000, 0, 2, 1), (1, 0, 10, 0, 2, 1)]
    wide, narrow = (
        distca.plan(layout, BF16, tasks=tasks, reduce_dtype=dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    assert wide.digest == narrow.digest
    assert (wide.reduce_dtype, narrow.reduce_dtype) == (torch.float32, torch.bfloat16)


def test_a_row_of_which_the_home_computes_nothing_starts_with_the_first_contribution_that_comes() -> None:
    layout = distca.Layout([[(0, 0, 300)], [(0, 300, 600)], [(0, 600, 900)]])
    tasks = [(0, 0, 300, 0, 2, 1), (0, 300, 600, 0, 2, 2), (0, 600, 900, 0, 2, 2)]
    plan = distca.plan(layout, BF16, tasks=tasks, reduce_dtype=torch.bfloat16)
    received = read_slice(plan.tensor.tolist()).receives[1]
    assert [(TENSORS[r.tensor], r.peer, r.action) for r in received if TENSORS[r.tensor] != "dq"] == [
        ("dk", 1, ASSIGN), ("dv", 1, ASSIGN), ("dk", 2, ADD), ("dv", 2, ADD)
    ]  # fmt: skip


def test_in_fp32_it_is_the_same_plan() -> None:
    heads = dataclasses.replace(BF16, dtype=torch.float32)
    assert _plan(heads, reduce_dtype=heads.dtype).digest == _plan(heads).digest


def test_the_planner_counts_the_bytes_that_travel() -> None:
    """Two nodes of four ranks, bytes between which count nine times. In a group of all eight, keys come with one head
    and one server alone contributes to their gradients. In groups of four they come with two heads, and rows stay on
    their node. That is fewer bytes only if contributions are in bfloat16.
    """
    layout = distca.Layout.packed([8 * ROWS], ranks=8, tokens_per_rank=ROWS)
    heads = distca.Heads(16, 8, 64, dtype=torch.bfloat16)
    query = 2 * (5 * 2 * 64 + 3 * 4)  # for each of two heads q, out, lse; q, dout, lse, delta, dq

    def key(contribution: int) -> int:
        return (2 + 2 + contribution) * (64 + 64)  # k, v; k, v; dk, dv

    def weighted(num_heads: int, contribution: int, rows: int, rows_across: int) -> int:
        keys = (7 + 8 * 4) * num_heads * key(contribution)
        return 8 * ROWS * (keys + (rows + 8 * rows_across) * num_heads * query)

    in_eights = weighted(1, 2, 7, 4)
    assert weighted(2, 2, 3, 0) < in_eights < weighted(2, 4, 3, 0)
    for reduce_dtype, size, expected in (
        (torch.float32, 8, in_eights),
        (torch.bfloat16, 4, weighted(2, 2, 3, 0)),
    ):
        plan = distca.plan(layout, heads, mask="full", ranks_per_node=4, reduce_dtype=reduce_dtype)
        assert plan.stats.head_parallel == {0: size}
        moved, across = (sum(b.values()) for b in (plan.stats.bytes, plan.stats.bytes_between_nodes))
        assert moved + 8 * across == expected


@pytest.mark.parametrize("reduce_dtype", [torch.float16, torch.float64, "bfloat16", None])
def test_other_dtypes_are_refused(reduce_dtype: torch.dtype) -> None:
    said = f"plan: reduce_dtype = {reduce_dtype!r}; torch.float32 or the dtype of the heads, torch.bfloat16, is allowed"
    with pytest.raises(distca.InvalidArgumentError, match=re.escape(said)):
        _plan(BF16, reduce_dtype=reduce_dtype)


def test_a_pickled_plan_keeps_it() -> None:
    plan = _plan(BF16, reduce_dtype=torch.bfloat16)
    read = pickle.loads(pickle.dumps(plan))
    assert read.reduce_dtype == torch.bfloat16 and torch.equal(read.tensor, plan.tensor)
    assert torch.equal(read.for_rank(2).tensor, plan.for_rank(2).tensor)
