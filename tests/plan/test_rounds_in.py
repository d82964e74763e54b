"""The rounds in which rows go to servers: which documents are in which, and what that leaves alone."""

from __future__ import annotations

from typing import Any

import pytest

import distca
from support.batches import random_tasks, scattered
from support.step_simulation import ROUNDS, Simulation

HEADS = distca.Heads(4, 2, 16)


def _served(lengths: list[int], **options: Any) -> distca.Plan:
    """Documents of rank 0, all of which rank 1 computes."""
    tasks = [(document, 0, length, 0, HEADS.kv, 1) for document, length in enumerate(lengths)]
    return distca.plan(
        distca.Layout.from_documents([lengths, [5]]), HEADS, tasks=[*tasks, (len(lengths), 0, 5, 0, 2, 1)], **options
    )


def _rounds(plan: distca.Plan) -> list[int]:
    """The round of each document."""
    return [task.round for task in sorted(plan.tasks)]


def test_rounds_have_about_the_same_attention_and_small_documents_come_first_and_last() -> None:
    # In the order 50, 70, 90, 100, 80, 60, whose halves lie at 0.04, 0.14, 0.32, 0.58, 0.81, 0.95 of all pairs.
    assert _rounds(_served([100, 80, 90, 60, 70, 50], round_bytes=1)) == [1, 2, 0, 2, 0, 0, -1]
    # The largest one has more attention than two rounds. Nothing is left for a round between the others.
    assert _rounds(_served([50, 1000, 60], round_bytes=1)) == [0, 1, 2, -1]
    assert _rounds(_served([1000, 3], round_bytes=1)) == [1, 0, -1]
    assert _rounds(_served([1000], round_bytes=1)) == [0, -1]


def test_a_round_has_at_least_the_bytes_that_are_asked_for_on_average() -> None:
    lengths = [100] * 6
    num_bytes = sum(lengths) * (HEADS.q + 2 * HEADS.kv) * HEADS.dim * 4
    for round_bytes, rounds in ((1, 3), (num_bytes // 3, 3), (num_bytes // 3 + 1, 2), (num_bytes // 2 + 1, 1)):
        assert max(_rounds(_served(lengths, round_bytes=round_bytes))) == rounds - 1, round_bytes
    megabytes = distca.Layout.from_documents([[2000] * 3, [5]]), distca.Heads(8, 8, 64)
    tasks = [*((document, 0, 2000, 0, 8, 1) for document in range(3)), (3, 0, 5, 0, 8, 1)]
    for overlap, rounds in ((False, 3), (True, 1)):  # 12 megabytes
        plan = distca.plan(*megabytes, tasks=tasks, overlap=overlap)
        assert max(task.round for task in plan.tasks) == rounds - 1


def test_rounds_move_no_other_rows_and_take_no_other_memory() -> None:
    for seed in range(8):
        layout = scattered((130, 3, 64, 90, 77, 200), 4, seed)
        tasks = random_tasks(layout, HEADS.kv, seed)
        one, several = (
            distca.plan(layout, HEADS, tasks=tasks, round_bytes=round_bytes, retain_bytes=[0, 2**20, 0, 5000])
            for round_bytes in (2**40, 1)
        )
        assert {task.round for task in one.tasks} <= {-1, 0} and {task.round for task in several.tasks} >= {0, 1, 2}
        assert [task[:-1] for task in several.tasks] == [task[:-1] for task in one.tasks]
        assert sorted(t[:-1] for t in several.transfers) == sorted(t[:-1] for t in one.transfers)
        assert (several.stats.bytes, several.stats.slot_bytes) == (one.stats.bytes, one.stats.slot_bytes)
        assert one.digest != several.digest
        Simulation(several).run()


def test_rounds_do_not_decide_which_keys_are_retained() -> None:
    """Each of three documents saves the keys of 64 rows. Those of document 1 take the memory of 128."""
    layout = distca.Layout([[(0, 0, 64), (1, 1, 65), (2, 0, 64)], [(1, 0, 1)]])
    tasks = [(0, 0, 64, 0, 2, 1), (1, 0, 1, 0, 2, 1), (1, 1, 60, 0, 2, 0), (1, 60, 65, 0, 2, 1), (2, 0, 64, 0, 2, 1)]
    row_bytes = 2 * HEADS.kv * HEADS.dim * 4  # of a key and its value
    one, several = (
        distca.plan(layout, HEADS, tasks=tasks, round_bytes=round_bytes, retain_bytes=[0, 128 * row_bytes])
        for round_bytes in (2**40, 1)
    )
    rounds = {task.document: task.round for task in several.tasks if task.server == 1}
    assert rounds == {0: 1, 1: 0, 2: 0}
    for plan in (one, several):
        assert plan.stats.saved_bytes == 2 * 64 * row_bytes
    assert several.stats.bytes == one.stats.bytes
    assert several.stats.arena_bytes == one.stats.arena_bytes


def test_transfers_have_the_round_of_the_tasks_that_they_are_for() -> None:
    plan = _served([100, 80, 90, 60, 70, 50], round_bytes=1)
    of_document = {task.document: task.round for task in plan.tasks}
    assert {of_document[t.document] == t.round for t in plan.transfers} == {True}
    assert {t.message for t in plan.transfers} == set(plan.stats.bytes) and ROUNDS == 3


@pytest.mark.parametrize("round_bytes", [0, -1, 1.5, "1", 2**46 + 1])
def test_other_values_are_refused(round_bytes: Any) -> None:
    with pytest.raises(distca.InvalidArgumentError, match="round_bytes = .*; None or 1 to 2\\*\\*46 is allowed"):
        _served([10], round_bytes=round_bytes)
