"""What is queued on the streams of a rank comes after as little as can be, and after all that it must.

The streams of awkward_ranks.cpp do nothing. They keep the calls whose puts each stream waits for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

import distca
from distca.testing import _emulation
from support.groups import on_all_ranks
from support.processes import tensors_for
from support.programs import AWKWARD_RANKS

Result = TypeVar("Result")
# Each rank has half of the rows of each document computed by the other.
HEADS = distca.Heads(2, 1, 8)
TASKS = [(0, 0, 32, 0, 1, 0), (0, 32, 64, 0, 1, 1), (1, 0, 32, 0, 1, 0), (1, 32, 64, 0, 1, 1)]
PLAN = distca.plan(distca.Layout([[(0, 0, 64)], [(1, 0, 64)]]), HEADS, tasks=TASKS)


class Ranks:
    """Two ranks in ping-pong, whose calls have names."""

    def __init__(self, library: ctypes.CDLL, contexts: list[distca.Context]) -> None:
        self._library, self._contexts = library, contexts
        self._steps: dict[str, list[distca.Step]] = {}
        self._tensors = [tensors_for(PLAN.for_rank(rank))[:3] for rank in range(2)]

    def dispatch(self, half: str) -> None:
        """Begins a step of a half."""

        def begin(rank: int, context: distca.Context) -> distca.Step:
            return distca.dispatch(*self._tensors[rank], PLAN.for_rank(rank), context=context)

        self._steps[half] = self._named(f"dispatch {half}", begin)

    def attend(self, half: str) -> None:
        """Attends to the half's step."""
        self._named(f"attend {half}", lambda rank, _: distca.attend(self._steps[half][rank]))

    def collect(self, half: str) -> None:
        """Collects the half's step."""
        self._named(f"collect {half}", lambda rank, _: distca.collect(self._steps[half][rank]))

    def take_two_halves(self) -> None:
        """Dispatches halves A and B, attends to both, and collects A."""
        for half in ("A", "B"):
            self.dispatch(half)
        for half in ("A", "B"):
            self.attend(half)
        self.collect("A")

    def record(self) -> list[distca.Recording]:
        """Records a whole step."""

        def recorded(rank: int, context: distca.Context) -> distca.Recording:
            with context.record() as recording:
                distca.core_attention(*self._tensors[rank], PLAN.for_rank(rank), context=context)
            return recording

        return self._named("record", recorded)

    def replan(self, recordings: list[distca.Recording]) -> None:
        """Gives each rank's recording its plan."""
        self._named("replan", lambda rank, _: recordings[rank].replan(PLAN.for_rank(rank)))

    def check(self, recordings: list[distca.Recording]) -> None:
        """Asks each rank's recording whether its plan fits."""
        self._named("check", lambda rank, _: recordings[rank].check(PLAN.for_rank(rank)))

    def num_queued(self) -> list[int]:
        """For each rank, how often something was queued."""
        return [self._library.num_queued(rank) for rank in range(2)]

    def await_all_sent(self) -> list[bool]:
        """For each rank, whether all that it has sent to other hosts is waited for."""
        return [self._library.awaits_all_sent(rank) for rank in range(2)]

    def work_comes_after(self, call: str) -> list[bool]:
        """For each rank, whether work that is queued from here on comes after what was put in that call."""
        return [self._library.work_comes_after(rank, call.encode()) for rank in range(2)]

    def grants_come_after(self, grant: str, put: str) -> list[bool]:
        """For each rank, whether credit was granted in a call, after what was put in another."""
        return [self._library.grant_comes_after(rank, grant.encode(), put.encode()) for rank in range(2)]

    def _named(self, name: str, work: Callable[[int, distca.Context], Result]) -> list[Result]:
        self._library.name_call(name.encode())
        return on_all_ranks(self._contexts, work)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = ctypes.CDLL(str(AWKWARD_RANKS.path()))
    for name in ("work_comes_after", "grant_comes_after", "awaits_all_sent"):
        getattr(found, name).restype = ctypes.c_bool
    return found


@contextmanager
def two_ranks(library: ctypes.CDLL, *, apart: bool = False) -> Iterator[Ranks]:
    library.only_order(b"order", ctypes.c_int64(1 << 20), ctypes.c_bool(apart))
    contexts = [
        distca.Context(_emulation.find_context(f"order/{rank}"), HEADS, distca.CostModel()) for rank in range(2)
    ]
    try:
        yield Ranks(library, contexts)
    finally:
        for context in contexts:
            context.close()


ALL, NONE = [True, True], [False, False]


def test_a_half_is_collected_while_results_of_both_halves_leave(library: ctypes.CDLL) -> None:
    with two_ranks(library) as ranks:
        ranks.take_two_halves()
        # The caller may change its tensors now. What follows is the rest of a layer.
        assert ranks.work_comes_after("dispatch A") == ALL
        assert ranks.work_comes_after("attend A") == ranks.work_comes_after("attend B") == NONE


def test_a_slot_is_used_again_when_its_results_have_left_and_no_others(library: ctypes.CDLL) -> None:
    with two_ranks(library) as ranks:
        ranks.take_two_halves()
        ranks.dispatch("A of the next layer")
        assert ranks.work_comes_after("attend A") == ALL
        assert ranks.grants_come_after("dispatch A of the next layer", "attend A") == ALL
        assert ranks.work_comes_after("attend B") == NONE
        ranks.collect("B")
        assert ranks.work_comes_after("attend B") == NONE
        ranks.dispatch("B of the next layer")
        assert ranks.work_comes_after("attend B") == ALL


def test_a_replay_comes_after_the_results_of_steps_before_it(library: ctypes.CDLL) -> None:
    """Also if they lie in the slot that the replay does not use."""
    with two_ranks(library) as ranks:
        recordings = ranks.record()  # in slot 0
        ranks.dispatch("A")  # in slot 1
        ranks.attend("A")
        ranks.collect("A")
        assert ranks.work_comes_after("attend A") == NONE
        ranks.replan(recordings)
        assert ranks.work_comes_after("attend A") == ALL


def test_to_check_a_plan_queues_nothing(library: ctypes.CDLL) -> None:
    """A graph may be launched after the check, or may be under way on another stream."""
    with two_ranks(library) as ranks:
        recordings = ranks.record()
        before = ranks.num_queued()
        ranks.check(recordings)
        assert ranks.num_queued() == before


def test_a_context_is_closed_when_all_that_it_has_sent_to_other_hosts_has_arrived(library: ctypes.CDLL) -> None:
    with two_ranks(library, apart=True) as ranks:
        ranks.take_two_halves()
        ranks.collect("B")
        assert ranks.await_all_sent() == NONE
    assert ranks.await_all_sent() == ALL
