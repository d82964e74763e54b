"""`Layout.with_bidirectional`: which ranges a layout takes, and that layouts made of it keep them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import distca

LAYOUT = distca.Layout([[(0, 0, 6), (-1, 0, 2)], [(1, 0, 4), (0, 6, 10)]])
RANGES = {0: [(0, 2), (2, 3), (5, 8)], 1: [(0, 4)]}
WITH = LAYOUT.with_bidirectional(RANGES)
HEADS = distca.Heads(q=4, kv=2, dim=16)


def test_a_layout_says_the_ranges_that_it_was_given() -> None:
    assert LAYOUT.bidirectional == {}
    assert WITH.bidirectional == RANGES
    assert [WITH.segments(rank) for rank in range(2)] == [LAYOUT.segments(rank) for rank in range(2)]
    assert LAYOUT.with_bidirectional({0: [(5, 8), (0, 2)], 1: []}).bidirectional == {0: [(0, 2), (5, 8)]}
    assert WITH.with_bidirectional({}).bidirectional == {}


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ({2: [(0, 1)]}, r"of document 2; the layout has documents 0 to 1"),
        ({2: []}, r"of document 2; the layout has documents 0 to 1"),
        ({0: (0, 2)}, r"a range of bidirectional rows of document 0 is 0; integers \(begin, end\) .* in a list: "),
        ({-1: [(0, 1)]}, r"of document -1; the layout has documents 0 to 1"),
        ({0: [(3, 3)]}, r"document 0: bidirectional rows \[3, 3\); 0 <= begin < end <= 10"),
        ({0: [(4, 3)]}, r"document 0: bidirectional rows \[4, 3\)"),
        ({1: [(2, 5)]}, r"document 1: bidirectional rows \[2, 5\); 0 <= begin < end <= 4"),
        (
            {0: [(0, 3), (2, 4)]},
            r"document 0: bidirectional rows \[2, 4\) begin before the ones before them end, at row 3",
        ),
        ({0: [(-1, 3)]}, r"document 0 is \(-1, 3\); integers \(begin, end\)"),
        ({0: [(0, 1, 2)]}, r"document 0 is \(0, 1, 2\)"),
        ({0: [(0.0, 2)]}, r"document 0 is \(0.0, 2\)"),
        ({0: 3}, r"bidirectional rows of document 0 is 3|bidirectional rows of document 0"),
        ([(0, 0, 1)], r"a mapping of documents"),
        (None, r"a mapping of documents"),
    ],
)
def test_ranges_that_are_none_are_refused_with_what_is_allowed(ranges: Any, said: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=said):
        LAYOUT.with_bidirectional(ranges)


def test_joined_layouts_keep_their_ranges_under_the_new_numbers() -> None:
    other = distca.Layout.from_documents([[3], [5]]).with_bidirectional({1: [(1, 5)]})
    whole = distca.Layout.join([(WITH, [2, 0]), (other, [1, 3])], num_ranks=4)
    assert whole.bidirectional == {**RANGES, 3: [(1, 5)]}


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, lambda of: pickle.loads(pickle.dumps(of))])
def test_copies_keep_the_ranges(way: Any) -> None:
    assert way(WITH).bidirectional == RANGES
    plan = distca.plan(WITH, HEADS)
    copied = way(plan)
    assert copied.layout.bidirectional == RANGES
    assert copied.for_rank(1).digest == plan.digest


def test_halves_keep_the_ranges_of_their_documents_and_count_their_attention() -> None:
    ranges = {0: [(0, 16)], 2: [(0, 4), (8, 16)], 3: [(1, 16)]}
    layout = distca.Layout.from_documents([[16, 16], [16, 16]]).with_bidirectional(ranges)
    halves = distca.halves(layout)
    for half in halves:
        of_half = {half.documents.index(d): of for d, of in ranges.items() if d in half.documents}
        assert half.layout.bidirectional == of_half
        assert half.is_of(layout) and not half.is_of(layout.with_bidirectional({}))
    one_rank = distca.Layout.from_documents([[40, 40, 56, 56]])
    first, second = distca.halves(one_rank.with_bidirectional({0: [(0, 40)], 1: [(0, 40)]}))  # 1,600 pairs each, 1,596
    assert [sum(one_rank.document_lengths[d] for d in half.documents) for half in (first, second)] == [96, 96]


def test_chunks_keep_ranges_that_lie_in_one() -> None:
    layout = distca.Layout([[(0, 0, 5)], [(0, 5, 10)]])
    assert layout.with_bidirectional({0: [(1, 3), (4, 8), (9, 10)]}).chunked(4).bidirectional == {
        0: [(1, 3)],
        1: [(0, 4)],
        2: [(1, 2)],
    }
    with pytest.raises(distca.InvalidArgumentError, match=r"bidirectional rows \[3, 5\) of document 0 lie in several"):
        layout.with_bidirectional({0: [(3, 5)]}).chunked(4)


def test_layers_without_the_rows_have_plans_without_them() -> None:
    plans = distca.plans(WITH, HEADS, windows=[None, 3], bidirectional_windows=[3])
    assert plans[None].layout.bidirectional == {}
    assert plans[3].layout.bidirectional == RANGES
    assert plans[None].digest == distca.plan(LAYOUT, HEADS).digest
    assert plans.layout.bidirectional == RANGES
    for seen in (plans, plans.for_parts(), plans.for_rank(0)):
        with pytest.raises(
            distca.InvalidArgumentError, match="None, 3, and bidirectional_windows holds for these alone"
        ):
            seen.for_window(10**6)  # it sees as much as None, and its layers may have the rows
    assert distca.plans(LAYOUT, HEADS, windows=[None, 3], bidirectional_windows=[3]).for_window(10**6).window is None
    with pytest.raises(distca.InvalidArgumentError, match=r"has \[4\], which are none of the windows \[None, 3\]"):
        distca.plans(WITH, HEADS, windows=[None, 3], bidirectional_windows=[4])
    with pytest.raises(distca.InvalidArgumentError, match="a window is 'all'"):
        distca.plans(WITH, HEADS, windows=[None], bidirectional_windows=["all"])  # type: ignore[list-item]


def test_a_range_counts_in_loads() -> None:
    layout = distca.Layout.from_documents([[100], [100]]).with_bidirectional({0: [(10, 60)]})
    before = distca.plan(layout, distca.Heads(q=1, kv=1, dim=16), balance=False).stats.load_before
    assert before == [5050 + 50 * 49 // 2, 5050]


def test_no_load_is_less_than_the_first_row_of_a_range_costs() -> None:
    """Under a window it sees more keys than the last row of its document."""
    layout = distca.Layout.from_documents([[5], [], [], [], [], []]).with_bidirectional({0: [(0, 5)]})
    stats = distca.plan(layout, distca.Heads(q=1, kv=1, dim=16), window=1, tolerance=0.0, min_rows=1).stats
    assert sum(stats.load_before) == 5 + 4 + 3 + 2 + 1
    assert stats.lower_bound == stats.largest == 5
