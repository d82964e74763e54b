"""Processes whose control transport is TCP: killed, stopped, forked and closed ones, and queued steps."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import distca
from distca import _C
from distca.testing import _emulation
from support.batches import random_batch, scattered, spill
from support.groups import compute, run_step, together
from support.oracle import NAMES
from support.processes import LIMIT, Group, connect, fault_of, held, plan_for, tensors_for
from support.tcp_ranks import WORDS

HEADS = distca.Heads(4, 2, 64, dtype=torch.bfloat16)
LENGTHS = (300, 7, 64, 129)


def obey(rank: int, ranks: int, pipe: Connection) -> None:
    """Calls the transport's methods that the test names over the pipe."""
    before = held()
    listener = _C.TcpListener("127.0.0.1")
    pipe.send(listener.address)
    joined = {
        "": _emulation.connect_tcp(
            listener=listener, rank=rank, addresses=pipe.recv(), num_signals=WORDS, timeout=LIMIT
        )
    }

    def call(name: str, *args: Any) -> Any:
        try:
            return getattr(joined[""], name)(*args)
        except distca.DistcaError as error:
            return type(error).__name__, str(error)

    def fork() -> int:
        """Forks a child that outlives this rank, like a data loader's worker, and that cannot use the transport."""
        child = os.fork()
        if child == 0:
            pipe.send([call(*one) for one in (("signal", 0, 0, 1), ("peek", 0, 0), ("load", 0), ("departed",))])
            joined.clear()
            while True:
                signal.pause()
        return child

    while (command := pipe.recv()) != "end":
        if command == "fork":
            pipe.send(fork())
        elif command == "exit":
            os._exit(0)
        elif command == "close":
            joined.clear()
            pipe.send([one for one in held() if one not in before])
        else:
            pipe.send(call(*command))


def ask(group: Group, rank: int, *command: Any) -> Any:
    group.send(rank, command)
    return group.receive(rank)


def until_gone(group: Group, rank: int, peer: int) -> tuple[int, bool]:
    deadline = time.monotonic() + LIMIT
    while (gone := ask(group, rank, "departed", peer)) is None:
        assert time.monotonic() < deadline, f"rank {rank} does not notice that rank {peer} is gone"
    return gone


def test_a_process_that_is_killed_has_died_and_one_that_closes_has_left() -> None:
    with Group(obey, 3, network=True) as group:
        group.exchange_addresses()
        ask(group, 1, "publish", 2, 22)
        assert ask(group, 0, "peek", 1, 2) == 22
        group.kill(1)
        assert until_gone(group, 0, 1) == until_gone(group, 2, 1) == (1, False)
        assert [ask(group, 0, "peek", 1, word) for word in (2, 3)] == [22, 0]
        assert ask(group, 0, "signal", 1, 0, 1) is None
        group.send(2, "close")
        assert group.receive(2) == []
        assert until_gone(group, 0, 2) == (2, True)
        assert ask(group, 0, "departed") == (1, False)
        group.send(0, "close")
        assert group.receive(0) == []
        group.tell("end", [0, 2])


def test_a_process_that_ends_without_a_goodbye_has_died() -> None:
    with Group(obey, 2, network=True) as group:
        group.exchange_addresses()
        group.send(1, "exit")
        assert until_gone(group, 0, 1) == (1, False)
        group.send(0, "end")


def test_a_stopped_process_is_silent_and_not_gone_and_answers_when_it_goes_on() -> None:
    with Group(obey, 2, network=True) as group:
        group.exchange_addresses()
        ask(group, 1, "publish", 2, 22)
        assert ask(group, 0, "peek", 1, 2) == 22
        group.signal(1, signal.SIGSTOP)
        assert [ask(group, 0, "peek", 1, word) for word in (2, 3, 2)] == [22, 0, 22]
        assert ask(group, 0, "signal", 1, 4, 44) is None
        assert ask(group, 0, "departed") is None
        group.signal(1, signal.SIGCONT)
        assert ask(group, 1, "wait", 4, 44, LIMIT)
        assert ask(group, 1, "publish", 3, 33) is None
        assert ask(group, 1, "signal", 0, 5, 55) is None
        assert ask(group, 0, "wait", 5, 55, LIMIT)
        assert ask(group, 0, "peek", 1, 3) == 33
        group.tell("end")


def test_a_forked_child_that_lives_on_does_not_hide_the_death_of_its_parent() -> None:
    with Group(obey, 2, network=True) as group:
        group.exchange_addresses()
        group.send(1, "fork")
        answers = [group.receive(1), group.receive(1)]  # the answers of the parent and of the child, in any order
        child = next(answer for answer in answers if isinstance(answer, int))
        try:
            for kind, message in next(answer for answer in answers if isinstance(answer, list)):
                assert kind == "InvalidArgumentError"
                assert "the tcp transport of rank 1 was made before this process was forked" in message
            assert ask(group, 1, "signal", 0, 0, 7) is None
            assert ask(group, 0, "wait", 0, 7, LIMIT)
            group.kill(1)
            assert until_gone(group, 0, 1) == (1, False)
            assert Path(f"/proc/{child}").exists()
        finally:  # nobody else ends it
            os.kill(child, signal.SIGKILL)
        deadline = time.monotonic() + LIMIT
        while Path(f"/proc/{child}").exists():
            assert time.monotonic() < deadline
        group.send(0, "end")


def use_a_listener_of_the_parent(rank: int, ranks: int, pipe: Connection) -> None:
    listener = _C.TcpListener("127.0.0.1")
    if os.fork() == 0:
        addresses = [listener.address]
        pipe.send(
            fault_of(
                lambda: _emulation.connect_tcp(
                    listener=listener, rank=0, addresses=addresses, num_signals=1, timeout=LIMIT
                )
            )
        )
        os._exit(0)
    os.wait()


