"""`Layout(branches=)`: which branches a layout takes, and what layouts and plans made of it say."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import distca
from distca.planner.telling import telling
from support.branches import random_tree
from support.plan_reader import read_slice

HEADS = distca.Heads(q=4, kv=2, dim=16)
SEGMENTS = [[(0, 0, 6), (2, 6, 9), (-1, 0, 2)], [(1, 4, 7), (0, 6, 10), (3, 8, 12)]]
TREE = distca.Layout(SEGMENTS, branches={1: 0, 2: 0, 3: 2})
BRANCHES = {1: [(0, 0, 4)], 2: [(0, 0, 6)], 3: [(0, 0, 6), (2, 6, 8)]}


def test_a_layout_says_its_branches_and_their_positions() -> None:
    assert TREE.branches == BRANCHES
    assert TREE.document_lengths == [10, 7, 9, 12]
    assert TREE.num_rows(0) == 11
    assert TREE.position_ids(1).tolist() == [4, 5, 6, 6, 7, 8, 9, 8, 9, 10, 11]
    assert "4 documents (3 branches)" in repr(TREE)
    assert distca.Layout([[(0, 0, 3)]]).branches == {}
    assert distca.Layout([[(0, 0, 3)]], branches={}).branches == {}


@pytest.mark.parametrize(
    ("segments", "branches", "said"),
    [
        ([(0, 0, 4), (1, 4, 6)], None, r"document 1: rows \[0, 4\) are on no rank"),
        ([(0, 0, 4), (1, 4, 6), (2, 2, 3)], {1: 0}, r"document 2: rows \[0, 2\) are on no rank"),
        ([(0, 0, 4), (1, 5, 6)], {1: 0}, r"document 1, whose first row is 5, branches off document 0, .* \[0, 4\)"),
        ([(0, 0, 4), (1, 0, 6)], {1: 0}, r"document 1, whose first row is 0, branches off document 0"),
        ([(0, 0, 4), (1, 4, 6)], {0: 1, 1: 0}, r"document 0, whose first row is 0, branches off document 1"),
        ([(0, 0, 4), (1, 4, 6)], {1: 1}, r"document 1, whose first row is 4, branches off document 1, .* \[4, 6\)"),
        ([(0, 0, 4), (1, 4, 6), (2, 3, 5)], {1: 0, 2: 1}, r"document 2, whose first row is 3, branches off document 1"),
        ([(0, 0, 4), (1, 4, 6)], {1: 2}, r"document 1 branches off document 2; 0 to 1 are allowed"),
        ([(0, 0, 4), (1, 4, 6)], {2: 0}, r"document 1: rows \[0, 4\) are on no rank"),
        ([(0, 0, 4), (1, 4, 6), (1, 7, 8)], {1: 0}, r"document 1: rows \[6, 7\) are on no rank"),
        ([(0, 0, 4)], {1: 0}, r"document 1 branches off document 0; 0 to 0 are allowed"),
        ([(0, 0, 4), (1, 4, 6)], {1: -1}, r"branches = .* a mapping of documents"),
        ([(0, 0, 4), (1, 4, 6)], {1.0: 0}, r"branches = .* a mapping of documents"),
        ([(0, 0, 4), (1, 4, 6)], {True: 0}, r"branches = .* a mapping of documents"),
        ([(0, 0, 4), (1, 4, 6)], [(1, 0)], r"branches = .* a mapping of documents"),
        ([(0, 0, 4), (1, 4, 6)], {1: [0]}, "document 1 begins with 0; integers"),
    ],
)
def test_branches_that_are_none_are_refused_with_what_is_allowed(segments: Any, branches: Any, said: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=said):
        distca.Layout([segments], branches=branches)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda of: pickle.loads(pickle.dumps(of))])
def test_copies_keep_the_branches(way: Any) -> None:
    assert way(TREE).branches == BRANCHES
    plan = distca.plan(TREE, HEADS)
    assert way(plan).layout.branches == BRANCHES
    assert way(plan).for_rank(1).digest == plan.digest


def test_joined_layouts_keep_their_branches_under_the_new_numbers() -> None:
    other = distca.Layout([[(0, 0, 3)], [(1, 3, 4)]], branches={1: 0})
    whole = distca.Layout.join([(TREE, [2, 0]), (other, [1, 3])], num_ranks=4)
    assert whole.branches == {**BRANCHES, 5: [(4, 0, 3)]}


def test_rows_that_see_each_other_are_a_branch_s_own() -> None:
    layout = TREE.with_bidirectional({0: [(0, 5)], 2: [(6, 8)]})
    assert (layout.branches, layout.bidirectional) == (BRANCHES, {0: [(0, 5)], 2: [(6, 8)]})
    with pytest.raises(distca.InvalidArgumentError, match=r"\[5, 8\); 6 <= begin < end <= 9 \(its own rows\)"):
        TREE.with_bidirectional({2: [(5, 8)]})


def test_documents_that_share_rows_are_in_one_half() -> None:
    for seed in range(30):
        layout = random_tree(seed).layout(3, seed)
        halves = distca.halves(layout)
        for half in halves:
            number = {document: i for i, document in enumerate(half.documents)}
            assert all((branch in number) == (of in number) for branch, begins in layout.branches.items()
                       for of, _, _ in begins)  # fmt: skip
            of_half = {number[d]: [(number[of], *rows) for of, *rows in begins] for d, begins in
                       layout.branches.items() if d in number}  # fmt: skip
            assert half.layout.branches == of_half
            assert half.is_of(layout)
            for rank in range(3):
                assert half.layout.position_ids(rank).tolist() == layout.position_ids(rank)[half.rows(rank)].tolist()
        assert sorted(halves[0].documents + halves[1].documents) == list(range(len(layout.document_lengths)))


@pytest.mark.parametrize("window", [None, 30, distca.Chunk(32)])
def test_halves_are_dealt_as_if_documents_that_share_rows_were_one(window: Any) -> None:
    """A branch that begins where its parent ends has, with it, the pairs and the rows of one document."""
    for seed in range(20):
        lengths = torch.randint(1, 150, (7,), generator=torch.Generator().manual_seed(seed)).tolist()
        at = [(d + 1, 0, n) for d, n in enumerate(lengths)]
        whole = distca.Layout([[(0, 0, 100), *at[:3]], at[3:]])
        split = distca.Layout([[(0, 0, 60), (8, 60, 100), *at[:3]], at[3:]], branches={8: 0})
        for of_whole, of_split in zip(
            distca.halves(whole, window=window), distca.halves(split, window=window), strict=True
        ):
            assert [d for d in of_split.documents if d < 8] == of_whole.documents


def test_chunks_share_the_rows_of_the_chunk_in_which_a_branch_begins() -> None:
    layout = distca.Layout([[(0, 0, 10), (1, 6, 13), (2, 8, 9), (3, 7, 8)]], branches={1: 0, 2: 0, 3: 1}).chunked(4)
    # Chunks of document 0 are 0 to 2, of document 1 (rows 6 on) 3 to 6; the first one, 3, has no row of its own.
    assert layout.segments(0) == [
        (0, 0, 4), (1, 0, 4), (2, 0, 2), (3, 2, 4), (4, 0, 4), (5, 0, 1), (6, 0, 1), (7, 3, 4)
    ]  # fmt: skip
    assert layout.branches == {3: [(1, 0, 2)], 7: [(1, 0, 2), (3, 2, 3)]}


def test_a_plan_of_another_parent_has_another_digest() -> None:
    segments = [[(0, 0, 8), (1, 0, 8)], [(2, 5, 9)]]
    plans = [distca.plan(distca.Layout(segments, branches={2: parent}), HEADS, balance=False) for parent in (0, 1)]
    assert plans[0].digest != plans[1].digest
    header = [read_slice(plan.for_rank(0).tensor.tolist()).header for plan in plans]
    assert header[0].layout_digest != header[1].layout_digest
    assert header[0].num_tokens == 20


def test_bytes_and_loads_of_a_tree_can_be_counted_by_hand() -> None:
    """A prompt of 10 rows on rank 0, answers of 3 rows on both ranks; rank 1 fetches the prompt's keys for its own."""
    heads = distca.Heads(2, 1, 8, 16)
    layout = distca.Layout([[(0, 0, 10), (1, 10, 13)], [(2, 10, 13)]], branches={1: 0, 2: 0})
    plan = distca.plan(layout, heads, balance=False)
    assert plan.stats.load == [2 * (55 + 11 + 12 + 13), 2 * (11 + 12 + 13)]
    keys = 10 * (8 + 16) * 4
    assert plan.stats.bytes == {"forward_in": keys, "forward_out": 0, "backward_in": keys, "backward_out": keys}
    assert {(t.document, t.begin, t.end) for t in plan.transfers} == {(0, 0, 10)}
    assert plan.stats.bytes_lower_bound == 0


