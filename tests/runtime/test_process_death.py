"""Ranks that are killed, stopped, forked or closed: what their peers say, and that nothing is left behind."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import distca
from distca import _C
from distca.testing import _emulation
from support.processes import HEADS, LIMIT, Group, connect, connect_to, fault_of, held, plan_for, tensors_for

FORWARD, BACKWARD = "forward", "backward"


class Rank:
    """A rank with one context. It does what it is told over its pipe, and answers with the fault that it met."""

    def __init__(self, rank: int, pipe: Connection, context: distca.Context, plan: distca.Plan) -> None:
        self.rank, self.pipe, self.context, self.plan = rank, pipe, context, plan
        self.inputs = tensors_for(plan)
        self.out: torch.Tensor | None = None

    def forward(self) -> None:
        q, k, v, _ = self.inputs
        self.out, _ = distca.core_attention(q, k, v, self.plan, context=self.context)

    def backward(self) -> None:
        assert self.out is not None
        self.out.backward(self.inputs[3])

    def step(self) -> None:
        self.forward()
        self.backward()

    def say_when_inside(self) -> None:
        """Tells the test as soon as the next step has begun."""
        core, step = self.context._core, self.context.step + 1

        def watch() -> None:
            while core.step < step:
                time.sleep(0.001)
            self.pipe.send("inside")

        threading.Thread(target=watch, daemon=True).start()

    def fork(self) -> int:
        """Forks a child that outlives this rank, like a data loader's worker, and that cannot use the context."""
        child = os.fork()
        if child == 0:
            self.pipe.send(fault_of(self.forward))
            while True:
                signal.pause()
        return child


def obey(rank: int, ranks: int, pipe: Connection, timeout: float = 600.0) -> None:
    before = held()
    me = Rank(rank, pipe, connect(rank, pipe, timeout=timeout), plan_for(ranks, rank))
    while (command := pipe.recv()) != "end":
        if command == "held":
            pipe.send([one for one in held() if one not in before])
        elif command == "say when inside":
            me.say_when_inside()
        elif command == "fork":
            pipe.send(me.fork())
        elif command == "close":
            me.context.close()
            pipe.send("closed")
        else:
            pipe.send(fault_of(getattr(me, command)))


def step_until_a_fault(rank: int, ranks: int, pipe: Connection) -> None:
    before = held()
    joined: list[distca.Context] = []
    fault = fault_of(lambda: joined.append(connect(rank, pipe)))
    pipe.send(fault)
    if not fault[0]:
        me = Rank(rank, pipe, joined.pop(), plan_for(ranks, rank))
        while not (fault := fault_of(me.step))[0]:
            pass
        pipe.send(fault)
        pipe.send(fault_of(me.forward))
        me.context.close()
    pipe.send([one for one in held() if one not in before])


def survivors(group: Group, victim: int) -> list[int]:
    return [rank for rank in range(len(group.pids)) if rank != victim]


def expect_death_of(victim: int, fault: tuple[str, str]) -> None:
    kind, message = fault
    assert kind == "PeerDiedError", fault
    assert re.search(rf"rank {victim} died", message), message


def expect_poisoned(victim: int, fault: tuple[str, str]) -> None:
    kind, message = fault
    assert kind == "ContextPoisonedError", fault
    assert f"rank {victim} died" in message, message


def let_survivors_end(group: Group, victim: int) -> None:
    """The survivors close their contexts, hold nothing of them any more, and end."""
    for rank in survivors(group, victim):
        group.send(rank, "close")
        assert group.receive(rank) == "closed"
        group.send(rank, "held")
        assert group.receive(rank) == []
        group.send(rank, "end")


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + LIMIT
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"process {pid} did not end within {LIMIT:g} seconds"
        time.sleep(0.001)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_a_rank_killed_at_a_random_moment_of_stepping_is_named_by_its_peers(ranks: int, seed: int) -> None:
    draw = random.Random(f"{ranks}/{seed}")
    victim, moment = draw.randrange(ranks), draw.uniform(0, 0.02)
    print(f"seed {seed}: rank {victim} is killed {moment * 1000:.3f} ms after all have joined")
    with Group(step_until_a_fault, ranks) as group:
        group.exchange_addresses()
        for rank in range(ranks):
            assert group.receive(rank) == ("", "")
        time.sleep(moment)
        group.kill(victim)
        for rank in survivors(group, victim):
            expect_death_of(victim, group.receive(rank))
            expect_poisoned(victim, group.receive(rank))
            assert group.receive(rank) == []


