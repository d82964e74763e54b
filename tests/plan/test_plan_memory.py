"""The memory that a plan needs: rounds in which gradients come home, and the capacity of a slot."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

import distca
from support.batches import examples, spill
from support.plan_reader import TENSORS, heads_of, row_bytes
from support.random_plans import COSTS, HEADS, RATED, layouts
from support.step_simulation import Simulation


def test_gradients_of_many_servers_come_home_in_rounds_that_share_one_buffer() -> None:
    """The first rows of a long document get gradients from every server. Their messages do not fit into home-in at
    once.
    """
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
    # Up to the alignment of each extent, home-in is exactly as large as the largest message.
    extents = len(home.receives[1])
    assert max(messages.values()) <= plan.stats.arena_bytes["backward"][0].home_in
    assert plan.stats.arena_bytes["backward"][0].home_in <= max(messages.values()) + 64 * extents
    assert sum(messages.values()) > 2 * max(messages.values())


def rounds_of(plan: distca.Plan) -> int:
    simulation = Simulation(plan)
    simulation.run()  # the run asserts that no two messages of a round share memory
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
    """A rank's arena may be as large as that of the neediest rank, so here two messages come home at once instead of
    one.
    """
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
        told = _enough(error)
        assert capacity < told <= wanted and make(told).stats.slot_bytes <= told
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
        # Ranks that exchange rows of a document for heads may need less than rows at home.
        with pytest.raises(distca.CapacityError, match="capacity is 1 bytes") as refused:
            make(1)
        least = _enough(refused.value)
        assert 1 < least <= at_home
        assert make(least).stats.slot_bytes <= least


def _enough(error: distca.CapacityError) -> int:
    """The bytes of a slot that would be enough, as the error says."""
    return int(re.findall(r"arena of (\d+) bytes", str(error))[0])


def _neediest(plan: distca.Plan) -> int:
    arenas = plan.stats.arena_bytes
    return max(range(plan.layout.num_ranks), key=lambda r: max(arenas[phase][r].total for phase in arenas))
