"""Shared memory between processes gives the same results as one process, and errors that say what is wrong."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import distca
from distca import _C, testing
from distca.testing import _emulation
from support.processes import Group, connect, connect_to, fault_of, held, tensors_for

STEPS = 6


def random_plan(seed: int, ranks: int) -> distca.Plan:
    """A random layout with random heads, which depend on the seed alone."""
    draw = random.Random(f"{seed}/{ranks}")
    kv = draw.choice([1, 2])
    heads = distca.Heads(
        q=kv * draw.choice([1, 2, 4]),
        kv=kv,
        dim=draw.choice([8, 16, 40]),
        v_dim=draw.choice([8, 24]),
        dtype=draw.choice([torch.float32, torch.bfloat16]),
    )
    lengths = [draw.choice([1, draw.randrange(1, 30), draw.randrange(50, 200)]) for _ in range(draw.randrange(1, 9))]
    if draw.random() < 0.3:
        owners = [draw.randrange(ranks) for _ in lengths]
        per_rank = [[length for length, owner in zip(lengths, owners, strict=True) if owner == r] for r in range(ranks)]
        layout = distca.Layout.from_documents(per_rank)
    else:
        room = -(-sum(lengths) // ranks) + draw.randrange(0, 40)
        layout = distca.Layout.packed(lengths, ranks=ranks, tokens_per_rank=room)
    return distca.plan(
        layout,
        heads,
        rank=0,
        tolerance=draw.choice([0.0, 0.1]),
        min_rows=draw.choice([1, 16]),
        balance=draw.random() < 0.8,
        capacity=2**62,
    )


def results(seed: int, rank: int, ranks: int, context: distca.Context) -> list[list[bytes]]:
    """The bits of out, lse, dq, dk and dv that a rank gets from a few steps. Some steps have no backward."""
    _emulation.fill_with_nan(context._core)
    found = []
    for step in range(STEPS):
        plan = random_plan(seed + step, ranks).for_rank(rank)
        q, k, v, dout = tensors_for(plan, seed + step)
        out, lse = distca.core_attention(q, k, v, plan, context=context)
        if random.Random(seed + step).random() < 0.8:
            out.backward(dout)
        tensors = [out.detach(), lse, *(t.grad for t in (q, k, v) if t.grad is not None)]
        found.append([bits(one) for one in tensors])
    return found


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def slot_bytes(seed: int, ranks: int) -> int:
    return max(random_plan(seed + step, ranks).stats.slot_bytes for step in range(STEPS)) + 4096


def rank_over_shm(rank: int, ranks: int, pipe: Connection, seed: int, reorder: bool) -> None:
    context = connect(rank, pipe, slot_bytes=slot_bytes(seed, ranks), reorder_seed=seed if reorder else None)
    assert context.transport == ("reordering" if reorder else "shm")
    pipe.send(results(seed, rank, ranks, context))
    pipe.recv()


def over_loopback(seed: int, ranks: int) -> list[Any]:
    contexts = testing.loopback(
        ranks, max_tokens=1, heads=random_plan(seed, ranks).heads, heap_bytes=2 * slot_bytes(seed, ranks), timeout=30
    )
    found: list[Any] = [None] * ranks

    def work(rank: int) -> None:
        found[rank] = results(seed, rank, ranks, contexts[rank])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for context in contexts:
        context.close()
    return found


@pytest.mark.parametrize("reorder", [False, True], ids=["in order", "reordered"])
@pytest.mark.parametrize(("seed", "ranks"), [(100, 2), (200, 3), (300, 3), (400, 4)])
def test_shared_memory_gives_what_loopback_gives_bit_for_bit(seed: int, ranks: int, reorder: bool) -> None:
    print(f"seeds {seed} to {seed + STEPS - 1}, {ranks} ranks")
    with Group(rank_over_shm, ranks, seed, reorder) as group:
        group.exchange_addresses()
        over_shm = [group.receive(rank) for rank in range(ranks)]
        group.tell("end")
    for rank, (ours, expected) in enumerate(zip(over_shm, over_loopback(seed, ranks), strict=True)):
        for step in range(STEPS):
            assert len(ours[step]) == len(expected[step])
            for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), ours[step], expected[step], strict=False):
                assert one == other, f"{name} of rank {rank} in step {step}"


def join_with(rank: int, ranks: int, pipe: Connection, options: list[dict[str, Any]]) -> None:
    pipe.send(fault_of(lambda: connect(rank, pipe, **options[rank])))


def test_ranks_with_heaps_of_different_sizes_are_both_told_both_sizes() -> None:
    with Group(join_with, 2, [{"slot_bytes": 1 << 20}, {"slot_bytes": 1 << 16}]) as group:
        group.exchange_addresses()
        more = 8192  # two slots have room for the largest logits of two ranks
        for rank, mine, theirs in (
            (0, (1 << 21) + more, (1 << 17) + more),
            (1, (1 << 17) + more, (1 << 21) + more),
        ):
            kind, message = group.receive(rank)
            assert kind == "InvalidArgumentError", message
            assert f"rank {1 - rank} has a heap of {theirs} bytes, rank {rank} one of {mine}" in message


def join_without_room(rank: int, ranks: int, pipe: Connection, sent: int, seconds: float) -> None:
    """Rank 0 has sent itself descriptors, and takes them late. An unprivileged user may have 200 under way here."""
    own, other = socket.socketpair()
    if rank == 0:
        socket.send_fds(own, [b"."], [0] * sent)
    version, none = (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(version, none) == 0
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
    later = threading.Timer(seconds, other.close)
    later.start()
    pipe.send(fault_of(lambda: connect(rank, pipe)))
    later.cancel()
    for end in (own, other):
        end.close()


@pytest.mark.parametrize(("ranks", "sent", "seconds"), [(3, 250, 0.3), (6, 195, 60.0)], ids=["no room", "little room"])
def test_ranks_wait_where_too_many_descriptors_are_under_way(ranks: int, sent: int, seconds: float) -> None:
    with Group(join_without_room, ranks, sent, seconds) as group:
        group.exchange_addresses()
        assert [group.receive(rank) for rank in range(ranks)] == [("", "")] * ranks


def join_as(rank: int, ranks: int, pipe: Connection, claims: list[int]) -> None:
    listener = _C.ShmListener()
    pipe.send(listener.address)
    addresses = pipe.recv()
    pipe.send(fault_of(lambda: connect_to(listener, claims[rank], addresses, connect_timeout=0.5)))


def test_a_rank_that_claims_the_number_of_another_is_refused() -> None:
    with Group(join_as, 2, [0, 0]) as group:
        group.exchange_addresses()
        kind, message = group.receive(1)
        assert kind == "InvalidArgumentError"
        assert "the address of rank 0 is not the one of this rank's listener" in message
        kind, message = group.receive(0)  # rank 1 never joined
        assert (kind in ("PeerDiedError", "PeerTimeoutError"), "rank 1" in message) == (True, True), message


def join_with_a_third(rank: int, ranks: int, pipe: Connection, third: list[bool]) -> None:
    listener, silent = _C.ShmListener(), _C.ShmListener()
    pipe.send(listener.address)
    addresses = pipe.recv() + [silent.address] * third[rank]
    pipe.send(fault_of(lambda: connect_to(listener, rank, addresses, connect_timeout=2)))


def test_ranks_that_disagree_on_the_size_of_the_group_are_both_told() -> None:
    with Group(join_with_a_third, 2, [False, True]) as group:
        group.exchange_addresses()
        for rank, mine, theirs in ((0, 2, 3), (1, 3, 2)):
            kind, message = group.receive(rank)
            assert kind == "InvalidArgumentError", message
            counts = {f"rank {rank} has {mine}", f"rank {1 - rank} has {theirs}"}
            assert all(count in message for count in counts), message


def join_in_this_process(addresses: list[str], rank: int = 0, listener: Any = None) -> None:
    """Makes rank `rank` of a group from all members' addresses; "own" stands for this rank's."""
    listener = listener or _C.ShmListener()
    addresses = [listener.address if one == "own" else one for one in addresses]
    connect_to(listener, rank, addresses, name="transport test", connect_timeout=0.2)


@pytest.mark.parametrize("text", ["", "somewhere", "distca-shm-1/a/b/1/00/00", "tcp://127.0.0.1:80"])
def test_a_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=f'not an address of an shm listener: "{text}"'):
        join_in_this_process(["own", text])


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        (1, "0a0b", "needs all ranks on one host; rank 1 runs on another than rank 0 .boot id 0a0b"),
        (2, "net:[1]", r"needs all ranks in one network namespace; rank 1 runs in net:\[1\]"),
    ],
    ids=["host", "network namespace"],
)
def test_an_address_that_cannot_be_reached_from_here_is_refused(part: int, value: str, message: str) -> None:
    parts = _C.ShmListener().address.split("/")
    parts[part] = value
    with pytest.raises(distca.InvalidArgumentError, match=message):
        join_in_this_process(["own", "/".join(parts)])


def test_an_address_whose_listener_is_gone_names_rank_and_process() -> None:
    gone = _C.ShmListener().address
    with pytest.raises(distca.PeerDiedError, match=rf"found nobody at the address of rank 0 \(pid {os.getpid()}\)"):
        join_in_this_process([gone, "own"], rank=1)


def test_a_peer_that_never_connects_is_named_after_the_timeout() -> None:
    silent = _C.ShmListener()
    with pytest.raises(distca.PeerTimeoutError, match="rank 0 waited too long for the connections of rank 1"):
        join_in_this_process(["own", silent.address])


def test_a_listener_serves_one_group_only() -> None:
    listener = _C.ShmListener()
    with pytest.raises(distca.InvalidArgumentError, match="not an address"):
        join_in_this_process(["own", "nonsense"], listener=listener)
    with pytest.raises(distca.InvalidArgumentError, match="used up"):
        join_in_this_process(["own"], listener=listener)


def test_a_failed_connection_leaves_nothing_behind() -> None:
    before = held()
    for _ in range(3):
        with pytest.raises(distca.DistcaError):
            join_in_this_process(["own", _C.ShmListener().address])
    assert held() == before
    assert distca.get_context("transport test") is None
