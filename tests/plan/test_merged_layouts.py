"""`Layout(branches=)` with lists of rows: documents that begin with rows of several others."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import distca
from distca.planner.telling import telling
from support.plan_reader import read_slice

HEADS = distca.Heads(q=4, kv=2, dim=16)
SEGMENTS = [[(0, 0, 6), (2, 5, 9), (-1, 0, 2)], [(1, 0, 4), (0, 6, 10), (3, 7, 12)]]
BRANCHES = {2: [(1, 1, 4), (0, 4, 6)], 3: [(2, 5, 9), (1, 0, 3)]}
LAYOUT = distca.Layout(SEGMENTS, branches=BRANCHES)


def test_a_layout_says_with_which_rows_documents_begin() -> None:
    assert LAYOUT.branches == BRANCHES
    assert LAYOUT.document_lengths == [10, 4, 9, 12]
    assert LAYOUT.position_ids(0).tolist() == [0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 0, 0]
    assert "4 documents (2 branches)" in repr(LAYOUT)


def test_rows_that_follow_one_another_are_one_range_however_they_are_told() -> None:
    segments = [[(0, 0, 6), (1, 6, 8)], [(2, 7, 9)]]
    ways: list[dict[int, Any]] = [
        {1: 0, 2: 1},
        {1: [(0, 0, 2), (0, 2, 6)], 2: 1},
        {1: [(0, 0, 6)], 2: [(0, 0, 4), (0, 4, 6), (1, 6, 7)]},
        {1: ((0, 0, 6),), 2: [[0, 0, 6], [1, 6, 7]]},
        {1: np.array([[0, 0, 6]]), np.int64(2): torch.tensor([[0, 0, 6], [1, 6, 7]])},
        {1: ((0, row, row + 1) for row in range(6)), 2: 1},
    ]
    layouts = [distca.Layout(segments, branches=way) for way in ways]
    assert all(layout.branches == {1: [(0, 0, 6)], 2: [(0, 0, 6), (1, 6, 7)]} for layout in layouts)
    assert len({distca.plan(layout, HEADS).digest for layout in layouts}) == 1


def test_a_branch_of_a_document_that_begins_with_rows_of_others_begins_with_them_too() -> None:
    layout = distca.Layout([[(0, 0, 5), (1, 0, 4), (2, 7, 10), (3, 8, 9)]], branches={2: [(1, 1, 4), (0, 0, 4)], 3: 2})
    assert layout.branches[3] == [(1, 1, 4), (0, 0, 4), (2, 7, 8)]


def test_documents_may_begin_with_rows_of_each_other() -> None:
    layout = distca.Layout([[(0, 2, 5)], [(1, 3, 6)]], branches={0: [(1, 4, 6)], 1: [(0, 2, 5)]})
    assert layout.branches == {0: [(1, 4, 6)], 1: [(0, 2, 5)]}


@pytest.mark.parametrize(
    ("segments", "branches", "said"),
    [
        ([(0, 0, 4), (1, 3, 6)], {1: [(0, 0, 4)]}, "document 1 begins with 4 rows of others; its own begin at row 3"),
        ([(0, 0, 4), (1, 0, 6)], {1: [(0, 0, 4)]}, "document 1 begins with 4 rows of others; its own begin at row 0"),
        ([(0, 0, 4), (1, 5, 6)], {1: [(0, 0, 5)]}, r"rows \[0, 5\) of document 0, whose own are \[0, 4\)"),
        ([(0, 0, 4), (1, 4, 6), (2, 3, 4)], {1: 0, 2: [(1, 3, 6)]}, r"rows \[3, 6\) .* whose own are \[4, 6\)"),
        ([(0, 0, 4), (1, 2, 6)], {1: [(0, 2, 2)]}, r"rows \[2, 2\) of document 0"),
        ([(0, 0, 4), (1, 3, 6)], {1: [(1, 3, 6)]}, "document 1 begins with its own row 3"),
        ([(0, 2, 4), (1, 4, 6)], {0: [(1, 4, 6)], 1: 0}, "document 1 begins with its own row 4"),
        ([(0, 0, 4), (1, 4, 6)], {1: [(0, 0, 2), (0, 1, 3)]}, "document 1 begins with row 1 of document 0 twice"),
        ([(0, 0, 4), (1, 2, 6)], {1: [(2, 0, 2)]}, "document 1 begins with rows of document 2; 0 to 1 are allowed"),
        ([(0, 0, 4), (1, 2, 6)], {1: [(0, 0, 2)], 2: [(0, 0, 2)]}, "document 2 begins with rows of document 0; 0 to 1"),
        ([(0, 0, 4), (1, 2, 6)], {1: []}, r"branches = {\.\.\., 1: \[\]}; a mapping of documents to what"),
        ([(0, 0, 4), (1, 2, 6)], {1: [(0, 2)]}, r"document 1 begins with \(0, 2\); integers \(document, begin, end\)"),
        ([(0, 0, 4), (1, 2, 6)], {1: [(0, 0, 1), (0, 1, -1)]}, r"document 1 begins with \(0, 1, -1\); integers"),
        ([(0, 0, 4), (1, 2, 6)], {1: [(0, 0.0, 2)]}, r"document 1 begins with \(0, 0.0, 2\); integers"),
        ([(0, 0, 4), (1, 2, 6)], {1: (0, 0, 2)}, r"document 1 begins with 0; integers"),
        ([(0, 0, 4), (1, 2, 6)], {1: "0"}, r"branches = {\.\.\., 1: '0'}; a mapping of documents"),
        ([(0, 0, 4), (1, 2, 6)], {1: None}, r"branches = {\.\.\., 1: None}; a mapping of documents"),
        ([(0, 0, 4), (1, 2, 6)], {"1": [(0, 0, 2)]}, r"branches = {\.\.\., '1': \[\(0, 0, 2\)\]}; a mapping"),
        ([(0, 0, 4), (1, 2, 6)], {-1: [(0, 0, 2)]}, r"branches = {\.\.\., -1: "),
        ([(0, 0, 4), (1, 2, 6)], [1], r"branches = \[1\]; a mapping of documents"),
    ],
)
def test_rows_that_a_document_cannot_begin_with_are_refused(segments: Any, branches: Any, said: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=said):
        distca.Layout([segments], branches=branches)


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda of: pickle.loads(pickle.dumps(of))])
def test_copies_begin_with_the_same_rows(way: Any) -> None:
    assert way(LAYOUT).branches == BRANCHES
    assert way(distca.plan(LAYOUT, HEADS)).for_rank(1).digest == distca.plan(LAYOUT, HEADS).digest


def test_joined_layouts_begin_with_rows_of_their_own_documents() -> None:
    whole = distca.Layout.join([(distca.Layout.from_documents([[3]]), [1]), (LAYOUT, [2, 0])], num_ranks=3)
    assert whole.branches == {3: [(2, 1, 4), (1, 4, 6)], 4: [(3, 5, 9), (2, 0, 3)]}


def test_a_chunk_begins_with_the_rows_of_others_that_are_its_own() -> None:
    """Document 2 has rows 1 to 4 of document 1 and then rows 3 to 9 of document 0; its own begin at row 9."""
    layout = distca.Layout([[(0, 0, 10), (1, 0, 4), (2, 9, 13)]], branches={2: [(1, 1, 4), (0, 3, 9)]}).chunked(4)
    # Chunks of document 0 are 0 to 2, that of document 1 is 3, those of document 2 that have own rows 4 and 5.
    assert [s for s in layout.segments(0) if s[0] > 3] == [(4, 1, 4), (5, 0, 1)]
    assert layout.branches == {4: [(2, 0, 1)]}
    wide = distca.Layout([[(0, 0, 10), (1, 0, 4), (2, 9, 13)]], branches={2: [(1, 1, 4), (0, 3, 9)]}).chunked(100)
    assert wide.branches == {2: [(1, 1, 4), (0, 3, 9)]}
    across = distca.Layout([[(0, 0, 10), (1, 6, 8)]], branches={1: [(0, 2, 8)]}).chunked(5)
    assert across.branches == {2: [(1, 2, 3)]}
    both = distca.Layout([[(0, 0, 10), (1, 3, 8)]], branches={1: [(0, 3, 6)]}).chunked(5)
    assert both.branches == {2: [(0, 3, 5), (1, 0, 1)]}


def test_ranks_tell_rows_that_documents_begin_with_by_their_own_numbers() -> None:
    tells = telling("PlanAhead", None, None, lambda b: b["segments"], None, lambda b: b["branches"])
    begins = {20: [(70, 2, 6), (50, 0, 1)]}
    batches = [{"segments": [(70, 0, 6), (20, 5, 9)], "branches": begins},
               {"segments": [(70, 6, 10), (50, 0, 4), (60, 10, 11)], "branches": {60: 70, **begins}}]  # fmt: skip
    layout = tells.layout([tells.words(batch) for batch in batches], [0, 0])
    assert layout.branches == {0: [(3, 2, 6), (1, 0, 1)], 2: [(3, 0, 10)]}
    assert "branches {20: [(70, 2, 6), (50, 0, 1)]}" in tells.say(tells.words(batches[0]))
    batches[1]["branches"][20] = [(70, 2, 3), (70, 3, 6), (50, 0, 1)]  # the same rows
    assert tells.layout([tells.words(batch) for batch in batches], [0, 0]).branches == layout.branches
    others: list[tuple[Any, str]] = [
        ({20: [(70, 2, 6), (50, 1, 2)]}, r"tells that document 20 begins with \[\(70, 2, 6\), \(50, 1, 2\)\]; a"),
        ({20: 70}, r"document 20 branches off document 70; a rank before it: begins with \[\(70, 2, 6\), \(50"),
        ({60: [(71, 0, 2)]}, r"document 60 begins with \[\(71, 0, 2\)\]; the ranks have rows of \[20, 50, 60, 70\]"),
    ]
    for branches, said in others:
        told = [tells.words(batches[0]), tells.words({**batches[1], "branches": branches})]
        with pytest.raises(distca.InvalidArgumentError, match=said):
            tells.layout(told, [0, 0])


def test_rows_come_from_where_they_are() -> None:
    """A question on rank 1 to a part of a passage on rank 0 and to one that rank 1 has."""
    heads = distca.Heads(2, 1, 8, 16)
    layout = distca.Layout([[(0, 0, 10)], [(1, 0, 7), (2, 11, 14)]], branches={2: [(1, 0, 7), (0, 3, 7)]})
    plan = distca.plan(layout, heads, balance=False)
    assert plan.stats.load == [2 * 55, 2 * (28 + 12 + 13 + 14)]
    keys = 4 * (8 + 16) * 4
    assert plan.stats.bytes == {"forward_in": keys, "forward_out": 0, "backward_in": keys, "backward_out": keys}
    assert {(t.document, t.begin, t.end) for t in plan.transfers} == {(0, 3, 7)}


def test_rows_of_passages_are_in_an_arena_once_wherever_documents_have_them() -> None:
    """Questions on rank 1 to two passages on rank 0, in both orders, and with one in pieces. A block of 64 keys whose
    rows are of two documents, or of two places of one, is put together for each document that has another one.
    """
    segments = [[(0, 0, 64), (1, 0, 128)], [(2, 192, 200), (3, 192, 200), (4, 150, 160), (5, 150, 151)]]
    begins = {2: [(0, 0, 64), (1, 0, 128)], 3: [(1, 0, 128), (0, 0, 64)]}
    pieces = [(0, 0, 20), (1, 0, 128), (0, 20, 22)]  # 20 + 44, 64, then 20 + 2 and a document's own rows
    plan = distca.plan(distca.Layout(segments, branches={**begins, 4: pieces, 5: pieces}), HEADS, balance=False)
    tables = read_slice(plan.for_rank(1).tensor.tolist())
    assert [group.document for group in tables.groups] == [2, 3, 4, 5]
    assert len({group.forward_k for group in tables.groups}) == 1
    assert tables.groups[0].num_arena_rows == 192 + 64 + (22 + 10) + (22 + 1)
    entries = [[b.entry // 2 for b in tables.blocks[g.block_begin :][: g.num_blocks]] for g in tables.groups]
    assert entries[0][:3] == [0, 64, 128] and entries[1][:3] == [64, 128, 0]
    assert entries[2] == [192, 64 + 44, 256] and entries[3] == [192, 64 + 44, 288]
    key = (16 + 16) * 2 * 4
    assert plan.stats.bytes["forward_in"] == key * (192 + 64 + 22 + 22)


def test_a_block_that_is_put_together_is_read_wherever_its_rows_are_the_same_and_nowhere_else() -> None:
    """Three questions on rank 1 to two passages on rank 0. Document 4 has the block of document 2 as its second one.
    The block of document 3 has as many rows of each passage, but others of the first.
    """
    segments = [[(0, 0, 128), (1, 0, 128)], [(2, 64, 72), (3, 64, 72), (4, 128, 136)]]
    begins = {2: [(0, 0, 32), (1, 0, 32)], 3: [(0, 64, 96), (1, 0, 32)], 4: [(1, 64, 128), (0, 0, 32), (1, 0, 32)]}
    plan = distca.plan(distca.Layout(segments, branches=begins), HEADS, balance=False)
    tables = read_slice(plan.for_rank(1).tensor.tolist())
    blocks = {g.document: [b.entry for b in tables.blocks[g.block_begin :][: g.num_blocks]] for g in tables.groups}
    assert blocks[2][0] == blocks[4][1] != blocks[3][0]
    assert {group.num_arena_rows for group in tables.groups} == {64 + 64 + 64}


@pytest.mark.parametrize(("questions", "apart"), [(63, True), (64, False)])
def test_heads_stay_together_where_more_than_64_documents_share_rows(questions: int, apart: bool) -> None:
    numbers = range(1, questions + 1)
    segments = [[(0, 0, 600), *((d, 600, 640) for d in numbers)], []]
    layout = distca.Layout(segments, branches={d: [(0, 0, 600)] for d in numbers})
    plan = distca.plan(layout, HEADS, tolerance=0.0, min_rows=1)
    assert plan.stats.load[0] == plan.stats.load[1]
    assert any(task.kv_head_end - task.kv_head_begin < HEADS.kv for task in plan.tasks) == apart


def test_a_server_that_has_rows_of_passages_gets_questions_to_them() -> None:
    """All rows of eight questions to one pair of passages move; the passages' keys travel to one server of them."""
    passages = [(0, 0, 4096), (1, 0, 4096)]
    questions = [(d, 8192, 8704) for d in range(2, 10)]
    begins = {d: [(d % 2, 0, 4096), (1 - d % 2, 0, 4096)] for d in range(2, 10)}
    layout = distca.Layout([passages + questions, [], [], []], branches=begins)
    plan = distca.plan(layout, distca.Heads(8, 8, 64), tolerance=0.1)
    keys = [t for t in plan.transfers if t.tensor == "k" and t.message == "forward_in" and t.document < 2]
    assert max(plan.stats.load) <= 1.11 * sum(plan.stats.load) / 4
    # Two servers with all heads of four questions each would get the passages twice: 2 * 8192 rows.
    assert sum((t.end - t.begin) * (t.kv_head_end - t.kv_head_begin) for t in keys) <= 3.5 * 8192 * 8


def test_heads_stay_together_where_many_documents_share_rows() -> None:
    """A prompt with 63 answers and one with 64 on one of two ranks: balance has to move a part of them."""
    for answers, splits in ((63, True), (64, False)):
        segments = [[(0, 0, 1000), *((d, 1000, 1100) for d in range(1, answers + 1))], []]
        layout = distca.Layout(segments, branches=dict.fromkeys(range(1, answers + 1), 0))
        plan = distca.plan(layout, HEADS, tolerance=0.01)
        assert max(plan.stats.load) <= 0.506 * sum(plan.stats.load)
        assert any(task.kv_head_end - task.kv_head_begin < HEADS.kv for task in plan.tasks) == splits