def test_a_listener_made_before_a_fork_is_refused_in_the_child() -> None:
    with Group(use_a_listener_of_the_parent, 1, network=True) as group:
        kind, message = group.receive(0)
        assert (kind, "before the process was forked" in message) == ("InvalidArgumentError", True)


# ---- queued steps


def _plan(ranks: int, seed: int) -> distca.Plan:
    layout = (spill if seed % 2 == 0 else scattered)(LENGTHS, ranks, seed)
    return distca.plan(layout, HEADS, tolerance=0.0, min_rows=1)


def steps_of_plans(rank: int, ranks: int, pipe: Connection) -> None:
    before = held()
    plans = [_plan(ranks, seed) for seed in range(4)]
    slot_bytes = max(plan.stats.slot_bytes for plan in plans)
    options = {"device": "cpu", "control": "tcp", "heads": HEADS, "slot_bytes": slot_bytes}
    with connect(rank, pipe, timeout=120.0, **options) as context:
        assert context._core is not None
        _emulation.fill_with_nan(context._core)
        results = [run_step(random_batch(LENGTHS, HEADS, seed), plan, context) for seed, plan in enumerate(plans)]
    pipe.send([[t.detach().float().numpy() for t in result] for result in results])
    pipe.send([one for one in held() if one not in before])


@pytest.mark.parametrize("ranks", [2, 3])
def test_queued_steps_have_the_bits_of_steps_in_one_process(ranks: int) -> None:
    with Group(steps_of_plans, ranks, network=True) as group:
        group.exchange_addresses()
        of_ranks = [group.receive(rank) for rank in range(ranks)]
        assert [group.receive(rank) for rank in range(ranks)] == [[]] * ranks
    for seed in range(4):
        plan, batch = _plan(ranks, seed), random_batch(LENGTHS, HEADS, seed)
        ours = together(LENGTHS, plan.layout, [[torch.from_numpy(t) for t in results[seed]] for results in of_ranks])
        for name, a, b in zip(NAMES, ours, compute(batch, plan), strict=True):
            assert torch.equal(a, b.float()), f"{name} differs from loopback"


def step_until_a_fault(rank: int, ranks: int, pipe: Connection, odd_one: int) -> None:
    """Takes queued steps; after a few of them `odd_one` has another plan."""
    plans = [plan_for(ranks, rank, heads=HEADS), plan_for(ranks, rank, heads=HEADS, rows=80)]
    slot_bytes = max(plan.stats.slot_bytes for plan in plans)
    context = connect(rank, pipe, device="cpu", control="tcp", heads=HEADS, slot_bytes=slot_bytes, timeout=120.0)

    def step() -> None:
        plan = plans[rank == odd_one and context.step >= 10]  # each forward and each backward is a step
        q, k, v, dout = tensors_for(plan)
        distca.core_attention(q, k, v, plan, context=context)[0].backward(dout)

    with context:
        step()
        pipe.send("joined")
        while not (fault := fault_of(step))[0]:
            pass
        pipe.send(fault)
        pipe.send(fault_of(context.check))


@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (3, 1)])
def test_a_process_that_is_killed_between_queued_steps_is_named(ranks: int, victim: int) -> None:
    with Group(step_until_a_fault, ranks, -1, network=True) as group:
        group.exchange_addresses()
        for rank in range(ranks):
            assert group.receive(rank) == "joined"
        group.kill(victim)
        for rank in set(range(ranks)) - {victim}:
            kind, message = group.receive(rank)
            assert kind == "PeerDiedError" and f"rank {victim} died" in message, (kind, message)
            kind, message = group.receive(rank)
            assert kind == "ContextPoisonedError" and f"rank {victim} died" in message, (kind, message)


@pytest.mark.parametrize(("ranks", "odd_one"), [(2, 1), (3, 0)])
def test_ranks_that_disagree_on_the_plan_are_told(ranks: int, odd_one: int) -> None:
    with Group(step_until_a_fault, ranks, odd_one, network=True) as group:
        group.exchange_addresses()
        for rank in range(ranks):
            assert group.receive(rank) == "joined"
        faults = [group.receive(rank) for rank in range(ranks)]
        assert all(kind == "PlanMismatchError" for kind, _ in faults), faults
        for rank in range(ranks):
            assert group.receive(rank)[0] == "ContextPoisonedError"


def step_without_a_peer(rank: int, ranks: int, pipe: Connection) -> None:
    plan = plan_for(ranks, rank, heads=HEADS)
    options = {"heads": HEADS, "slot_bytes": plan.stats.slot_bytes}
    with connect(rank, pipe, device="cpu", control="tcp", timeout=0.2, **options) as context:
        pipe.send("joined")
        pipe.recv()
        if rank == 0:
            q, k, v, _ = tensors_for(plan)
            fault = fault_of(lambda: distca.core_attention(q, k, v, plan, context=context))
            pipe.send(fault if fault[0] else fault_of(context.check))


def test_of_a_stopped_process_it_is_said_that_it_does_not_answer_and_not_at_which_step_it_is() -> None:
    with Group(step_without_a_peer, 2, network=True) as group:
        group.exchange_addresses()
        assert [group.receive(rank) for rank in range(2)] == ["joined"] * 2
        group.signal(1, signal.SIGSTOP)
        group.send(0, "go on")
        kind, message = group.receive(0)
        assert kind == "PeerTimeoutError", (kind, message)
        assert "rank 1 does not answer the question at which step it is" in message, message
        group.signal(1, signal.SIGCONT)
        group.send(1, "go on")
