"""transport="torch" over gloo: a fault of one rank is an error on every rank, which says what happened."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import distca
from distca.connect.exchange import Exchange
from distca.connect.fault_reports import FaultReports
from support.processes import HEADS, LIMIT, fault_of, plan_for, tensors_for
from support.torch_ranks import fork_later, join, over_torch, torch_group

HEADER_CALLS, DATA_CALLS = 1, 2  # the calls of all_to_all up to the header and the data of a step's first exchange


class Tap:
    """Counts the calls of all_to_all in this process, and changes what is sent as it is told."""

    def __init__(self) -> None:
        self.calls = 0  # the calls since the last command
        self.damage: Callable[[memoryview, int], object] = lambda send, call: None
        inner = Exchange.all_to_all

        def tapped(exchange: Exchange, send: memoryview, *args: Any) -> None:
            self.calls += 1
            self.damage(send, self.calls)
            inner(exchange, send, *args)

        Exchange.all_to_all = tapped  # type: ignore[method-assign]


def move_the_rows(send: memoryview, call: int) -> None:
    """The first put of this rank aims past the end of the heap."""
    words = send.cast("q")
    if call == DATA_CALLS and len(words):
        words[1] = 1 << 40


def announce_too_much(send: memoryview, call: int) -> None:
    """Every header announces less than nothing."""
    words = send.cast("q")
    if call == HEADER_CALLS:
        for p in range(2):
            words[p * len(words) // 2] = -1


def obey(rank: int, ranks: int, pipe: Connection, port: int, timeout: float = LIMIT / 2) -> None:
    """Obeys the test, and answers with the fault that it meets and the number of calls of all_to_all."""
    join(rank, ranks, port)
    tap = Tap()
    context = over_torch(heap_bytes=1 << 20, timeout=timeout)
    plan = plan_for(ranks, rank)
    q, k, v, dout = tensors_for(plan)
    out: list[torch.Tensor] = []

    def forward(use: distca.Plan = plan, **options: Any) -> None:
        out[:] = [distca.core_attention(q, k, v, use, **options)[0]]

    def damaged(damage: Callable[[memoryview, int], object]) -> None:
        tap.damage = damage
        forward()

    commands: dict[str, Callable[[], Any]] = {
        "forward": forward,
        "backward": lambda: out[0].backward(dout, retain_graph=True),
        "another plan": lambda: forward(distca.plan(plan.layout, HEADS, rank=rank, balance=False)),
        "another scale": lambda: forward(scale=2.0),
        "close": context.close,
        "fail": lambda: damaged(lambda send, call: 1 // 0),
        "damaged rows": lambda: damaged(move_the_rows),
        "damaged header": lambda: damaged(announce_too_much),
    }
    while (command := pipe.recv()) != "end":
        tap.calls = 0
        pipe.send((*fault_of(commands[command]), tap.calls))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("other", ["another plan", "another scale", "backward"])
def test_ranks_that_disagree_are_all_told_before_any_row_moves(other: str, ranks: int) -> None:
    with torch_group(obey, ranks) as group:
        group.tell("forward")
        assert [group.receive(rank)[:2] for rank in range(ranks)] == [("", "")] * ranks
        group.tell("forward", list(range(ranks - 1)))
        group.send(ranks - 1, other)
        for rank in range(ranks):
            kind, message, calls = group.receive(rank)
            assert (kind, calls) == ("PlanMismatchError", HEADER_CALLS), message
            assert re.search(rf"rank {rank} of {ranks}, step 2 .*: rank \d came to this step with", message), message
        group.tell("forward")
        assert {group.receive(rank)[0] for rank in range(ranks)} == {"ContextPoisonedError"}
        group.tell("end")


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("waiting", [True, False], ids=["waited for", "between steps"])
def test_a_killed_rank_is_named_by_all_others(ranks: int, waiting: bool) -> None:
    victim, peers = ranks - 1, list(range(ranks - 1))
    with torch_group(obey, ranks) as group:
        group.tell("forward")
        assert [group.receive(rank)[:2] for rank in range(ranks)] == [("", "")] * ranks
        if waiting:
            group.tell("backward", peers)
        group.kill(victim)
        if not waiting:
            group.tell("backward", peers)
        for rank in peers:
            kind, message, _ = group.receive(rank)
            assert (kind, f"rank {victim} died" in message) == ("PeerDiedError", True), message
            assert re.search(rf'context "default", rank {rank} of {ranks}, step 2 \(backward\)', message), message
        group.tell("forward", peers)
        for rank in peers:
            assert group.receive(rank)[0] == "ContextPoisonedError"
        group.tell("close", peers)
        assert [group.receive(rank)[:2] for rank in peers] == [("", "")] * len(peers)
        group.tell("end", peers)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_stopped_rank_is_a_timeout_on_all_others_and_hears_of_it_when_it_goes_on(ranks: int) -> None:
    victim, peers = ranks - 1, list(range(ranks - 1))
    with torch_group(obey, ranks, 1.5) as group:
        group.tell("forward")
        assert [group.receive(rank)[:2] for rank in range(ranks)] == [("", "")] * ranks
        group.signal(victim, signal.SIGSTOP)
        group.tell("forward", peers)
        for rank in peers:
            kind, message, _ = group.receive(rank)
            assert (kind, f"waited 1.5 s for rank {victim}" in message) == ("PeerTimeoutError", True), message
        group.signal(victim, signal.SIGCONT)
        group.send(victim, "forward")
        kind, message, _ = group.receive(victim)
        assert (kind, f"waited 1.5 s for rank {victim}" in message) == ("PeerTimeoutError", True), message
        group.tell("end")


def test_a_rank_that_closed_its_context_is_named_and_not_called_dead() -> None:
    with torch_group(obey, 3) as group:
        group.send(2, "close")
        assert group.receive(2)[:2] == ("", "")
        group.tell("forward", [0, 1])
        for rank in (0, 1):
            kind, message, _ = group.receive(rank)
            assert (kind, "rank 2 closed its context" in message) == ("PeerLeftError", True), message
            assert "died" not in message
        group.tell("end")


def test_an_error_of_one_rank_reaches_the_others_with_its_text() -> None:
    with torch_group(obey, 3) as group:
        group.tell("forward", [0, 2])
        group.send(1, "fail")
        kind, message, _ = group.receive(1)
        assert (kind, "division" in message) == ("OperatingSystemError", True), message
        for rank in (0, 2):
            kind, message, _ = group.receive(rank)
            assert (kind, "rank 1 abandoned this context after an error of its own" in message) == (
                "PeerLeftError",
                True,
            ), message
            assert "division" in message
        group.tell("end")


@pytest.mark.parametrize(
    ("damage", "kind", "text"),
    [
        ("damaged rows", "InvalidArgumentError", f"at offset {1 << 40} .* leaves the heap"),
        ("damaged header", "OperatingSystemError", "rank 1 announced -1 bytes"),
    ],
)
def test_what_comes_from_a_peer_is_checked_before_it_is_used(damage: str, kind: str, text: str) -> None:
    with torch_group(obey, 2) as group:
        group.send(0, "forward")
        group.send(1, damage)
        found, message, _ = group.receive(0)
        assert (found, bool(re.search(text, message))) == (kind, True), message
        assert group.receive(1)[0] != ""
        group.tell("end")


def be_interrupted(rank: int, ranks: int, pipe: Connection, port: int, when: str) -> None:
    """Rank 1 gets a Ctrl-C in an exchange, or while it tells its peers that it cannot go on."""
    join(rank, ranks, port)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tap, tell = Tap(), FaultReports.tell
    context = over_torch(heap_bytes=1 << 20)
    plan = plan_for(ranks, rank)
    q, k, v, _ = tensors_for(plan)

    def interrupt_and_tell(*args: Any) -> None:
        FaultReports.tell = tell  # type: ignore[method-assign]
        signal.raise_signal(signal.SIGINT)
        tell(*args)

    if rank == 1 and when == "in the exchange":
        tap.damage = lambda send, call: signal.raise_signal(signal.SIGINT)
    elif rank == 1:
        tap.damage = lambda send, call: 1 // 0
        FaultReports.tell = interrupt_and_tell  # type: ignore[method-assign]
    try:
        pipe.send(fault_of(lambda: distca.core_attention(q, k, v, plan)))
    except KeyboardInterrupt as interrupt:
        pipe.send((type(interrupt.__context__).__name__, "interrupted"))
    context.close()
    pipe.recv()


@pytest.mark.parametrize("when", ["in the exchange", "while it tells"])
def test_an_interrupt_is_raised_once_the_peers_are_told(when: str) -> None:
    with torch_group(be_interrupted, 2, when) as group:
        assert group.receive(1)[1] == "interrupted"
        kind, message = group.receive(0)
        assert (kind, "rank 1 abandoned this context" in message) == ("PeerLeftError", True), message
        group.tell("end")


def fork_between_steps(rank: int, ranks: int, pipe: Connection, port: int) -> None:
    join(rank, ranks, port)
    context = over_torch(heap_bytes=1 << 20)
    plan = plan_for(ranks, rank)
    q, k, v, _ = tensors_for(plan)

    def forward() -> None:
        distca.core_attention(q, k, v, plan)

    forward()
    child = fork_later()
    if child == 0:
        pipe.send(fault_of(forward))
        context.close()
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    pipe.send(fault_of(forward))
    pipe.recv()


def test_a_forked_child_cannot_use_the_context_and_does_not_harm_it() -> None:
    with torch_group(fork_between_steps, 2) as group:
        for rank in range(2):
            kind, message = group.receive(rank)
            assert (kind, "forked" in message) == ("InvalidArgumentError", True), message
        assert [group.receive(rank) for rank in range(2)] == [("", "")] * 2
        group.tell("end")
