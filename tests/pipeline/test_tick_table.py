"""Tick tables: legal, as short as can be, and with as much in flight as they say."""

from __future__ import annotations

import itertools

import pytest

import distca
from distca.pipeline import TickTable, Work, tick_table

TABLES = [
    (stages, microbatches, chunks)
    for stages in range(1, 9)
    for microbatches in range(1, 33)
    for chunks in range(1, 5)
    if chunks == 1 or microbatches % stages == 0
]


def _most_in_flight(table: TickTable) -> list[int]:
    """Goes through the ticks and checks that each work has what it needs. Counts activations on the way."""
    last = table.stages * table.chunks - 1
    done: dict[tuple[str, int, int], int] = {}  # by phase, micro-batch and position in the model
    held, most = [0] * table.stages, [0] * table.stages
    for number, tick in enumerate(table):
        for stage, work in enumerate(tick.work):
            if work is None:
                continue
            microbatch, position = work.microbatch, work.chunk * table.stages + stage
            assert (tick.phase, microbatch, position) not in done
            if tick.phase == "forward":
                assert position == 0 or done["forward", microbatch, position - 1] < number
                held[stage] += 1
            else:
                assert done["forward", microbatch, position] < number
                assert position == last or done["backward", microbatch, position + 1] < number
                held[stage] -= 1
            done[tick.phase, microbatch, position] = number
            most[stage] = max(most[stage], held[stage])
    assert len(done) == 2 * table.microbatches * (last + 1) and not any(held)
    return most


@pytest.mark.parametrize("stages", range(1, 9))
def test_every_table_is_legal_short_and_holds_what_it_says(stages: int) -> None:
    of_stages = [case for case in TABLES if case[0] == stages]
    assert len(of_stages) > 40
    for p, m, v in of_stages:
        table = tick_table(p, m, chunks=v)
        assert len(table) == 2 * (m * v + p - 1)
        bound = [min(m * v, (v + 1) * p - 1 - 2 * s) for s in range(p)]
        assert _most_in_flight(table) == bound == [table.in_flight(s) for s in range(p)]


def test_interleaved_tables_hold_as_much_as_interleaved_1f1b() -> None:
    """Megatron's schedule runs ``2 (p - s - 1) + (v - 1) p`` chunks to warm up, and holds one more."""
    for p, m, v in TABLES:
        table = tick_table(p, m, chunks=v)
        for s in range(p):
            expected = min(m, p - s) if v == 1 else min(m * v, 2 * (p - s - 1) + (v - 1) * p + 1)
            assert table.in_flight_of_1f1b(s) == expected


#: Fewest ticks at 1, 2, ... micro-batches in flight, for stages and micro-batches; found by another search.
FEWEST = {
    (2, 16): [64, 48, 34],
    (3, 12): [72, 48, 38, 32, 28],
    (4, 8): [64, 40, 32, 28, 24, 23, 22],
    (4, 16): [128, 80, 64, 53, 46, 42, 38],
}


@pytest.mark.parametrize(("stages", "microbatches"), FEWEST)
def test_less_in_flight_takes_as_many_ticks_as_it_must(stages: int, microbatches: int) -> None:
    """The last limit is what the shortest table holds anyway."""
    tables = [tick_table(stages, microbatches, in_flight=limit) for limit in range(1, 2 * stages)]
    assert [len(table) for table in tables] == FEWEST[stages, microbatches]
    assert list(tables[-1]) == list(tick_table(stages, microbatches))


@pytest.mark.parametrize("stages", range(1, 6))
def test_every_limited_table_is_legal_and_holds_no_more_than_its_limit(stages: int) -> None:
    lengths = []
    for microbatches in range(1, 10):
        for limit in range(1, 2 * stages + 2):
            table = tick_table(stages, microbatches, in_flight=limit)
            most = _most_in_flight(table)
            assert max(most) <= limit and most == [table.in_flight(stage) for stage in range(stages)]
            lengths.append(len(table))
            assert limit == 1 or lengths[-1] <= lengths[-2]
    assert len(lengths) == 9 * (2 * stages + 1)


def test_tables_of_many_stages_are_legal_too() -> None:
    """Here the search keeps only a part of the states."""
    for limit in (3, 8):
        table = tick_table(8, 32, in_flight=limit)
        assert max(_most_in_flight(table)) == limit
        assert list(table) == list(tick_table(8, 32, in_flight=limit))


