"""Plans that contradict themselves, as a wrong planner would make them: validation says what does not fit.

Digests and checksums match in all of them, so that only the tables can show it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distca
from distca import _C
from support.batches import random_tasks
from support.plan_reader import (
    ADD,
    ADDED,
    BACKWARD,
    COPY,
    FINISH,
    FORWARD,
    OUT,
    PARTIAL,
    RETURNED,
    TABLES,
    TENSORS,
    Slice,
    read_slice,
    with_checksum,
    with_digests,
)

HEADS = distca.Heads(4, 2, 16)
NARROW = distca.Heads(4, 2, 16, dtype=torch.float16)
LENGTHS = (200, 100, 60, 30)
LAYOUT = distca.Layout(
    [
        [(0, 0, 110), (1, 0, 20), (distca.PADDING, 0, 5), (3, 0, 30)],
        [(0, 110, 200), (1, 20, 60)],
        [(1, 60, 100), (2, 0, 60)],
    ]
)
TREE = distca.Layout(
    [[(0, 0, 70), (1, 70, 130), (2, 100, 140)], [(0, 70, 100), (3, 50, 90)], [(4, 0, 20), (5, 90, 100)]],
    branches={1: 0, 2: 0, 3: 0, 5: 3},
)
ANSWERS = distca.Layout(
    [[(0, 0, 70), (1, 70, 130), (2, 50, 140)], [(3, 0, 40)], [(4, 30, 60)]], branches={1: 0, 2: 0, 4: 3}
)
MERGED = distca.Layout(
    [[(0, 0, 70), (1, 0, 30)], [(2, 70, 120), (3, 0, 20)], [(1, 30, 50), (4, 45, 60)]],
    branches={2: [(1, 10, 50), (0, 0, 30)], 4: [(0, 0, 5), (1, 0, 5), (2, 75, 110)]},
)
RANKS = range(3)
Change = Callable[[Slice], tuple[int, int, str, int] | None]


def _plans() -> list[distca.Plan]:
    made = [
        distca.plan(LAYOUT, HEADS, min_rows=1, tolerance=0.0),
        distca.plan(LAYOUT, HEADS, tasks=random_tasks(LAYOUT, HEADS.kv, 3)),
        distca.plan(LAYOUT, HEADS, tasks=random_tasks(LAYOUT, HEADS.kv, 4), retain_bytes=2**20),
        distca.plan(LAYOUT, NARROW, tasks=random_tasks(LAYOUT, HEADS.kv, 3), reduce_dtype=NARROW.dtype),
        distca.plan(
            LAYOUT.with_bidirectional({0: [(3, 30), (100, 130)], 1: [(0, 100)]}), HEADS, min_rows=1, tolerance=0.0
        ),
        *(
            distca.plan(TREE, heads, tasks=random_tasks(TREE, heads.kv, 5), reduce_dtype=heads.dtype)
            for heads in (HEADS, NARROW)
        ),
        distca.plan(TREE, HEADS, tasks=random_tasks(TREE, HEADS.kv, 6), round_bytes=1),
        distca.plan(ANSWERS, HEADS, balance=False),
        distca.plan(MERGED, HEADS, balance=False),
    ]
    return [plan.for_rank(rank) for plan in made for rank in RANKS]


def _first(
    table: list[Any], number: int, field: str, value: Callable[[Any], int], wanted: Callable[[Any], bool]
) -> Any:
    """The change of `field` to `value` in the first row of a table for which `wanted` holds; None if there is none."""
    for index, row in enumerate(table):
        if wanted(row):
            return number, index, field, value(row)
    return None


def _number(name: str, phase: int = FORWARD) -> int:
    return [i for i, kind in enumerate(TABLES) if kind.__name__ == name][phase]


def _home(s: Slice) -> Callable[[Any], bool]:
    return lambda task: task.home == s.header.rank and task.home_row > 0


CHANGES: dict[str, tuple[Change, str]] = {
    "a task reads the row before": (
        lambda s: _first(s.tasks, _number("TaskEntry"), "home_row", lambda t: t.home_row - 1, _home(s)),
        r"task \d+: rows \[\d+, \d+\) of document \d are not at row",
    ),
    "a group has rows that see each other of another document": (
        lambda s: _first(
            s.groups, _number("GroupEntry"), "bidirectional_begin",
            lambda g: g.bidirectional_begin + (1 if g.bidirectional_begin == 0 else -1),
            lambda g: g.bidirectional_begin < g.bidirectional_end,
        ),
        r"bidirectional rows (from )?\d+",
    ),
    "rows see each other that no group has": (
        lambda s: _first(
            s.groups, _number("GroupEntry"), "bidirectional_end", lambda g: g.bidirectional_end - 1,
            lambda g: g.bidirectional_begin < g.bidirectional_end,
        ),
        r"bidirectional rows (from )?\d+",
    ),
    "rows that see each other overlap": (
        lambda s: _first(
            s.bidirectional, _number("Bidirectional"), "end", lambda b: b.end + 100, lambda b: b.begin == 3
        ),
        r"bidirectional rows \[100, 130\) after row 130",
    ),
    "rows that see each other end too early for a task": (
        lambda s: _first(
            s.bidirectional, _number("Bidirectional"), "end", lambda b: b.end - 1,
            lambda b: any(t.q_begin < t.q_end < t.kv_end == b.end for t in s.tasks),
        ),
        r"task \d+: rows \[\d+, \d+\) see keys",
    ),
    "a document begins with a row more": (
        lambda s: _first(
            s.shared, _number("Shared"), "end", lambda b: b.end + 1,
            lambda b: any(g.document == b.document and g.begin == b.at + b.end - b.begin for g in s.segments),
        ),
        r"segment of document \d: row \d+ is not its own",
    ),
    "a task computes a row that its document shares": (
        lambda s: _first(
            s.shared, _number("Shared"), "end", lambda b: b.end + 1,
            lambda b: all(g.document != b.document for g in s.segments)
            and any(s.groups[t.group].document == b.document and t.q_begin == b.at + b.end - b.begin for t in s.tasks),
        ),
        r"task \d+: row \d+ is not the document's own",
    ),
    "a document begins with rows of another one, which are here": (
        lambda s: _first(
            s.shared, _number("Shared"), "of", lambda b: 4,
            lambda b: b.of == 0 and s.header.rank == 0
            and any(g.document == b.document and g.kv_begin == 0 for g in s.groups),
        ),
        r"key block \d+ is not where its rows are|gradients of rows \[\d+, \d+\) of document",
    ),
    "a document begins with later rows of another one, which are here": (
        lambda s: _first(
            s.shared, _number("Shared"), "begin", lambda b: b.begin - 1,
            lambda b: b.begin > 0 and b.at > 0 and b == s.shared[-1],
        ),
        r"its own|the document's own|is not where its rows are|own keys are not all copied|gradients of rows",
    ),
    "a document begins with rows of its own": (
        lambda s: _first(s.shared, _number("Shared"), "of", lambda b: b.document, lambda b: True),
        r"document (\d) begins with rows \[\d+, \d+\) of document \1 at row",
    ),
    "rows that a document begins with do not follow one another": (
        lambda s: _first(s.shared, _number("Shared"), "at", lambda b: b.at + 1, lambda b: True),
        r"document \d begins with rows \[\d+, \d+\) of document \d at row \d+",
    ),
    "a document begins with rows twice": (
        lambda s: _first(
            s.shared, _number("Shared"), "of", lambda b: 0,
            lambda b: b.of == 1 and any(a.document == b.document and a.of == 0 and a.begin == 0 for a in s.shared),
        ),
        r"document \d begins with row \d+ of document 0 twice",
    ),
    "a document begins with rows that nobody has": (
        lambda s: _first(
            s.shared, _number("Shared"), "document", lambda b: 9, lambda b: b == s.shared[-1] and b.at == 0
        ),
        "it has rows that document 9 begins with, which it has nothing of",
    ),
    "a home is done with a sum in a later round": (
        lambda s: _first(
            s.receives[BACKWARD], _number("Receive", BACKWARD), "round", lambda r: 1, lambda r: r.action == FINISH
        ),
        "is done in round 1|round 1 of 1",
    ),
    "a home is done with a sum that lies elsewhere": (
        lambda s: _first(
            s.receives[BACKWARD], _number("Receive", BACKWARD), "sum", lambda r: r.sum + 64,
            lambda r: r.action == FINISH,
        ),
        "has no first term, or two|do not lie in the arena",
    ),
    "a home is done with a sum to which others contribute": (
        lambda s: _first(
            s.receives[BACKWARD], _number("Receive", BACKWARD), "action", lambda r: FINISH, lambda r: r.action == ADD
        ),
        "action 3 of rows of rank",
    ),
    "a home that alone contributes to a sum adds to it": (
        lambda s: _first(
            s.receives[BACKWARD], _number("Receive", BACKWARD), "action", lambda r: ADD, lambda r: r.action == FINISH
        ),
        "action 2 of rows of rank",
    ),
    "a group says another number of blocks in the arena than those with which it shares them": (
        lambda s: _first(
            s.groups, _number("GroupEntry"), "num_arena_rows", lambda g: g.num_arena_rows + 1,
            lambda g: g.forward_k >= 0 and sum(x.forward_k == g.forward_k for x in s.groups) > 1,
        ),
        "where those of other heads do|do not lie in the arena|key blocks in the arena|its arena blocks",
    ),
    "values of groups with the same keys lie elsewhere": (
        lambda s: _first(
            s.groups, _number("GroupEntry"), "forward_v", lambda g: g.forward_v - 64,
            lambda g: g.forward_v >= 64 and sum(x.forward_k == g.forward_k for x in s.groups) > 1,
        ),
        "where those of other heads do",
    ),
    "a shared block is another one of the arena": (
        lambda s: _first(
            s.blocks, _number("Block"), "entry", lambda b: b.entry + 128,
            lambda b: b.entry % 2 == 1 and sum(x.entry == b.entry for x in s.blocks) > 1,
        ),
        "key block|is two rows|in the arena",
    ),
    "a group adds gradients to those of another document": (
        lambda s: _first(
            s.grads, _number("Grad"), "dk", lambda g: next(x.dk for x in s.grads if x.target == PARTIAL),
            lambda g: g.target == ADDED and g.dk != next(x.dk for x in s.grads if x.target == PARTIAL),
        ),
        "are added to those of other rows|are written where others lie",
    ),
    "the first group of some that share gradients adds to them": (
        lambda s: _first(
            s.grads, _number("Grad"), "target", lambda g: ADDED,
            lambda g: g.target == PARTIAL and sum(x.dk == g.dk for x in s.grads) > 1,
        ),
        "are added to those of other rows",
    ),
    "the second group of some that share gradients writes them": (
        lambda s: _first(s.grads, _number("Grad"), "target", lambda g: PARTIAL, lambda g: g.target == ADDED),
        "are written where others lie",
    ),
    "shared gradients are sent home before all groups have added to them": (
        lambda s: _first(
            s.sends[BACKWARD], _number("Send", BACKWARD), "after", lambda g: g.after - 1,
            lambda g: g.after > 0 and any(x.target == ADDED and x.dk == g.source for x in s.grads),
        ),
        "are not all sent home|out of order",
    ),
    "a local block starts a row late": (
        lambda s: _first(s.blocks, _number("Block"), "entry", lambda b: b.entry + 2, lambda b: b.entry % 2 == 0),
        r"key block \d+ is not where its rows are|key block",
    ),
    "two blocks are one in the arena": (
        lambda s: _first(s.blocks, _number("Block"), "entry", lambda b: 1, lambda b: b.entry % 2 == 1 and b.entry > 1),
        "is two rows|own keys are not all copied|rows of keys in the arena",
    ),
    "a key gradient is returned to another row": (
        lambda s: _first(
            s.grads, _number("Grad"), "row", lambda g: g.row - 1, lambda g: g.target == RETURNED and g.row > 0
        ),
        r"gradients of rows \[\d+, \d+\) of document \d",
    ),
    "an output comes home to another row": (
        lambda s: _first(
            s.receives[FORWARD], _number("Receive"), "row", lambda r: r.row - 1,
            lambda r: TENSORS[r.tensor] == "out" and r.row > 0,
        ),
        "come home|sent",
    ),
    "a row comes from nowhere": (
        lambda s: _first(
            s.receives[BACKWARD], _number("Receive", BACKWARD), "num_rows", lambda r: r.num_rows - 1,
            lambda r: TENSORS[r.tensor] == "dk" and r.action == COPY and r.num_rows > 1,
        ),
        "returned tensor 8, key/value head [01]: row \\d+ comes from nowhere",
    ),
    "a row comes from two places": (
        lambda s: _first(
            s.receives[BACKWARD], _number("Receive", BACKWARD), "num_rows", lambda r: r.num_rows + 1,
            lambda r: TENSORS[r.tensor] == "dv" and r.action == COPY and r.row + r.num_rows < s.header.num_rows,
        ),
        "comes from two places|two things lie|do not lie in the arena",
    ),
    "padding belongs to a document": (
        lambda s: _first(s.segments, _number("Segment"), "document", lambda g: 7, lambda g: g.document < 0),
        "comes from nowhere",
    ),
    "queries leave from another row": (
        lambda s: _first(
            s.sends[FORWARD], _number("Send"), "row", lambda g: g.row + 1, lambda g: TENSORS[g.tensor] == "q"
        ),
        "queries that are sent are not those whose outputs come home|which are not of one segment|from row \\d+ on, of",
    ),
    "keys leave without their values": (
        lambda s: _first(
            s.sends[FORWARD], _number("Send"), "num_rows", lambda g: g.num_rows - 1,
            lambda g: TENSORS[g.tensor] == "k" and g.num_rows > 1 and g.peer != s.header.rank,
        ),
        "keys are not sent with their values",
    ),
    "an output is sent home from another place": (
        lambda s: _first(
            s.sends[FORWARD], _number("Send"), "source", lambda g: g.source + 64,
            lambda g: g.direction == OUT and TENSORS[g.tensor] == "out",
        ),
        "outputs that this rank computes for others are not all sent home|do not lie in the arena",
    ),
    "a sum has two first terms": (
        lambda s: _first(
            s.receives[BACKWARD], _number("Receive", BACKWARD), "action", lambda r: 1, lambda r: r.action == 2
        ),
        "start it twice|has no first term, or two|come home from their own rank",
    ),
    "a sum has no first term": (
        lambda s: _first(
            s.receives[BACKWARD], _number("Receive", BACKWARD), "action", lambda r: 2, lambda r: r.action == 1
        ),
        "has no first term",
    ),
    "a term in fp32 is one of the input dtype": (
        lambda s: _first(
            s.receives[BACKWARD], _number("Receive", BACKWARD), "tensor", lambda r: r.tensor - 2,
            lambda r: TENSORS[r.tensor] == "dk_partial" and [t.sum for t in s.receives[BACKWARD]].count(r.sum) > 1,
        ),
        r"tensor 8 is added|terms of one sum are of two dtypes|tensor 8 is done",
    ),
    "a term of the input dtype is one in fp32": (
        lambda s: _first(
            s.receives[BACKWARD], _number("Receive", BACKWARD), "tensor", lambda r: r.tensor + 2,
            lambda r: TENSORS[r.tensor] == "dk" and r.action != COPY,
        ),
        r"terms of one sum are of two dtypes|do not lie in the arena|two things lie at",
    ),
    "a query's gradient is added": (
        lambda s: _first(
            s.receives[BACKWARD], _number("Receive", BACKWARD), "action", lambda r: ADD,
            lambda r: TENSORS[r.tensor] == "dq",
        ),
        "tensor 7 is added",
    ),
    "a term of a sum is only copied": (
        lambda s: _first(
            s.receives[BACKWARD], _number("Receive", BACKWARD), "action", lambda r: COPY, lambda r: r.action == ADD
        ),
        "tensor 1[01] is only copied|rows that are only copied have a sum|come home from their own rank",
    ),
    "two extents overlap in the arena": (
        lambda s: _first(
            s.tasks, _number("TaskEntry"), "backward_q", lambda t: t.backward_dout, lambda t: t.backward_q >= 0
        ),
        "two things lie at offset",
    ),
    "a wait is missing": (
        lambda s: _first(
            s.waits[FORWARD], _number("Wait"), "peer", lambda w: 3 - s.header.rank - w.peer,
            lambda w: w.direction == OUT,
        ),
        "wait",
    ),
    "two messages go to one place of a peer": (
        lambda s: _first(
            s.sends[FORWARD][1:], _number("Send"), "target",
            lambda g: s.sends[FORWARD][0].target, lambda g: g.peer == s.sends[FORWARD][0].peer != s.header.rank,
        ),
        "two things are sent to offset|are not all copied",
    ),
    "retained keys overlap": (
        lambda s: _first(
            s.groups, _number("GroupEntry"), "retained_v", lambda g: g.retained_k, lambda g: g.retained_k >= 0
        ),
        "two things lie at offset",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_tables_that_do_not_fit_together_are_refused_with_what_does_not(change: str) -> None:
    make, said = CHANGES[change]
    changed = 0
    for plan in _plans():
        words = plan.tensor.tolist()
        tables = read_slice(words)
        place = make(tables)
        if place is None:
            continue
        number, index, field, value = place
        kind = TABLES[number]
        if change.startswith("two messages"):
            index += 1  # the index was counted without the first row
        begin = words[len(tables.header) + 2 * number]
        words[begin + index * len(kind._fields) + kind._fields.index(field)] = value
        with pytest.raises(distca.PlanFormatError) as caught:
            _C.validate_plan(torch.tensor(with_digests(words)).numpy())
        assert re.search(said, str(caught.value)), caught.value
        changed += 1
    assert changed > 0


@pytest.mark.parametrize("field", ["forward_arena_bytes", "backward_arena_bytes", "retained_bytes", "num_rounds"])
def test_a_header_asks_for_no_more_than_the_tables_use(field: str) -> None:
    for plan in _plans():
        words = plan.tensor.tolist()
        index = type(read_slice(words).header)._fields.index(field)
        words[index] += 1 if field == "num_rounds" else -64 if words[index] else 0
        if words == plan.tensor.tolist():
            continue
        with pytest.raises(distca.PlanFormatError):
            _C.validate_plan(torch.tensor(with_digests(words)).numpy())


def test_a_slice_whose_tables_are_not_those_of_its_plan_is_refused() -> None:
    """This is what the slice of another plan would be under this plan's digest."""
    one, other = (distca.plan(LAYOUT, HEADS, balance=balance) for balance in (True, False))
    words, theirs = one.tensor.tolist(), other.tensor.tolist()
    begin, count = words[len(read_slice(words).header) :][:2]
    words[begin : begin + count] = theirs[begin : begin + count]
    with pytest.raises(distca.PlanFormatError, match="its tables are not those of rank 0 of the plan"):
        _C.validate_plan(torch.tensor(with_checksum(words)).numpy())
