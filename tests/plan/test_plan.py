"""The planner: every row computed once, every row where it is needed, loads balanced, statistics true."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distca
from support.batches import LENGTHS, examples, random_tasks, scattered, spill
from support.plan_reader import TENSORS, Simulation, heads_of, keys_of_rows, read_slice, row_bytes

HEADS = [
    distca.Heads(4, 1, 16, 24),
    distca.Heads(2, 2, 24, 8, torch.bfloat16),
    distca.Heads(3, 3, 8, dtype=torch.float16),
]
MASKS = (("causal", None), ("causal", 1), ("causal", 50), ("causal", 64), ("causal", 150), ("full", None))
COSTS = (distca.CostModel(), distca.CostModel(3, 40), distca.CostModel(0, 1))
# Small tasks twice as dear by the pair; dearer and cheaper from size to size, as no device is.
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
    lengths = draw(st.lists(st.sampled_from((1, 2, 5, 31, 63, 64, 65, 127, 129, 200, 331)), max_size=7))
    ranks = draw(st.integers(1, 6))
    kind = draw(st.sampled_from(("packed", "documents", "scattered", "head_tail")))
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
    )
    return Made(plan, cost, servers or set(range(layout.num_ranks)), ranks_per_node)


def _rows_cost(cost: distca.CostModel, begin: int, end: int) -> int:
    """Row i of a causal document sees keys 0 .. i."""
    return sum(cost.per_pair * (row + 1) + cost.per_row for row in range(begin, end))


def _rate(cost: distca.CostModel, num_rows: int, num_keys: int) -> int:
    """In 1024ths, on straight lines between powers of two in steps of 1024ths; the last one beyond."""
    if not cost.rates:
        return 1024

    def between(line: Callable[[int], int], n: int, count: int) -> int:
        octave = min(n.bit_length() - 1, count - 1)
        if octave == count - 1:
            return line(octave)
        rise = (line(octave + 1) - line(octave)) * (n * 1024 // 2**octave - 1024)
        return line(octave) + (abs(rise) // 1024 if rise > 0 else -(abs(rise) // 1024))

    lines = cost.rates
    return between(lambda i: between(lambda j: lines[i][j], num_keys, len(lines[0])), num_rows, len(lines))


def _cost(plan: distca.Plan, cost: distca.CostModel, document: int, begin: int, end: int) -> int:
    length, pairs = plan.layout.document_lengths[document], 0
    for row in range(begin, end):
        first, last = keys_of_rows(plan, length, row, row + 1)
        pairs += last - first
    first, last = keys_of_rows(plan, length, begin, end)
    return -(-cost.per_pair * pairs * _rate(cost, end - begin, last - first) // 1024) + cost.per_row * (end - begin)


def _loads_at_home(plan: distca.Plan, cost: distca.CostModel) -> list[int]:
    loads = []
    for rank in range(plan.layout.num_ranks):
        tasks: list[tuple[int, int, int]] = []
        for d, begin, end in plan.layout.segments(rank):
            if tasks and tasks[-1][0] == d and tasks[-1][2] == begin:  # one follows the other: one task
                begin = tasks.pop()[1]
            tasks.append((d, begin, end))
        loads.append(plan.heads.q * sum(_cost(plan, cost, *task) for task in tasks if task[0] >= 0))
    return loads


@examples(400)
@given(plans())
def test_every_visible_pair_of_every_head_is_computed_exactly_once(made: Made) -> None:
    plan = made.plan
    computed: Counter[tuple[int, int, int]] = Counter()
    homes = {
        (document, row): rank
        for rank in range(plan.layout.num_ranks)
        for document, begin, end in plan.layout.segments(rank)
        for row in range(begin, end)
    }
    for task in plan.tasks:
        assert task.q_begin < task.q_end
        length = plan.layout.document_lengths[task.document]
        assert (task.kv_begin, task.kv_end) == keys_of_rows(plan, length, task.q_begin, task.q_end)
        assert 0 <= task.server < plan.layout.num_ranks
        for row in range(task.q_begin, task.q_end):
            computed.update((task.document, row, head) for head in range(task.kv_head_begin, task.kv_head_end))
            assert homes[(task.document, row)] == task.home
    lengths = plan.layout.document_lengths
    heads = range(plan.heads.kv)
    assert computed == Counter(
        (d, row, head) for d, length in enumerate(lengths) for row in range(length) for head in heads
    )
    of_slices = [
        (group.document, *t[1:5], *heads_of(group), t.home, rank)
        for rank in range(plan.layout.num_ranks)
        for tables in [read_slice(plan.for_rank(rank).tensor.tolist())]
        for t in tables.tasks
        for group in [tables.groups[t.group]]
    ]
    assert sorted(of_slices) == sorted(tuple(task) for task in plan.tasks)


@examples(400)
@given(plans())
def test_every_row_is_where_its_task_looks_for_it_and_every_result_comes_home_once(
    made: Made,
) -> None:
    plan = made.plan
    simulation = Simulation(plan)
    simulation.run()
    stats = plan.stats
    assert list(stats.bytes.values()) == simulation.bytes
    assert list(stats.bytes) == ["forward_in", "forward_out", "backward_in", "backward_out"]
    listed = Counter(
        (list(stats.bytes).index(t.message), t.source, t.target, t.tensor, t.document, row, head)
        for t in plan.transfers
        for row in range(t.begin, t.end)
        for head in range(t.kv_head_begin, t.kv_head_end)
    )
    assert listed == simulation.moved
    assert {name: sum(t.bytes for t in plan.transfers if t.message == name) for name in stats.bytes} == stats.bytes
    node = made.ranks_per_node or plan.layout.num_ranks
    far = [t for t in plan.transfers if t.source // node != t.target // node]
    assert stats.bytes_between_nodes == {name: sum(t.bytes for t in far if t.message == name) for name in stats.bytes}
    for phase, name in enumerate(("forward", "backward")):
        ends, sizes = simulation.arena_ends[phase], [arena.total for arena in stats.arena_bytes[name]]
        headers = [tables.header for tables in simulation.slices]
        assert sizes == [(h.forward_arena_bytes, h.backward_arena_bytes)[phase] for h in headers]
        # What is paid for is used, up to the alignment of the last extent and the rest of a last key block.
        assert all(end <= size for end, size in zip(ends, sizes, strict=True))
        assert all((end == 0) == (size == 0) for end, size in zip(ends, sizes, strict=True))
        assert all(h.slot_bytes == stats.slot_bytes for h in headers)
    assert stats.slot_bytes == max(arena.total for arenas in stats.arena_bytes.values() for arena in arenas)


@examples(400)
@given(plans())
def test_loads_are_what_the_tasks_cost(made: Made) -> None:
    plan, cost, servers, _ = made
    stats, ranks = plan.stats, plan.layout.num_ranks
    load = [0] * ranks
    for task in plan.tasks:
        heads = (task.kv_head_end - task.kv_head_begin) * plan.heads.q // plan.heads.kv
        load[task.server] += heads * _cost(plan, cost, task.document, task.q_begin, task.q_end)
    assert stats.load == load
    assert stats.load_before == _loads_at_home(plan, cost)
    total = sum(load)
    assert {task.server for task in plan.tasks} <= servers
    assert stats.num_servers == len(servers)
    assert stats.imbalance_before == pytest.approx(
        max(stats.load_before) * ranks / (sum(stats.load_before) or 1) if total else 1.0
    )
    assert stats.imbalance_after == pytest.approx(max(load) * len(servers) / total if total else 1.0)
    assert max(load) >= stats.lower_bound
    if cost.rates:
        return
    # The heads of a row may be apart, but those that share a key/value head may not: no plan does better than the
    # costliest of these, or than the mean rounded up to whole pairs of them.
    last_rows = [_cost(plan, cost, d, length - 1, length) for d, length in enumerate(plan.layout.document_lengths)]
    shared = plan.heads.q // plan.heads.kv
    mean = -(-(total // shared) // len(servers))
    assert stats.lower_bound == shared * max([mean, *last_rows])


@examples(300)
@given(
    layouts(),
    st.sampled_from((0.0, 0.01, 0.05, 0.3)),
    st.sampled_from((1, 10, 64, 500)),
    st.sampled_from(COSTS),
)
def test_the_largest_load_is_within_tolerance_or_no_end_row_of_a_task_can_move_with_gain(
    layout: distca.Layout, tolerance: float, min_rows: int, cost: distca.CostModel
) -> None:
    plan = distca.plan(layout, HEADS[0], tolerance=tolerance, min_rows=min_rows, cost=cost)
    load = [n // plan.heads.q for n in plan.stats.load]
    total, ranks = sum(load), layout.num_ranks
    largest = max(load)
    assert largest <= max(n // plan.heads.q for n in plan.stats.load_before)
    if largest * ranks * 1000 <= total * (1000 + round(1000 * tolerance)) or largest == -(-total // ranks):
        return
    heaviest = load.index(largest)
    for task in plan.tasks:
        if task.server != heaviest:
            continue
        for row in (task.q_begin, task.q_end - 1):
            moved = _rows_cost(cost, row, row + 1)
            for server in range(ranks):
                if load[server] * ranks < total - ranks:  # below the mean by more than its rounding
                    assert load[server] + moved >= largest, f"row {row} of {task} could go to rank {server}: {load}"


@pytest.mark.parametrize("ranks", [2, 8, 32])
@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("whole_documents", [True, False])
def test_heavy_tailed_documents_are_balanced_to_the_tolerance(
    ranks: int, tolerance: float, whole_documents: bool
) -> None:
    rng = random.Random(ranks)
    lengths = sorted((max(1, int(rng.lognormvariate(5.0, 1.5))) for _ in range(12 * ranks)), reverse=True)
    of_ranks = [lengths[12 * rank : 12 * (rank + 1)] for rank in range(ranks)]
    layout = distca.Layout.from_documents(of_ranks) if whole_documents else spill(lengths, ranks)
    plan = distca.plan(layout, HEADS[0], tolerance=tolerance)
    load = [0] * ranks
    for task in plan.tasks:
        load[task.server] += _rows_cost(distca.CostModel(), task.q_begin, task.q_end)
    mean = sum(load) / ranks
    assert max(plan.stats.load_before) > 1.5 * mean * plan.heads.q, "this layout needs no planner"
    # With no tolerance at all, single rows are the grain.
    assert max(load) <= (1 + tolerance) * mean + (max(lengths) if tolerance == 0.0 else 0)


def test_gradients_of_many_servers_come_home_in_rounds_that_share_one_buffer() -> None:
    """The first rows of a long document get gradients from every server: more than one message at a time would hold."""
    plan = distca.plan(spill((3000,), 8), HEADS[0], tolerance=0.0, min_rows=1)
    simulation = Simulation(plan)
    simulation.run()
    home = simulation.slices[0]
    assert home.header.num_rounds > 1
    messages: Counter[int] = Counter()
    for receive in home.receives[1]:
        messages[receive.peer] += (
            receive.num_rows * row_bytes(plan.heads, heads_of(receive), 1, False, TENSORS[receive.tensor])[1]
        )
    # Within the alignment of each extent, home-in is as large as the largest message and no larger.
    extents = len(home.receives[1])
    assert max(messages.values()) <= plan.stats.arena_bytes["backward"][0].home_in
    assert plan.stats.arena_bytes["backward"][0].home_in <= max(messages.values()) + 64 * extents
    assert sum(messages.values()) > 2 * max(messages.values())


def rounds_of(plan: distca.Plan) -> int:
    simulation = Simulation(plan)
    simulation.run()  # which asserts that no two messages of a round share memory
    return max(one.header.num_rounds for one in simulation.slices)


def test_for_overlap_gradients_come_home_at_once_where_the_capacity_allows() -> None:
    make = partial(distca.plan, spill((3000,), 8), HEADS[0], tolerance=0.0, min_rows=1)
    in_rounds, at_once = make(), make(overlap=True)
    assert rounds_of(in_rounds) > 2 and rounds_of(at_once) == 1
    assert at_once.tasks == in_rounds.tasks and at_once.digest != in_rounds.digest
    assert at_once.stats.bytes == in_rounds.stats.bytes
    least, most = in_rounds.stats.slot_bytes, at_once.stats.slot_bytes
    assert least < most
    tight, half_way = make(overlap=True, capacity=least), make(overlap=True, capacity=(least + most) // 2)
    assert tight.stats.slot_bytes == least and rounds_of(tight) == rounds_of(in_rounds)
    assert tight.digest == in_rounds.digest
    assert least < half_way.stats.slot_bytes <= (least + most) // 2
    assert 1 < rounds_of(half_way) < rounds_of(in_rounds)
    assert make(overlap=True, capacity=most).digest == at_once.digest


def test_rounds_use_the_memory_that_another_rank_needs_anyway() -> None:
    """A rank's arena may be as large as the neediest one's; so two messages come home at once here, and not one."""
    layout = distca.Layout.from_documents([[2500], [6000], *([[2]] * 6)])
    plan = distca.plan(layout, HEADS[0], tolerance=0.0, min_rows=1)
    simulation = Simulation(plan)
    simulation.run()
    arenas = plan.stats.arena_bytes["backward"]
    messages: Counter[int] = Counter()
    for receive in simulation.slices[0].receives[1]:
        messages[receive.peer] += (
            receive.num_rows * row_bytes(plan.heads, heads_of(receive), 1, False, TENSORS[receive.tensor])[1]
        )
    largest, extents = max(messages.values()), len(simulation.slices[0].receives[1])
    assert largest + 64 * extents < arenas[0].home_in and arenas[0].total <= plan.stats.slot_bytes


def test_balance_off_leaves_every_row_at_home() -> None:
    for layout in (spill(LENGTHS, 3), scattered(LENGTHS, 5, 1)):
        plan = distca.plan(layout, HEADS[0], balance=False)
        assert all(task.server == task.home for task in plan.tasks)
        assert plan.stats.load == plan.stats.load_before
        assert plan.stats.imbalance_after == plan.stats.imbalance_before > 1.0


def test_a_balanced_layout_of_whole_documents_moves_nothing() -> None:
    plan = distca.plan(distca.Layout.from_documents([[100, 20], [20, 100]]), HEADS[0])
    assert sum(plan.stats.bytes.values()) == 0
    assert plan.stats.slot_bytes == 0
    assert [(t.document, t.q_begin, t.q_end, t.home, t.server) for t in plan.tasks] == [
        (0, 0, 100, 0, 0), (1, 0, 20, 0, 0), (2, 0, 20, 1, 1), (3, 0, 100, 1, 1)
    ]  # fmt: skip


def test_no_piece_is_cut_smaller_than_min_rows_where_the_tolerance_allows() -> None:
    layout = distca.Layout.from_documents([[4096], [300], [300], []])
    for min_rows in (1, 64, 200):
        plan = distca.plan(layout, HEADS[0], tolerance=0.1, min_rows=min_rows)
        assert plan.stats.imbalance_after <= 1.1
        assert min(task.q_end - task.q_begin for task in plan.tasks) >= min_rows


def test_statistics_of_a_plan_that_can_be_counted_by_hand() -> None:
    """Documents of 3 and 1 rows; rank 1 fetches rows 0 and 1 as keys for row 2, which it holds."""
    heads = distca.Heads(2, 1, 8, 16)
    plan = distca.plan(distca.Layout([[(0, 0, 2)], [(0, 2, 3), (1, 0, 1)]]), heads, balance=False)
    stats = plan.stats
    assert stats.load_before == stats.load == [2 * (1 + 2), 2 * (3 + 1)]
    assert stats.imbalance_after == pytest.approx(8 / 7)
    assert stats.lower_bound == 2 * 4
    keys = 2 * 1 * (8 + 16) * 4
    # Both ranks add to dk, dv of rows 0 and 1, so they come home in fp32.
    assert stats.bytes == {"forward_in": keys, "forward_out": 0, "backward_in": keys, "backward_out": keys}


@examples(300)
@given(
    layouts(),
    st.sampled_from(HEADS),
    st.sampled_from((0.0, 0.05)),
    st.sampled_from((1, 64)),
    st.floats(0, 1),
    st.sampled_from((*COSTS[:2], RATED[0])),
    st.booleans(),
)
def test_capacity_is_never_passed_and_what_fits_is_planned(
    layout: distca.Layout,
    heads: distca.Heads,
    tolerance: float,
    min_rows: int,
    fraction: float,
    cost: distca.CostModel,
    some_serve: bool,
) -> None:
    servers = list(range(0, layout.num_ranks, 2)) if some_serve else None

    def make(capacity: int) -> distca.Plan:
        return distca.plan(
            layout, heads, tolerance=tolerance, min_rows=min_rows, capacity=capacity, cost=cost, servers=servers
        )

    free = make(2**62)
    wanted = free.stats.wanted_slot_bytes
    assert wanted == free.stats.slot_bytes
    assert make(max(1, wanted)).digest == free.digest
    at_home = 0
    if servers is None:
        at_home = min(wanted, distca.plan(layout, heads, balance=False, cost=cost).stats.slot_bytes)
    capacity = max(1, at_home + round(fraction * max(0, wanted - 1 - at_home)))
    if capacity >= wanted:
        return
    try:
        plan = make(capacity)
    except distca.CapacityError as error:
        assert some_serve, "what needs no more than rows at home can be planned"
        assert f"{wanted} bytes a slot, but the capacity is {capacity} bytes" in str(error)
        return
    stats = plan.stats
    assert stats.slot_bytes <= capacity
    assert stats.wanted_slot_bytes == wanted
    assert stats.binding in (None, f"capacity of rank {_neediest(free)}")
    if stats.binding is not None and tolerance > 0:
        assert stats.imbalance_after > 1 + tolerance
    if servers is None:
        assert max(stats.load) <= max(stats.load_before)
    Simulation(plan).run()
    if at_home > 1:
        with pytest.raises(distca.CapacityError, match=rf"\b{at_home} bytes.*capacity is {at_home - 1} bytes"):
            make(at_home - 1)


def _neediest(plan: distca.Plan) -> int:
    arenas = plan.stats.arena_bytes
    return max(range(plan.layout.num_ranks), key=lambda r: max(arenas[phase][r].total for phase in arenas))


@examples(100)
@given(layouts(), st.sampled_from(HEADS), st.sampled_from((0.0, 0.05)), st.sampled_from((1, 64)))
def test_the_same_arguments_give_the_same_plan_to_the_last_bit(
    layout: distca.Layout, heads: distca.Heads, tolerance: float, min_rows: int
) -> None:
    again = distca.Layout([layout.segments(rank) for rank in range(layout.num_ranks)])
    first = distca.plan(layout, heads, tolerance=tolerance, min_rows=min_rows)
    second = distca.plan(again, heads, tolerance=tolerance, min_rows=min_rows, rank=layout.num_ranks - 1)
    assert first.digest == second.digest
    assert first.tasks == second.tasks
    for rank in range(layout.num_ranks):
        assert torch.equal(first.for_rank(rank).tensor, second.for_rank(rank).tensor)


def test_the_digest_changes_with_everything_that_changes_a_plan() -> None:
    def make(**changes: object) -> distca.Plan:
        arguments: dict[str, object] = {"layout": layout, "heads": heads, "tolerance": 0.05, "min_rows": 1}
        return distca.plan(**(arguments | changes))  # type: ignore[arg-type]

    layout, heads = spill((300, 5, 200), 3), distca.Heads(4, 2, 16)
    padded = distca.Layout([*(layout.segments(rank) for rank in (0, 1)), [*layout.segments(2), (distca.PADDING, 0, 1)]])
    variants = {
        "as it is": make(),
        "tolerance": make(tolerance=0.2),
        "min_rows": make(min_rows=50),
        "balance": make(balance=False),
        "cost per pair": make(cost=distca.CostModel(2, 0)),
        "cost per row": make(cost=distca.CostModel(1, 1)),
        "query heads": make(heads=distca.Heads(6, 2, 16)),
        "key heads": make(heads=distca.Heads(4, 1, 16)),
        "dim": make(heads=distca.Heads(4, 2, 24, 16)),
        "v_dim": make(heads=distca.Heads(4, 2, 16, 24)),
        "dtype": make(heads=distca.Heads(4, 2, 16, None, torch.bfloat16)),
        "another dtype": make(heads=distca.Heads(4, 2, 16, None, torch.float16)),
        "mask": make(mask="full"),
        "window": make(window=100),
        "servers": make(servers=[0, 2]),
        "tasks": make(tasks=[(0, 0, 300, 0, 2, 0), (1, 0, 5, 0, 2, 1), (2, 0, 200, 0, 2, 2)]),
        "heads of tasks": make(
            tasks=[(0, 0, 300, 0, 2, 0), (1, 0, 5, 0, 2, 1), (2, 0, 200, 0, 1, 2), (2, 0, 200, 1, 2, 2)]
        ),
        "lengths": make(layout=spill((300, 6, 199), 3)),
        "a cut": make(layout=distca.Layout.packed((300, 5, 200), ranks=3, tokens_per_rank=170)),
        "padding": make(layout=padded),
        "ranks": make(layout=spill((300, 5, 200), 2)),
    }
    assert variants["tolerance"].tasks != variants["as it is"].tasks
    digests: dict[str, str] = {}
    for name, plan in variants.items():
        assert plan.digest not in digests, f"{name!r} and {digests[plan.digest]!r} have one digest"
        digests[plan.digest] = name
    assert make(tolerance=0.05).digest == variants["as it is"].digest


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([(0, 0, 300, 0, 2, 0), (1, 0, 5, 0, 2, 3)], "tasks[1] is on rank 3, which does not serve"),
        ([(0, 0, 301, 0, 2, 0), (1, 0, 5, 0, 2, 0)], "tasks[0] has rows [0, 301) of document 0, which has 300"),
        ([(0, 0, 300, 0, 3, 0), (1, 0, 5, 0, 2, 0)], "tasks[0] has key/value heads [0, 3) of 2"),
        ([(0, 5, 5, 0, 2, 0)], "tasks[0] has rows [5, 5)"),
        ([(2, 0, 5, 0, 2, 0)], "tasks[0] is of document 2; 0 to 1"),
        ([(0, 0, 300, 0, 2, 0)], "row 0 of document 1, key/value head 0, exactly once"),
        ([(0, 0, 300, 0, 2, 0), (1, 0, 4, 0, 2, 0)], "row 4 of document 1, key/value head 0, exactly once"),
        ([(0, 0, 300, 0, 2, 0), (1, 0, 5, 0, 1, 0)], "row 0 of document 1, key/value head 1, exactly once"),
        (
            [(0, 0, 300, 0, 1, 0), (0, 0, 300, 0, 2, 0), (1, 0, 5, 0, 2, 0)],
            "row 0 of document 0, key/value head 0, exactly once",
        ),
        ([], "row 0 of document 0, key/value head 0, exactly once"),
    ],
    ids=str,
)
def test_a_schedule_that_does_not_compute_every_row_and_head_once_is_refused(
    tasks: list[tuple[int, int, int, int, int, int]], said: str
) -> None:
    with pytest.raises(distca.InvalidArgumentError) as caught:
        distca.plan(spill((300, 5), 3), distca.Heads(4, 2, 16), tasks=tasks)
    assert said in str(caught.value)


def test_a_head_range_moves_its_own_bytes_and_no_more() -> None:
    """One of two key/value heads of a document is computed by the other rank."""
    heads = distca.Heads(4, 2, 8, 16)
    plan = distca.plan(distca.Layout([[(0, 0, 10)], []]), heads, tasks=[(0, 0, 10, 0, 1, 0), (0, 0, 10, 1, 2, 1)])
    q, k, v, out, lse = 2 * 8 * 4, 8 * 4, 16 * 4, 2 * 16 * 4, 2 * 4
    assert plan.stats.load == [2 * 55, 2 * 55]
    assert plan.stats.bytes == {
        "forward_in": 10 * (q + k + v),
        "forward_out": 10 * (out + lse),
        "backward_in": 10 * (q + k + v + out + 2 * lse),
        # One server contributes to each head's keys, so they come home in the input's dtype.
        "backward_out": 10 * (q + k + v),
    }


def test_an_empty_layout_has_a_plan_that_does_nothing() -> None:
    plan = distca.plan(distca.Layout([[], [(-1, 0, 3)], []]), HEADS[0])
    assert plan.tasks == []
    assert plan.stats.load == plan.stats.load_before == [0, 0, 0]
    assert plan.stats.imbalance_before == plan.stats.imbalance_after == 1.0
    Simulation(plan).run()


def test_a_plan_is_the_slice_of_the_rank_that_was_asked_for() -> None:
    layout = spill((300, 5), 3)
    plan = distca.plan(layout, HEADS[0], rank=2)
    assert plan.rank == 2
    assert read_slice(plan.tensor.tolist()).header.rank == 2
    assert read_slice(plan.for_rank(1).tensor.tolist()).header.rank == 1
    assert plan.tensor.dtype == torch.int64
    assert plan.num_rows == layout.num_rows(2)
    assert distca.plan(layout, HEADS[0]).rank == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tolerance": -0.01}, "tolerance = -0.01; 0 to 1"),
        ({"tolerance": 1.5}, "tolerance = 1.5; 0 to 1"),
        ({"tolerance": float("nan")}, "tolerance = nan; 0 to 1"),
        ({"mask": "diagonal"}, "mask = 'diagonal'; 'causal', 'full'"),
        ({"window": 0}, "window = 0"),
        ({"window": 5, "mask": "full"}, "window = 5"),
        ({"servers": []}, "servers is empty"),
        ({"servers": [3]}, "servers = [3]; ranks from 0 to 2"),
        ({"servers": [0], "balance": False}, "without balance"),
        ({"ranks_per_node": 0}, "ranks_per_node = 0; None or a positive"),
        ({"min_rows": 0}, "min_rows = 0"),
        ({"min_rows": -5}, "min_rows = -5"),
        ({"capacity": 0}, "capacity = 0"),
        ({"capacity": -1}, "capacity = -1"),
        ({"rank": 3}, "rank = 3; 0 to 2"),
        ({"rank": -1}, "rank = -1; 0 to 2"),
        ({"cost": distca.CostModel(-1, 0)}, "per_pair = -1"),
        ({"cost": distca.CostModel(0, -1)}, "per_row = -1"),
        ({"cost": distca.CostModel(0, 0)}, "not both 0"),
        ({"cost": distca.CostModel(float("nan"))}, "per_pair is nan; integers up to 1048576"),  # type: ignore[arg-type]
        ({"cost": distca.CostModel(1, 2**70)}, f"per_row is {2**70}"),
        ({"cost": distca.CostModel(rates=((float("nan"),),))}, "a rate is nan"),  # type: ignore[arg-type]
        ({"cost": distca.CostModel(2**20 + 1, 0)}, str(2**20 + 1)),
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused_with_the_value_and_what_is_allowed(
    changes: dict[str, object], said: str
) -> None:
    arguments: dict[str, object] = {"layout": spill((300, 5), 3), "heads": HEADS[0]} | changes
    with pytest.raises(distca.InvalidArgumentError) as caught:
        distca.plan(**arguments)  # type: ignore[arg-type]
    assert said in str(caught.value)


def test_a_dtype_that_no_kernel_has_is_refused() -> None:
    with pytest.raises(
        distca.InvalidArgumentError, match=r"torch\.float64; torch\.float32, torch\.bfloat16, torch\.flo"
    ):
        distca.Heads(4, 2, 16, dtype=torch.float64)


def test_a_layout_whose_cost_would_overflow_is_refused() -> None:
    layout = distca.Layout.from_documents([[2**31]])
    with pytest.raises(distca.InvalidArgumentError, match="cost"):
        distca.plan(layout, HEADS[0], cost=distca.CostModel(2**20, 0))


def test_dedicated_servers_get_equal_loads_and_the_others_nothing() -> None:
    lengths = (4096, 300, 300, 1, 77)
    for layout in (distca.Layout.from_documents([lengths, [], []]), spill(lengths, 3)):
        plan = distca.plan(layout, HEADS[0], servers=[1, 2], tolerance=0.02)
        assert plan.stats.load[0] == 0
        assert max(plan.stats.load) <= 1.02 * sum(plan.stats.load) / 2


@examples(200)
@given(plans())
def test_a_rank_sends_to_the_rank_after_it_first_so_that_not_all_send_to_one(made: Made) -> None:
    ranks = made.plan.layout.num_ranks
    for rank in range(ranks):
        tables = read_slice(made.plan.for_rank(rank).tensor.tolist())
        for sends in tables.sends:
            turns = [(send.direction, send.round, (send.peer - rank) % ranks) for send in sends]
            assert turns == sorted(turns)


def test_where_every_rank_sends_to_all_no_two_begin_with_the_same() -> None:
    plan = distca.plan(distca.Layout.head_tail([8192], ranks=8), HEADS[0], balance=False)
    sends = [read_slice(plan.for_rank(rank).tensor.tolist()).sends[0] for rank in range(8)]
    peers = [list(dict.fromkeys(send.peer for send in of if send.peer != rank)) for rank, of in enumerate(sends)]
    assert all(len(of_rank) == 7 for of_rank in peers)
    for turn in range(7):
        assert len({of_rank[turn] for of_rank in peers}) == 8


def test_a_window_moves_only_the_keys_that_it_sees() -> None:
    """Of 1024 rows the last 256 are on rank 1; without balance it fetches the window of its first row and no more."""
    heads = distca.Heads(2, 1, 8)
    layout = distca.Layout([[(0, 0, 768)], [(0, 768, 1024)]])
    for window, fetched in ((1, 0), (2, 1), (100, 99), (None, 768)):
        plan = distca.plan(layout, heads, window=window, balance=False)
        assert plan.stats.bytes["forward_in"] == fetched * (8 + 8) * 4
