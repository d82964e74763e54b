"""Hosts whose network is cut, in both directions or in one.

Every rank gets a typed error that names the silent one, in time, and nothing is printed on the terminal. A link that
comes back before the timeout changes nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distca
from distca import _C
from distca.connect.exchange import Exchange
from distca.testing import _emulation
from support.hosts_apart import Hosts, address_of, hosts_apart
from support.processes import HEADS, LIMIT, connect_to, fault_of, plan_for, tensors_for

TIMEOUT = 1.5
STORE_PORT = 29500  # these hosts belong to this test alone
WORDS = 8


def keep_what_is_printed() -> Callable[[], str]:
    """Redirects this process's standard error into a file, and returns a function that reads it."""
    memory = os.memfd_create("stderr")
    os.dup2(memory, 2)
    return lambda: os.pread(memory, 1 << 20, 0).decode()


def join(rank: int, ranks: int) -> None:
    store = dist.TCPStore(address_of(0), STORE_PORT, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def bits_of_a_step(context: distca.Context) -> list[bytes]:
    plan = plan_for(context.num_ranks, context.rank)
    q, k, v, dout = tensors_for(plan)
    out = distca.core_attention(q, k, v, plan, context=context)[0]
    out.backward(dout)
    return [
        one.detach().view(torch.uint8).numpy().tobytes() for one in (out, q.grad, k.grad, v.grad) if one is not None
    ]


def obey(rank: int, ranks: int, pipe: Connection, make: Callable[..., distca.Context], timeout: float) -> None:
    """Answers every command with what the step returns or with its fault. At the end it sends what was printed."""
    printed = keep_what_is_printed()
    context: list[distca.Context] = []
    commands: dict[str, Callable[[], Any]] = {
        "init": lambda: context.append(make(rank, ranks, pipe, timeout)),
        "step": lambda: pipe.send(bits_of_a_step(context[0])),
        "close": lambda: context.pop().close(),
    }
    if make is over_torch:
        join(rank, ranks)
    before = printed()
    pipe.send("ready")
    while (command := pipe.recv()) != "end":
        fault = fault_of(commands[command])
        if fault[0] or command != "step":
            pipe.send(fault)
    context.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
    pipe.send(printed().removeprefix(before))


def over_torch(rank: int, ranks: int, pipe: Connection, timeout: float) -> distca.Context:
    return distca.init(transport="torch", max_tokens=1, heads=HEADS, heap_bytes=1 << 20, timeout=timeout)


def over_tcp(rank: int, ranks: int, pipe: Connection, timeout: float) -> distca.Context:
    """Queued steps. Their rows go through memory, so the hosts' network has only the control words."""
    listener = _C.TcpListener(address_of(rank))
    pipe.send(listener.address)
    return connect_to(listener, rank, pipe.recv(), timeout=timeout, connect_timeout=timeout, device="cpu")


@contextmanager
def ready(hosts: int, *args: Any, program: Callable[..., None] | None = None) -> Iterator[Hosts]:
    with hosts_apart(program or obey, hosts, *args) as group:
        assert [group.receive(rank) for rank in group.hosts] == ["ready"] * hosts
        yield group


def everyone(group: Hosts, command: str) -> list[Any]:
    group.tell(command, group.hosts)
    return [group.receive(rank) for rank in group.hosts]


def start(group: Hosts, make: Callable[..., distca.Context]) -> list[list[bytes]]:
    """Takes the first step on all ranks and returns its bits."""
    group.tell("init", group.hosts)
    if make is over_tcp:
        group.exchange_addresses()
    assert [group.receive(rank) for rank in group.hosts] == [("", "")] * len(group.hosts)
    return everyone(group, "step")


def end(group: Hosts) -> None:
    assert everyone(group, "end") == [""] * len(group.hosts), "this was printed"


def others(group: Hosts, rank: int) -> list[int]:
    return [other for other in group.hosts if other != rank]


@pytest.mark.parametrize(("how", "victim"), [(Hosts.cut, 0), (Hosts.deafen, 2)])
def test_over_torch_every_rank_is_told_who_is_silent(how: Callable[[Hosts, int], None], victim: int) -> None:
    """The store of torch.distributed runs on host 0."""
    with ready(3, over_torch, TIMEOUT) as group:
        start(group, over_torch)
        how(group, victim)
        for rank, (kind, message) in enumerate(everyone(group, "step")):
            assert kind == "PeerTimeoutError", (rank, kind, message)
            named = [f"rank {victim}"] if rank != victim else ["ranks " + ", ".join(map(str, others(group, rank)))]
            assert f"waited {TIMEOUT:g} s for {named[0]} to exchange rows" in message, (rank, message)
        group.mend(victim)
        assert {kind for kind, _ in everyone(group, "step")} == {"ContextPoisonedError"}
        assert everyone(group, "close") == [("", "")] * 3
        end(group)


@pytest.mark.parametrize("how", [Hosts.cut, Hosts.deafen])
def test_over_tcp_every_rank_is_told_who_is_silent(how: Callable[[Hosts, int], None]) -> None:
    with ready(2, over_tcp, TIMEOUT) as group:
        start(group, over_tcp)
        how(group, 1)
        for rank, (kind, message) in enumerate(everyone(group, "step")):
            assert kind in ("PeerTimeoutError", "PeerDiedError"), (rank, kind, message)
            assert f"rank {1 - rank}" in message, (rank, message)
        group.mend(1)
        assert everyone(group, "close") == [("", "")] * 2
        end(group)


@pytest.mark.parametrize("make", [over_torch, over_tcp])
def test_a_link_that_comes_back_before_the_timeout_changes_nothing(make: Callable[..., distca.Context]) -> None:
    with ready(2, make, 20.0) as group:
        first = start(group, make)
        group.cut(1)
        group.tell("step", group.hosts)
        assert not any(group.has_answered(rank, 0.1) for rank in group.hosts)
        group.mend(1)
        assert [group.receive(rank) for rank in group.hosts] == first
        assert everyone(group, "close") == [("", "")] * 2
        end(group)


def test_ranks_that_a_cut_keeps_from_meeting_are_told_whom_they_waited_for() -> None:
    with ready(2, over_torch, TIMEOUT) as group:
        group.cut(1)
        for rank, (kind, message) in enumerate(everyone(group, "init")):
            assert kind == "PeerTimeoutError", (rank, kind, message)
            assert f"rank {rank} waited {TIMEOUT:g} s, and rank {1 - rank} did not join" in message
        end(group)


def meet_after_a_word(rank: int, ranks: int, pipe: Connection, timeout: float) -> None:
    """A rank whose network is cut after it knows its peers and before it has connected to them."""
    connect = Exchange._connect

    def wait_and_connect(*args: Any) -> Any:
        pipe.send("has met its peers")
        pipe.recv()
        return connect(*args)

    Exchange._connect = wait_and_connect  # type: ignore[method-assign]
    obey(rank, ranks, pipe, over_torch, timeout)


def test_a_cut_while_ranks_connect_is_a_timeout_of_both() -> None:
    with ready(2, TIMEOUT, program=meet_after_a_word) as group:
        group.tell("init", group.hosts)
        assert [group.receive(rank) for rank in group.hosts] == ["has met its peers"] * 2
        group.cut(1)
        for rank, (kind, message) in enumerate(everyone(group, "connect")):
            assert (kind, f"rank {rank} could not connect to its peers" in message) == ("PeerTimeoutError", True)
        group.tell("end", group.hosts)


def test_a_rank_whose_network_is_cut_closes_its_context_all_the_same() -> None:
    with ready(2, over_torch, TIMEOUT) as group:
        start(group, over_torch)
        group.cut(1)
        assert everyone(group, "close") == [("", "")] * 2
        end(group)


# ---- the words of a host, by themselves


def hold_words(rank: int, ranks: int, pipe: Connection, timeout: float) -> None:
    """Calls the transport's methods that the test names over the pipe."""
    listener = _C.TcpListener(address_of(rank))
    pipe.send(listener.address)
    transport = _emulation.connect_tcp(
        listener=listener, rank=rank, addresses=pipe.recv(), num_signals=WORDS, timeout=timeout
    )
    pipe.send("joined")
    while (command := pipe.recv()) != "end":
        name, *args = command
        pipe.send(getattr(transport, name)(*args))


@contextmanager
def words_of_hosts(timeout: float) -> Iterator[Hosts]:
    with hosts_apart(hold_words, 2, timeout) as group:
        group.exchange_addresses()
        assert [group.receive(rank) for rank in group.hosts] == ["joined"] * 2
        yield group
        group.tell("end", group.hosts)


def ask(group: Hosts, rank: int, *command: Any) -> Any:
    group.send(rank, command)
    return group.receive(rank)


@pytest.mark.parametrize("how", [Hosts.cut, Hosts.deafen])
def test_a_host_that_is_silent_for_the_timeout_has_died_for_both_ends(how: Callable[[Hosts, int], None]) -> None:
    with words_of_hosts(TIMEOUT) as group:
        assert ask(group, 0, "peek", 1, 0) == ask(group, 1, "peek", 0, 0) == 0
        how(group, 1)
        for rank in group.hosts:
            deadline = time.monotonic() + LIMIT
            while (gone := ask(group, rank, "departed", 1 - rank)) is None:
                assert time.monotonic() < deadline
                ask(group, rank, "wait", 0, 1, 0.1)
            assert gone == (1 - rank, False)


def test_signals_that_a_cut_holds_up_arrive_when_the_link_is_back() -> None:
    with words_of_hosts(LIMIT) as group:
        group.cut(0)
        ask(group, 0, "signal", 1, 3, 7)
        assert not ask(group, 1, "wait", 3, 7, 0.1)
        group.mend(0)
        assert ask(group, 1, "wait", 3, 7, 10.0)
        assert ask(group, 0, "departed") is None