def test_a_tree_at_home_moves_nothing() -> None:
    layout = distca.Layout([[(0, 0, 100), (1, 70, 300), (2, 100, 101), (3, 300, 310)]], branches={1: 0, 2: 0, 3: 1})
    assert sum(distca.plan(layout, HEADS).stats.bytes.values()) == 0


def test_a_schedule_computes_a_branch_s_own_rows_alone() -> None:
    layout = distca.Layout([[(0, 0, 10), (1, 10, 13)]], branches={1: 0})
    distca.plan(layout, HEADS, tasks=[(0, 0, 10, 0, 2, 0), (1, 10, 13, 0, 2, 0)])
    with pytest.raises(
        distca.InvalidArgumentError, match=r"tasks\[1\] has rows \[9, 13\) of document 1, whose own rows begin at 10"
    ):
        distca.plan(layout, HEADS, tasks=[(0, 0, 10, 0, 2, 0), (1, 9, 13, 0, 2, 0)])
    with pytest.raises(distca.InvalidArgumentError, match="row 10 of document 1, key/value head 0, exactly once"):
        distca.plan(layout, HEADS, tasks=[(0, 0, 10, 0, 2, 0), (1, 11, 13, 0, 2, 0)])


# ---- told by ranks


def _told(*batches: dict[str, Any], bidirectional: bool = False) -> distca.Layout:
    tells = telling(
        "PlanAhead",
        None,
        None,
        lambda batch: batch["segments"],
        (lambda batch: batch.get("ranges", [])) if bidirectional else None,
        lambda batch: batch.get("branches", {}),
    )
    return tells.layout([tells.words(batch) for batch in batches], [0] * len(batches))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_ranks_tell_their_branches_by_their_own_numbers(bidirectional: bool) -> None:
    first = {"segments": [(70, 0, 6), (20, 6, 9), (-1, 0, 2)], "branches": {20: 70}}
    second = {"segments": [(70, 6, 10), (50, 4, 7)], "branches": {50: 70, 20: 70}, "ranges": [(50, 4, 6)]}
    layout = _told(first, second, bidirectional=bidirectional)
    assert layout.branches == {0: [(2, 0, 6)], 1: [(2, 0, 4)]}
    assert layout.segments(0) == [(2, 0, 6), (0, 6, 9), (-1, 0, 2)]
    assert layout.bidirectional == ({1: [(4, 6)]} if bidirectional else {})


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([{"segments": [(7, 0, 6)], "branches": [(7, 0)]}], "PlanAhead: branches = .* a mapping of documents"),
        ([{"segments": [(7, 0, 6)], "branches": {7: -1}}], "PlanAhead: branches = .* a mapping of documents"),
        ([{"segments": [(7, 0, 6), (9, 6, 8)], "branches": {9: 8}}], r"rank 0 tells that document 9 branches off "
         r"document 8; the ranks have rows of \[7, 9\]"),
        ([{"segments": [(7, 0, 6), (9, 6, 8)], "branches": {9: 7}}, {"segments": [(8, 0, 7)], "branches": {9: 8}}],
         "rank 1 tells that document 9 branches off document 8; a rank before it: branches off document 7"),
        ([{"segments": [(7, 0, 6), (9, 7, 8)], "branches": {9: 7}}], r"document 1, whose first row is 7.* "
         r"documents are called \[7, 9\]"),
    ],
)  # fmt: skip
def test_what_ranks_tell_of_branches_must_go_together(batches: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=said):
        _told(*batches)


def test_branches_are_told_with_segments() -> None:
    for lengths in (None, lambda batch: [3]):
        with pytest.raises(distca.InvalidArgumentError, match="branches= needs segments="):
            distca.PlanAhead([], heads=HEADS, layout=None if lengths else lambda batch: TREE, lengths=lengths,
                             branches=lambda batch: {})  # fmt: skip
    with distca.PlanAhead(
        [0], heads=HEADS, rank=0, segments=lambda batch: [(3, 0, 5), (4, 5, 7)], branches=lambda batch: {4: 3}
    ) as steps:
        [(_, plan)] = steps
    assert plan.layout.branches == {1: [(0, 0, 5)]}
    assert torch.equal(plan.layout.position_ids(0), torch.arange(7))
