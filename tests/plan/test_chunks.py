"""Attention in chunks: layouts whose documents are chunks, their plans, and the plans of models that have both."""

from __future__ import annotations

import pickle
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distca
from distca import Chunk
from distca.planner.halves import visible_pairs
from support.batches import LAYOUTS, examples, gather, random_batch
from support.groups import loopback_group, on_all_ranks, run_step
from support.oracle import oracle

HEADS = distca.Heads(q=4, kv=2, dim=16)


def _rows(layout: distca.Layout, rank: int) -> list[tuple[int, int]]:
    """Document and row of each row of the rank; (-1, 0) for padding."""
    return [
        (document, row) if document != distca.PADDING else (document, 0)
        for document, begin, end in layout.segments(rank)
        for row in range(begin, end)
    ]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    ranks=st.integers(1, 4),
    name=st.sampled_from(sorted(LAYOUTS)),
    seed=st.integers(0, 99),
    size=st.integers(1, 70),
)
@examples(200)
def test_every_row_stays_where_it_is_and_every_chunk_is_a_document(
    lengths: list[int], ranks: int, name: str, seed: int, size: int
) -> None:
    whole = LAYOUTS[name](lengths, ranks, seed)
    chunks = whole.chunked(size)
    number = {pair: i for i, pair in enumerate((d, c) for d, n in enumerate(lengths) for c in range(-(-n // size)))}
    assert chunks.document_lengths == [min(size, lengths[d] - c * size) for d, c in number]
    for rank in range(ranks):
        expected = [(d, r) if d < 0 else (number[d, r // size], r % size) for d, r in _rows(whole, rank)]
        assert _rows(chunks, rank) == expected


@pytest.mark.parametrize("size", [1, 7, 64, 100, 500])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_rows_see_their_chunk_up_to_themselves(name: str, size: int) -> None:
    lengths = [300, 1, 64, 129]
    layout, batch = LAYOUTS[name](lengths, 3, 1), random_batch(lengths, HEADS, 1)
    plan = distca.plans(layout, HEADS, windows=[Chunk(size)], tolerance=0.0, min_rows=1)[Chunk(size)]
    flat = random_batch(plan.layout.document_lengths, HEADS, 1)  # the same numbers, in chunks
    assert torch.equal(flat.q, batch.q)
    with loopback_group(plan) as contexts:
        of_ranks = on_all_ranks(contexts, lambda rank, context: run_step(flat, plan, context))
    for found, wanted in zip(zip(*of_ranks, strict=True), oracle(batch, mask="chunked", window=size), strict=True):
        padding = float("-inf") if found[0].dim() == 2 else 0.0
        error = gather(plan.layout.document_lengths, plan.layout, found, padding).double() - wanted
        assert error.norm() <= 1e-6 * (wanted.norm() + batch.dout.norm())  # dq and dk of single rows are 0


def test_a_model_with_chunks_has_plans_of_one_layout() -> None:
    layout = distca.Layout.packed([40, 9], ranks=2, tokens_per_rank=25)
    plans = distca.plans(layout, HEADS, windows=[Chunk(16), None, Chunk(16), 8])
    assert list(plans) == [Chunk(16), None, 8]
    for one in (plans, plans.for_rank(1), plans.for_parts(), pickle.loads(pickle.dumps(plans))):
        assert [one.layout.segments(rank) for rank in range(2)] == [layout.segments(rank) for rank in range(2)]
        assert one.for_window(Chunk(16)).layout.document_lengths == [16, 16, 8, 9]
        assert one.for_window(None).layout.document_lengths == [40, 9]
        assert one.for_window(Chunk(40)) is one[None], "a chunk that no document fills"
        assert one.for_window(8) is one[8]
        with pytest.raises(distca.InvalidArgumentError, match=r"no plan for a window of Chunk\(rows=17\); "):
            one.for_window(Chunk(17))
        with pytest.raises(distca.InvalidArgumentError, match="no plan for a window of 16"):
            one.for_window(16)
        with pytest.raises(
            KeyError, match=r"no plan for a window of 16; there are plans for Chunk\(rows=16\), None, 8"
        ):
            one[16]
        assert one.get(16) is None and 16 not in one
        assert re.fullmatch(r"Plans\(\{Chunk\(rows=16\): Plan\(.*\), None: Plan\(.*\), 8: Plan\(.*\)\}\)", repr(one))
    only = distca.plans(layout, HEADS, windows=[Chunk(64)])
    assert only.layout is layout
    again = distca.Plans(dict(only))  # as loops that move batches to a device make any mapping again
    assert again.layout is layout and again.for_rank(1).for_parts().layout is layout
    assert only.for_window(None) is only.for_window(40) is only[Chunk(64)], "all rows see their whole document"
    with pytest.raises(distca.InvalidArgumentError, match="no plan for a window of 39"):
        only.for_window(39)


def test_halves_count_attention_in_chunks() -> None:
    for length, size in ((1, 1), (7, 3), (9, 3), (20, 64), (65, 64)):
        assert visible_pairs(length, Chunk(size)) == sum(row % size + 1 for row in range(length))


@pytest.mark.parametrize("rows", [0, -1, 2.0, "8", None, True])
def test_chunks_of_other_than_a_positive_integer_are_refused(rows: object) -> None:
    with pytest.raises(distca.InvalidArgumentError, match="Chunk: rows = .* an integer from 1"):
        Chunk(rows)  # type: ignore[arg-type]
    with pytest.raises(distca.InvalidArgumentError, match="Chunk: rows = .* an integer from 1"):
        distca.Layout.from_documents([[4]]).chunked(rows)  # type: ignore[arg-type]


def test_what_lacks_chunks_says_so() -> None:
    layout = distca.Layout.from_documents([[40], [9]])
    plan = distca.plan(layout.chunked(8), HEADS)
    with pytest.raises(distca.InvalidArgumentError, match="all are of chunks, and do not tell the documents"):
        distca.Plans({Chunk(8): plan})
    with pytest.raises(
        distca.InvalidArgumentError, match=r"plans\(layout, heads, windows=\[Chunk\(rows=8\)\]\) plans c"
    ):
        distca.plan(layout, HEADS, window=Chunk(8))  # type: ignore[arg-type]


def test_a_plan_with_a_full_mask_is_none_for_chunks() -> None:
    plans = distca.plans(distca.Layout.from_documents([[12]]), HEADS, windows=[None], mask="full")
    with pytest.raises(distca.InvalidArgumentError, match=r"plans: no plan for a window of Chunk\(rows=50\)"):
        plans.for_window(Chunk(50))
    causal = distca.plans(distca.Layout.from_documents([[12]]), HEADS, windows=[None])
    assert causal.for_window(Chunk(50)) is causal[None]