def _fewest_ticks(p: int, m: int, limit: int) -> int:
    """Breadth-first search over all words of phases and all choices of stages that do something."""
    level, seen, ticks = {(0,) * (2 * p)}, set(), 0
    while (m,) * (2 * p) not in level:
        following = set()
        for state in level:
            f, b = state[:p], state[p:]
            forward = [s for s in range(p) if f[s] < m and f[s] - b[s] < limit and (s == 0 or f[s - 1] > f[s])]
            backward = [s for s in range(p) if b[s] < (f[s] if s == p - 1 else min(f[s], b[s + 1]))]
            for first, able in ((0, forward), (p, backward)):
                for choice in itertools.product((0, 1), repeat=len(able)):
                    new = list(state)
                    for s, chosen in zip(able, choice, strict=True):
                        new[first + s] += chosen
                    following.add(tuple(new))
        seen |= level
        level, ticks = following - seen, ticks + 1
    return ticks


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (3, 3)])
def test_no_table_of_one_phase_a_tick_is_shorter(p: int, m: int) -> None:
    assert len(tick_table(p, m)) == _fewest_ticks(p, m, limit=m)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 2), (2, 3), (2, 5), (3, 2), (3, 3), (3, 4)])
def test_no_table_with_as_little_in_flight_is_shorter(p: int, m: int) -> None:
    for limit in range(1, m):
        assert len(tick_table(p, m, in_flight=limit)) == _fewest_ticks(p, m, limit)


def test_backward_ticks_mirror_forward_ticks() -> None:
    for p, m, v in TABLES[::7]:
        ticks = {phase: [tick.work for tick in tick_table(p, m, chunks=v) if tick.phase == phase] for phase in _PHASES}
        for forward, backward in zip(ticks["forward"], ticks["backward"], strict=True):
            mirrored = [None if work is None else Work(work.microbatch, v - 1 - work.chunk) for work in backward[::-1]]
            assert mirrored == list(forward)


_PHASES = ("forward", "backward")


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks", "in_flight"),
    [(1, 3, 1, None), (3, 4, 1, None), (2, 4, 2, None), (4, 8, 3, None), (3, 8, 1, 2), (4, 7, 1, 5)],
)
def test_what_is_handed_over_is_what_the_neighbour_needs_later(
    stages: int, microbatches: int, chunks: int, in_flight: int | None
) -> None:
    table = tick_table(stages, microbatches, chunks=chunks, in_flight=in_flight)
    handed: dict[str, set[tuple[int, Work]]] = {phase: set() for phase in _PHASES}
    first, last = (0, 0), (stages - 1, chunks - 1)
    for number, tick in enumerate(table):
        for stage, work in enumerate(tick.work):
            if work is not None and (stage, work.chunk) != (first if tick.phase == "forward" else last):
                assert (stage, work) in handed[tick.phase], f"stage {stage} does {work} without an input"
        for stage in range(stages):
            work = table.handed_to(number, stage)
            if work is not None:
                handed[tick.phase].add((stage, work))
    works = microbatches * chunks * stages - microbatches  # all but those at one end of the model
    assert [len(handed[phase]) for phase in _PHASES] == [works, works]


def test_a_table_for_evaluation_has_the_forward_ticks_alone() -> None:
    whole, forward = tick_table(3, 5), tick_table(3, 5, backward=False)
    assert list(forward) == [tick for tick in whole if tick.phase == "forward"]
    assert whole.has_backward and not forward.has_backward
    assert list(tick_table(3, 5, backward=False, in_flight=2)) == list(forward)


def test_the_table_of_three_stages_and_four_micro_batches_is_drawn() -> None:
    stages = [line.split(":")[1].split("holds")[0].split() for line in str(tick_table(3, 4)).splitlines()[:3]]
    assert stages[0] == ["F0", "F1", "F2", ".", "F3", ".", ".", "B0", ".", "B1", "B2", "B3"]
    assert stages[2] == [".", ".", "F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3", ".", "."]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "stages = 0; a positive integer is expected"),
        ((2, 0), "microbatches = 0"),
        ((2, 1.5), "microbatches = 1.5"),
        ((2, 3, 2), "3 micro-batches with 2 chunks a stage; a multiple of the 2 stages"),
        ((2, 4, 0), "chunks = 0"),
        ((2, 4, 1, 0), "in_flight = 0 with 1 chunks"),
        ((2, 4, 1, 1.5), "in_flight = 1.5"),
        ((2, 4, 2, 3), "in_flight = 3 with 2 chunks a stage; None, or a positive integer with one chunk"),
    ],
)
def test_wrong_numbers_are_refused(arguments: tuple, message: str) -> None:
    stages, microbatches, chunks, in_flight = (*arguments, *(1, None)[len(arguments) - 2 :])
    with pytest.raises(distca.InvalidArgumentError, match=message):
        tick_table(stages, microbatches, chunks=chunks, in_flight=in_flight)
