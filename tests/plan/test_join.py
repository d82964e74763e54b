"""`Layout.join`: layouts of different ranks as one. `plan(label=)`: what a plan is for, in digest and messages."""

from __future__ import annotations

from typing import Any

import pytest

import distca

FIRST = distca.Layout([[(0, 0, 4), (-1, 0, 3)], [(0, 4, 6), (1, 0, 2)]])
SECOND = distca.Layout.from_documents([[5, 1]])
HEADS = distca.Heads(q=2, kv=1, dim=8)


def test_ranks_keep_their_rows_and_documents_are_numbered_on() -> None:
    whole = distca.Layout.join([(FIRST, [3, 0]), (SECOND, [2])], num_ranks=5)
    assert [whole.segments(rank) for rank in range(5)] == [
        [(0, 4, 6), (1, 0, 2)],
        [],
        [(2, 0, 5), (3, 0, 1)],
        [(0, 0, 4), (-1, 0, 3)],
        [],
    ]
    assert whole.document_lengths == [6, 2, 5, 1]
    assert whole.longest_document == 6


def test_the_longest_document_is_that_of_the_whole_batches_of_halves() -> None:
    layout = distca.Layout.from_documents([[64, 8], [30, 30]])
    second = distca.halves(layout)[1].layout
    assert distca.Layout.join([(second, [0, 1])], num_ranks=2).longest_document == second.longest_document == 64


def test_nothing_joined_is_a_layout_without_rows() -> None:
    assert distca.Layout.join([], num_ranks=2).document_lengths == []


@pytest.mark.parametrize(
    ("parts", "num_ranks", "message"),
    [
        ([(FIRST, [0])], 2, "a part of 2 ranks is put on 1$"),
        ([(FIRST, [1, 1])], 2, "two ranks of the parts are put on rank 1"),
        ([(FIRST, [0, 1]), (SECOND, [1])], 2, "two ranks of the parts are put on rank 1"),
        ([(SECOND, [2])], 2, "put on rank 2; 0 to 1 are allowed"),
        ([(SECOND, ["0"])], 1, "put on ranks .'0'.; integers are expected"),
        ([(SECOND, [0])], 0, "num_ranks = 0"),
        ([("layout", [0])], 1, "a part is a str"),
    ],
)
def test_wrong_parts_are_refused(parts: Any, num_ranks: int, message: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=message):
        distca.Layout.join(parts, num_ranks=num_ranks)


def test_a_label_is_in_the_digest() -> None:
    plans = [distca.plan(FIRST, HEADS, label=label) for label in ("", "tick 1", "tick 2", "tick 1")]
    assert plans[1].digest == plans[3].digest
    assert len({plan.digest for plan in plans}) == 3


@pytest.mark.parametrize("label", [3, None, "x" * 49, "é", "a\nb", "\0"])
def test_a_label_is_short_and_printable(label: Any) -> None:
    with pytest.raises(distca.InvalidArgumentError, match="label = .* up to 48 characters of printable ASCII"):
        distca.plan(FIRST, HEADS, label=label)
