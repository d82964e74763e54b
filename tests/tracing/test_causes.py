"""Why ranks waited: a peer had not come, or rows were on their way."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import distca
from distca.trace.causes import Causes, wait_causes
from distca.trace.trace import Span, Trace
from support.groups import loopback_group, on_all_ranks

HEADS = distca.Heads(2, 2, 32)
LENGTHS = [[256], [32]]
#: Seconds by which a rank or its rows are late on purpose: much more than a busy machine delays either.
LATE = 1.0


def part(name: str, begin: float, end: float, number: int = 1, phase: str = "forward") -> Span:
    return Span(name, False, number, 0, phase, -1, begin, end)


def wait(name: str, peer: int, begin: float, end: float, number: int = 1, phase: str = "forward") -> Span:
    return Span(name, True, number, 0, phase, peer, begin, end)


def test_a_wait_is_the_peers_until_it_has_sent_and_the_rows_from_then_on() -> None:
    home = [
        part("dispatch", 0.0, 3.0),
        wait("credit to send rows to its server arena", 1, 1.0, 1.5),
        part("attend", 3.0, 4.0),
        part("collect", 4.0, 12.0),
        wait("rows that come home", 1, 4.0, 11.0),
    ]
    server = [
        part("dispatch", 1.0, 2.0),
        part("attend", 2.0, 9.0),
        wait("rows for tasks served here", 0, 2.25, 7.0),
        part("collect", 9.0, 11.0),
        wait("its own rows to arrive", -1, 9.5, 11.0),
    ]
    of_home, of_server = wait_causes([Trace(0, home, []), Trace(1, server, [])])
    # The server had attended at 9, rank 0 had dispatched at 3.
    assert of_home == Causes(peer=0.5 + 5.0, rows=2.0)
    assert of_server == Causes(peer=0.75, rows=4.0 + 1.5)


def test_a_wait_that_begins_after_the_rows_were_sent_is_theirs_and_one_that_ends_before_is_the_peers() -> None:
    sender = [part("dispatch", 0.0, 1.0), part("dispatch", 5.0, 9.0, 2)]
    server = [wait("rows for tasks served here", 0, 1.5, 2.0), wait("rows for tasks served here", 0, 6.0, 8.0, 2)]
    assert wait_causes([Trace(0, sender, []), Trace(1, server, [])])[1] == Causes(peer=2.0, rows=0.5)


def test_waits_are_those_of_the_phase_that_is_asked_for() -> None:
    sender = [part("dispatch", 0.0, 1.0), part("dispatch", 4.0, 5.0, 2, "backward")]
    server = [
        wait("rows for tasks served here", 0, 0.5, 1.25),
        wait("rows for tasks served here", 0, 4.75, 7.0, 2, "backward"),
    ]
    traces = [Trace(0, sender, []), Trace(1, server, [])]
    assert wait_causes(traces, "forward")[1] == Causes(0.5, 0.25)
    assert wait_causes(traces, "backward")[1] == Causes(0.25, 2.0)
    assert wait_causes(traces)[1] == Causes(0.75, 2.25)


def test_rows_of_a_later_round_are_sent_in_collect() -> None:
    home = [wait("rows that come home", 1, 1.0, 2.0), wait("rows that come home", 1, 2.5, 6.0)]
    server = [part("attend", 0.0, 1.5), part("collect", 3.0, 7.0)]
    assert wait_causes([Trace(0, home, []), Trace(1, server, [])])[0] == Causes(peer=0.5 + 0.5, rows=0.5 + 3.0)


def test_an_exchange_waits_for_the_last_rank_and_then_for_rows() -> None:
    waits = ([(1.0, 4.0), (6.0, 8.0)], [(3.0, 4.0), (5.0, 8.0)])
    traces = [
        Trace(rank, [wait("all ranks to exchange rows", -1, *times) for times in of_rank], [])
        for rank, of_rank in enumerate(waits)
    ]
    assert wait_causes(traces) == [Causes(peer=2.0, rows=1.0 + 2.0), Causes(peer=1.0, rows=1.0 + 2.0)]


def test_a_rank_whose_trace_is_missing_is_named() -> None:
    server = [wait("rows for tasks served here", 0, 2.0, 3.0, 7)]
    with pytest.raises(distca.InvalidArgumentError, match="rank 0, .* in step 7, has no dispatch"):
        wait_causes([Trace(1, server, [])])


def steps_of_two_ranks(link: distca.Link, late: float) -> list[Causes]:
    """The causes of a forward step in which rank 0 begins so many seconds after rank 1."""
    plan = distca.plan(distca.Layout.from_documents(LENGTHS), HEADS, tolerance=0.01)
    start = threading.Barrier(2)

    def work(rank: int, context: distca.Context) -> distca.Trace:
        q, k, v = (torch.randn(sum(LENGTHS[rank]), 2, 32) for _ in range(3))
        context.start_trace()
        start.wait()
        time.sleep(late * (rank == 0))
        distca.core_attention(q, k, v, plan.for_rank(rank), context=context)
        return context.take_trace()

    with loopback_group(plan, link=link) as contexts:
        return wait_causes(on_all_ranks(contexts, work))


def test_a_rank_that_is_held_back_is_why_its_peer_waits() -> None:
    # Rank 0 has the long document, and rank 1 serves a part of it.
    _, server = steps_of_two_ranks(distca.Link(1e12), LATE)
    assert server.peer > LATE / 2 > server.rows


def test_a_slow_link_is_why_ranks_wait_that_begin_together() -> None:
    plan = distca.plan(distca.Layout.from_documents(LENGTHS), HEADS, tolerance=0.01)
    _, server = steps_of_two_ranks(distca.Link(plan.stats.bytes["forward_in"] / LATE), 0.0)
    assert server.rows > LATE / 2 > server.peer