@pytest.mark.parametrize("phase", [FORWARD, BACKWARD])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("inside", ["the victim", "its peers", "nobody"])
def test_a_rank_killed_in_a_phase_or_between_steps_is_named(ranks: int, phase: str, inside: str) -> None:
    victim = ranks - 1
    with Group(obey, ranks) as group:
        group.exchange_addresses()
        peers = survivors(group, victim)
        group.tell("step")
        assert [group.receive(rank) for rank in range(ranks)] == [("", "")] * ranks
        if phase == BACKWARD:
            group.tell("forward")
            assert [group.receive(rank) for rank in range(ranks)] == [("", "")] * ranks
        for rank in {"the victim": [victim], "its peers": peers, "nobody": []}[inside]:
            group.tell("say when inside", [rank])
            group.tell(phase, [rank])
            assert group.receive(rank) == "inside"
        group.kill(victim)
        if inside != "its peers":
            group.tell(phase, peers)
        for rank in peers:
            expect_death_of(victim, group.receive(rank))
        for rank in peers:
            group.send(rank, "forward")
            expect_poisoned(victim, group.receive(rank))
        let_survivors_end(group, victim)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_a_rank_killed_while_the_group_connects_is_named(ranks: int, seed: int) -> None:
    draw = random.Random(f"{ranks}/{seed}")
    victim, moment = draw.randrange(ranks), draw.choice([-1.0, draw.uniform(0, 0.012)])
    print(f"seed {seed}: rank {victim} is killed {moment * 1000:.3f} ms after (-: before) it knows the addresses")
    with Group(step_until_a_fault, ranks) as group:
        addresses = [group.receive(rank) for rank in range(ranks)]
        if moment < 0:
            group.kill(victim)
            group.tell(addresses, survivors(group, victim))
        else:
            group.tell(addresses)
            time.sleep(moment)
            group.kill(victim)
        for rank in survivors(group, victim):
            kind, message = group.receive(rank)
            if kind:  # this rank is not connected yet
                print(kind, message)
                assert (kind, f"rank {victim}" in message) == ("PeerDiedError", True), message
            else:
                expect_death_of(victim, group.receive(rank))
                expect_poisoned(victim, group.receive(rank))
            assert group.receive(rank) == []


