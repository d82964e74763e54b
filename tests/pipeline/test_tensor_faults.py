"""A fault in the context of one tensor rank is told to the processes of all others, with its global rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distca
from support.processes import LIMIT, Group, fault_of, held, plan_for, tensors_for
from support.torch_ranks import fork_later, join, torch_group

WHOLE = distca.Heads(q=6, kv=3, dim=8)
RANKS, VICTIM, OTHERS = 4, 2, [0, 1, 3]  # global rank = 2 * rank in the context + tensor rank


def obey(rank: int, ranks: int, pipe: Connection, port: int, tensor: int, options: dict[str, Any]) -> None:
    """Obeys the test, and answers with the fault that it meets. The tensor ranks are neighbours."""
    join(rank, ranks, port)
    before = held()
    mesh = dist.init_device_mesh("cpu", (ranks // tensor, tensor), mesh_dim_names=("data", "tensor"))
    heads = distca.Heads(q=4, kv=2, dim=8) if tensor == 2 else WHOLE
    context = distca.init(
        tensor_parallel=mesh["tensor"], max_tokens=1, heads=heads, **{"heap_bytes": 1 << 20, "timeout": 60.0} | options
    )
    plan = plan_for(context.num_ranks, context.rank, heads=context.heads)
    q, k, v, _ = tensors_for(plan)

    def until_a_fault(work: Callable[[], Any]) -> None:
        limit = time.monotonic() + LIMIT
        while time.monotonic() < limit:
            work()

    def forward(q: torch.Tensor = q) -> None:
        distca.core_attention(q, k, v, plan)

    def all_reduce() -> None:
        try:
            dist.all_reduce(torch.ones(1), group=mesh.get_group("tensor"))
        except RuntimeError:  # of gloo
            until_a_fault(distca.check)

    def fork() -> None:
        """Forks a child that outlives this process, like a worker of a data loader."""
        child = fork_later()
        while child == 0:
            signal.pause()
        pipe.send(child)

    commands: dict[str, Callable[[], Any]] = {
        "forward": forward,
        "forward until a fault": lambda: until_a_fault(forward),
        "check until a fault": lambda: until_a_fault(distca.check),
        "all-reduce": all_reduce,
        "refuse": lambda: forward(q.bfloat16()),
        "close": context.close,
        "fork": fork,
    }
    while (command := pipe.recv()) != "end":
        pipe.send(fault_of(commands[command]))
        if command == "close":
            dist.destroy_process_group()
            pipe.send([one for one in held() if one not in before and "memfd" in one])


def expect(group: Group, rank: int, kind: str, *words: str) -> None:
    """Expects that a rank meets such a fault, and that its context is of no use afterwards."""
    found, message = group.receive(rank)
    assert found == kind and all(word in message for word in words), (rank, found, message)
    assert f"rank {rank // 2} of 2 (global rank {rank})" in message, message
    group.send(rank, "forward")
    assert group.receive(rank)[0] == "ContextPoisonedError"


def let_end(group: Group, ranks: list[int]) -> None:
    for rank in ranks:
        group.send(rank, "close")
        assert group.receive(rank) == ("", "")
        assert group.receive(rank) == []
        group.send(rank, "end")


@contextmanager
def processes(ranks: int = RANKS, tensor: int = 2, **options: Any) -> Iterator[Group]:
    """Processes that have made a step. By default there are two tensor ranks, whose contexts have two ranks each."""
    with torch_group(obey, ranks, tensor, options) as group:
        group.tell("forward")
        assert [group.receive(rank) for rank in range(ranks)] == [("", "")] * ranks
        yield group


@pytest.fixture(params=[{"transport": "shm"}, {"progress_thread": True}, {"transport": "torch"}], ids=str)
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """Four processes over each of these transports."""
    with processes(**request.param) as group:
        yield group


def test_a_killed_process_is_named_by_those_that_compute(group: Group) -> None:
    group.tell("forward until a fault", OTHERS)
    group.kill(VICTIM)
    expect(group, 0, "PeerDiedError", "rank 1 (global rank 2)")
    for rank in (1, 3):
        expect(group, rank, "PeerDiedError", "global rank 2")
    let_end(group, OTHERS)


def test_a_call_that_one_process_refuses_is_told_to_all_with_the_reason(group: Group) -> None:
    refuse_and_expect_the_reason(group)


def test_the_reason_of_a_refusal_is_there_before_anybody_looks_for_it() -> None:
    with processes(link=distca.Link(1e9, 0.1)) as group:
        refuse_and_expect_the_reason(group)


def refuse_and_expect_the_reason(group: Group) -> None:
    group.tell("forward until a fault", OTHERS)
    group.send(VICTIM, "refuse")
    assert group.receive(VICTIM)[0] == "InvalidArgumentError"
    for rank in OTHERS:
        expect(group, rank, "PeerLeftError", "global rank 2", "bfloat16")
    let_end(group, list(range(RANKS)))


def test_a_killed_process_is_named_by_those_that_wait_outside_of_distca() -> None:
    """A process in a collective of its tensor group gets an error of that, and `check` says the cause."""
    with processes() as group:
        group.tell("check until a fault", [0, 1])
        group.send(3, "all-reduce")
        group.kill(VICTIM)
        for rank in OTHERS:
            expect(group, rank, "PeerDiedError", "global rank 2")
        let_end(group, OTHERS)


def test_news_reach_a_process_whose_peers_and_tensor_group_make_no_call() -> None:
    """Only process 3 has a connection to the killed one, and it passes on the news without a call of its own."""
    with processes() as group:
        group.send(1, "check until a fault")
        group.kill(VICTIM)
        expect(group, 1, "PeerDiedError", "global rank 2 (tensor rank 0) died")
        let_end(group, OTHERS)


def test_a_forked_child_does_not_hide_that_a_process_was_killed() -> None:
    with processes(3, 3) as group:
        group.send(1, "fork")
        child = group.receive(1)
        try:
            group.tell("check until a fault", [0, 2])
            group.kill(1)
            for rank in (0, 2):
                assert "global rank 1 (tensor rank 1) died" in group.receive(rank)[1]
        finally:
            os.kill(child, signal.SIGKILL)
        let_end(group, [0, 2])


def test_a_process_that_does_not_come_is_named_by_all() -> None:
    with processes(timeout=1.0) as group:
        group.tell("forward until a fault", OTHERS)
        expect(group, 0, "PeerTimeoutError", "waited 1 s for rank 1 (global rank 2)")
        for rank in (1, 3):
            expect(group, rank, "PeerTimeoutError", "waited 1 s for rank 1 (global rank 2)")
        let_end(group, list(range(RANKS)))


def test_each_of_three_tensor_ranks_alone_in_its_context_hears_of_a_killed_one() -> None:
    with processes(3, 3) as group:
        group.tell("check until a fault", [0, 2])
        group.kill(1)
        for rank in (0, 2):
            kind, message = group.receive(rank)
            assert kind == "PeerDiedError" and "global rank 1 (tensor rank 1) died" in message, message
        let_end(group, [0, 2])


def test_a_context_that_is_closed_early_is_no_fault_of_the_other_tensor_ranks() -> None:
    with processes() as group:
        let_end(group, [0, 2])
        group.tell("forward", [1, 3])
        assert [group.receive(rank) for rank in (1, 3)] == [("", "")] * 2
        let_end(group, [1, 3])
