"""Ranks of a node that slow each other down. Every value here is added up by hand."""

from __future__ import annotations

import dataclasses
from typing import cast

import pytest
import torch

import distca
from distca.simulator.bounds import end_seconds
from distca.simulator.case import Case, Program
from distca.simulator.contention import played, shares_beside
from distca.simulator.dense import Part
from distca.simulator.machine import Deadline, Machine, TooSlow
from distca.simulator.setup import Cluster, Parallelism
from distca.simulator.simulate import simulate
from distca.simulator.strategies import STRATEGIES
from support.simulated import DOCUMENTS, MODEL, SHAPES, cluster


def _tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


class _Parts:
    """A program of some parts on all homes, after which all wait for the last one, and of some attention."""

    def __init__(
        self, *parts: torch.Tensor, attention: torch.Tensor | None = None, begin: torch.Tensor | None = None
    ) -> None:
        self._parts, self._attention, self._begin = parts, attention, begin

    def play(self, machine: Machine) -> None:
        if self._begin is not None:
            machine.wait_until(self._begin)
        if self._attention is not None:
            machine._attend(self._attention, distca.calls.calls_of_pass("forward", 1)[0])
        for seconds in self._parts:
            machine.compute(Part(seconds, seconds, torch.zeros_like(seconds), 0))
        machine.wait_until(machine.now.max().expand_as(machine.now))


def _slow(on: Cluster, contention: float) -> Cluster:
    return dataclasses.replace(on, device=dataclasses.replace(on.device, contention=contention))


def _played(parts: _Parts, on: Cluster) -> Machine:
    return played(cast(Program, parts), on)


def test_a_part_is_slowed_for_the_share_of_its_time_in_which_the_other_computes() -> None:
    parts = _Parts(_tensor(4, 0), _tensor(1, 1), _tensor(0, 1))
    # Home 1 computes from 0 to 2, so half of the first part of home 0, and waits from then on.
    alone, slowed = (_played(parts, _slow(cluster(2), contention)) for contention in (1.0, 1.5))
    assert alone.dense.tolist() == [5, 2] and slowed.dense.tolist() == [4 * 1.25 + 1, 2 * 1.5]
    assert slowed.now.tolist() == [6, 6] and not slowed.events


def test_a_home_that_begins_late_slows_nobody_before() -> None:
    slowed = _played(_Parts(_tensor(4, 1), begin=_tensor(0, 5)), _slow(cluster(2), 2.0))
    assert slowed.dense.tolist() == [4, 1] and slowed.now.tolist() == [6, 6]
    slowed = _played(_Parts(_tensor(4, 1), begin=_tensor(0, 3)), _slow(cluster(2), 2.0))
    assert slowed.dense.tolist() == [5, 2]


def test_attention_slows_others_and_is_slowed() -> None:
    parts = _Parts(_tensor(4, 0), attention=_tensor(0, 3))
    slowed = _played(parts, _slow(cluster(2), 2.0))
    assert slowed.attention.tolist() == [0, 6] and slowed.dense.tolist() == [4 * 1.75, 0]


def test_homes_slow_those_of_their_own_node_each_as_much() -> None:
    parts = _Parts(_tensor(4, 2, 0, 4, 4, 0))
    slowed = _played(parts, _slow(cluster(6, 3), 2.0))
    # Home 0 has home 1 beside it for half of its time: a quarter of the two others. Homes 3 and 4 have each other.
    assert slowed.dense.tolist() == pytest.approx([4 * 1.25, 2 * 1.5, 0, 4 * 1.5, 4 * 1.5, 0])
    assert _played(parts, _slow(cluster(6, 1), 2.0)).dense.tolist() == [4, 2, 0, 4, 4, 0]


def test_tensor_ranks_are_one_home_of_their_node() -> None:
    parts = cast(Program, _Parts(_tensor(4, 4)))
    on = _slow(cluster(4, 2), 2.0)
    assert played(parts, on, 2).dense.tolist() == [4, 4]
    assert played(parts, _slow(cluster(4, 4), 2.0), 2).dense.tolist() == [8, 8]


def test_shares_are_those_of_events_in_their_order() -> None:
    recorded = played(cast(Program, _Parts(_tensor(4, 0), _tensor(0, 2))), cluster(2), record=True)
    assert [share.tolist() for share in shares_beside(recorded.events, 2)] == [[0.5, 0], [0, 1]]


def test_a_step_that_is_too_slow_alone_is_not_played_to_its_end() -> None:
    deadline = Deadline(seconds=3, work=4, finish=0)
    with pytest.raises(TooSlow):
        played(cast(Program, _Parts(_tensor(4, 4))), _slow(cluster(2), 1.5), deadline=deadline)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_takes_at_most_as_many_times_as_long(name: str, shape: Parallelism) -> None:
    if not STRATEGIES[name].applies(shape, MODEL, 1):
        pytest.skip("a strategy that is not there in this parallelism")
    on = cluster(shape.homes * shape.tensor * shape.pipeline, 4)
    setting = {"model": MODEL, "parallelism": shape, "strategies": [name]}
    (alone,), (slowed,) = (simulate(DOCUMENTS, cluster=_slow(on, many), **setting) for many in (1.0, 1.25))
    assert alone.seconds <= slowed.seconds <= 1.25 * alone.seconds * (1 + 1e-9)
    causes = dataclasses.astuple(slowed.idle_by_cause)
    assert min(causes) >= 0 and sum(causes) == pytest.approx(sum(slowed.idle) / len(slowed.idle))


def test_balance_brings_less_where_ranks_that_wait_leave_the_memory_to_others() -> None:
    def gain(contention: float) -> float:
        on = _slow(cluster(4, 4), contention)
        alone, balanced = simulate(
            DOCUMENTS[:1],
            cluster=on,
            model=MODEL,
            parallelism=Parallelism(data=4),
            strategies=["unbalanced", "distca-single"],
        )
        return alone.seconds / balanced.seconds

    assert 1 < gain(1.5) < gain(1.0)


def test_homes_that_do_the_same_are_slowed_all_the_time() -> None:
    on, shape = cluster(4, 4), Parallelism(data=4)
    setting = {"model": MODEL, "parallelism": shape, "strategies": ["unbalanced"]}
    (alone,), (slowed,) = (simulate([[[8192]] * 4], cluster=_slow(on, many), **setting) for many in (1.0, 1.5))
    # Only the gradients' all-reduce and the optimizer are as fast as before.
    end = end_seconds(Case([[[8192]] * 4], on, MODEL, shape))
    assert slowed.seconds - end == pytest.approx(1.5 * (alone.seconds - end))