def regions(pid: int) -> int:
    """How many ranks' regions a process holds, its own among them."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    return sum(os.path.basename(os.readlink(link)).startswith("memfd:distca") for link in links)


def test_a_rank_whose_peers_end_one_after_the_other_while_it_connects_names_the_first() -> None:
    with Group(step_until_a_fault, 3) as group:
        addresses = [group.receive(rank) for rank in range(3)]
        group.tell(addresses, [0, 1])
        deadline = time.monotonic() + LIMIT
        while regions(group.pids[1]) < 2:  # rank 1 is connected to rank 0 and waits for rank 2
            assert time.monotonic() < deadline, group.stacks()
            time.sleep(0.001)
        group.kill(0)
        group.send(2, addresses)
        for rank, first in ((2, "rank 0"), (1, "rank 2")):  # rank 2 misses rank 0 and ends; then rank 1 misses rank 2
            kind, message = group.receive(rank)
            print(message)
            assert kind == "PeerDiedError", message
            assert message.startswith(f"rank {rank} found nobody at the address of {first} "), message
            assert f"rank 0 (pid {group.pids[0]})" in message, message
            assert group.receive(rank) == []


def move_rows(rank: int, ranks: int, pipe: Connection, rows: int) -> None:
    """The others compute their part of rank 0's documents. Arenas and results start out as NaN."""
    heads = distca.Heads(q=8, kv=8, dim=128)
    layout = distca.Layout.from_documents([[64] * (rows // 64), *[[]] * (ranks - 1)])
    plan = distca.plan(layout, heads, rank=rank, tolerance=0.1, capacity=2**62)
    context = connect(rank, pipe, slot_bytes=plan.stats.slot_bytes)
    _emulation.fill_with_nan(context._core)
    me = Rank(rank, pipe, context, plan)
    try:
        Path("/dev/shm/probe").touch()
        Path("/dev/shm/probe").unlink()
        room = os.statvfs("/dev/shm")
        shm_bytes = room.f_blocks * room.f_frsize
    except OSError:
        shm_bytes = 0
    fault = fault_of(me.forward)
    finite = me.out is not None and bool(torch.isfinite(me.out).all())
    pipe.send((fault, finite, shm_bytes, max(arena.total for arena in plan.stats.arena_bytes["forward"])))
    while pipe.recv() != "end":
        pipe.send(fault_of(me.forward))


@pytest.mark.parametrize(
    ("shm", "rows"), [("size=64k", 256), (None, 256), ("size=64m", 12288)], ids=["64 KB", "unwritable", "64 MB"]
)
def test_the_size_of_dev_shm_does_not_matter(shm: str | None, rows: int) -> None:
    with Group(move_rows, 2, rows, shm=shm) as group:
        if group.refusal:
            pytest.skip(group.refusal)
        group.exchange_addresses()
        for rank in range(2):
            fault, finite, shm_bytes, arena_bytes = group.receive(rank)
            assert fault == ("", "")
            assert finite
            assert shm_bytes == {"size=64k": 1 << 16, "size=64m": 1 << 26, None: 0}[shm]
            assert arena_bytes > shm_bytes
        group.kill(1)
        group.send(0, "forward")
        expect_death_of(1, group.receive(0))
        group.send(0, "end")


def test_a_forked_child_that_lives_on_does_not_hide_the_death_of_its_parent() -> None:
    with Group(obey, 2) as group:
        group.exchange_addresses()
        group.tell("step")
        assert [group.receive(rank) for rank in range(2)] == [("", "")] * 2
        group.send(1, "fork")
        answers = [group.receive(1), group.receive(1)]  # the answers of the parent and of the child, in any order
        child = next(answer for answer in answers if isinstance(answer, int))
        try:
            kind, message = next(answer for answer in answers if isinstance(answer, tuple))
            assert (kind, "fork" in message) == ("InvalidArgumentError", True), message
            group.kill(1)
            group.send(0, "forward")
            expect_death_of(1, group.receive(0))
            assert Path(f"/proc/{child}").exists()
        finally:  # nobody else ends it
            os.kill(child, signal.SIGKILL)
        wait_until_gone(child)
        let_survivors_end(group, 1)


def test_a_peer_that_closed_its_context_is_named_and_not_called_dead() -> None:
    with Group(obey, 2) as group:
        group.exchange_addresses()
        group.tell("step")
        assert [group.receive(rank) for rank in range(2)] == [("", "")] * 2
        group.send(1, "close")
        assert group.receive(1) == "closed"
        group.send(0, "forward")
        kind, message = group.receive(0)
        assert (kind, "rank 1 closed its context" in message) == ("PeerLeftError", True), message
        assert "died" not in message
        group.tell("end")


def serve_one_another(rank: int, ranks: int, pipe: Connection) -> None:
    """Like `obey`, with a plan in which rank 0 exchanges rows with the last rank alone."""
    tasks = [(0, 0, 90, 0, HEADS.kv, 0), (0, 90, 128, 0, HEADS.kv, 2), (1, 0, 90, 0, HEADS.kv, 1)]
    layout = distca.Layout.from_documents([[128], [90], []])
    plan = distca.plan(layout, HEADS, rank=rank, capacity=2**62, tasks=tasks)
    me = Rank(rank, pipe, connect(rank, pipe), plan)
    while (command := pipe.recv()) != "end":
        if command == "close":
            me.context.close()
            pipe.send("closed")
        else:
            pipe.send(fault_of(getattr(me, command)))


def test_a_rank_that_only_hears_of_a_closed_peer_is_told_the_right_name() -> None:
    with Group(serve_one_another, 3) as group:
        group.exchange_addresses()
        group.tell("step")
        assert [group.receive(rank) for rank in range(3)] == [("", "")] * 3
        group.send(2, "close")
        assert group.receive(2) == "closed"
        group.send(0, "forward")
        kind, message = group.receive(0)
        assert (kind, "rank 2 closed its context" in message) == ("PeerLeftError", True), message
        group.send(1, "forward")
        kind, message = group.receive(1)
        assert (kind, "rank 2 closed its context, as rank 0 reports" in message) == ("PeerLeftError", True), message
        assert not re.search(r"rank \d died", message), message
        group.tell("end")


def test_a_stopped_peer_is_a_timeout_that_says_who_waited_for_whom_and_what_was_seen() -> None:
    with Group(obey, 2, 0.3) as group:
        group.exchange_addresses()
        group.tell("step")
        assert [group.receive(rank) for rank in range(2)] == [("", "")] * 2
        group.signal(1, signal.SIGSTOP)
        group.send(0, "forward")
        kind, message = group.receive(0)
        assert kind == "PeerTimeoutError", message
        for part in (
            r"rank 0 of 2, step 3 \(forward\)",
            r"waited 0\.3 s for rank 1: (rows|credit) ",
            r"seen step \d+ round 0, expected step 3 round 0",
            r"rank 1 is at step 2\. What to change: .* it makes fewer calls",
        ):
            assert re.search(part, message), (part, message)
        group.send(0, "forward")
        assert group.receive(0)[0] == "ContextPoisonedError"
        group.signal(1, signal.SIGCONT)
        group.send(1, "forward")
        kind, message = group.receive(1)
        assert (kind, "rank 0 gave up waiting for rank 1" in message) == ("PeerTimeoutError", True), message
        group.tell("end")


def two_contexts(rank: int, ranks: int, pipe: Connection) -> None:
    """Ranks 0 and 1 have a second context of their own, with other heads, besides that of all three."""
    everyone, pair = _C.ShmListener(), _C.ShmListener()
    pipe.send([everyone.address, pair.address])
    addresses = pipe.recv()
    context = connect_to(everyone, rank, [ours for ours, _ in addresses])
    ranks_of = {"everyone": Rank(rank, pipe, context, plan_for(ranks, rank))}
    if rank < 2:
        heads = distca.Heads(q=4, kv=2, dim=16)
        context = connect_to(pair, rank, [theirs for _, theirs in addresses[:2]], name="pair", heads=heads)
        ranks_of["pair"] = Rank(rank, pipe, context, plan_for(2, rank, heads=heads))
    while (message := pipe.recv()) != "end":
        name, command = message
        pipe.send((fault_of(getattr(ranks_of[name], command)), ranks_of[name].out.tolist()))


def test_contexts_side_by_side_do_not_disturb_one_another_and_fail_alone() -> None:
    with Group(two_contexts, 3) as group:
        group.exchange_addresses()

        def do(name: str, command: str, ranks: list[int]) -> list[Any]:
            group.tell((name, command), ranks)
            return [group.receive(rank) for rank in ranks]

        # The forward of one context runs between forward and backward of the other.
        first = do("everyone", "forward", [0, 1, 2])
        alone = do("pair", "step", [0, 1])
        assert [fault for fault, _ in first + alone + do("everyone", "backward", [0, 1, 2])] == [("", "")] * 8
        for again in do("everyone", "step", [0, 1, 2]), do("pair", "step", [0, 1]):
            assert [fault for fault, _ in again] == [("", "")] * len(again)
            for (_, before), (_, now) in zip(first if len(again) == 3 else alone, again, strict=True):
                assert before == now
        group.kill(2)
        for fault, _ in do("everyone", "forward", [0, 1]):
            expect_death_of(2, fault)
        assert [fault for fault, _ in do("pair", "step", [0, 1])] == [("", "")] * 2
        for fault, _ in do("everyone", "forward", [0, 1]):
            expect_poisoned(2, fault)
        group.tell("end", [0, 1])
