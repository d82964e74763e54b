"""Signals while a rank waits in the core: handlers run at once. What they raise ends the wait and is told to peers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import distca
from distca import _C
from support.processes import Group, connect, connect_to, fault_of, plan_for, tensors_for


class Asked(BaseException):
    """What a program's own handler raises."""


def raise_asked(*_: object) -> None:
    raise Asked


def outcome_of(function: Callable[[], Any]) -> tuple[str, str]:
    """The type of what the call raises, and the text of the error that was on its way when that was raised, or its own.
    ("", "") if the call returns.
    """
    try:
        function()
    except BaseException as error:
        return type(error).__name__, str(error.__context__ or error)
    return "", ""


def say_when_inside(context: distca.Context, pipe: Connection) -> None:
    """Says so when this process is in its next step."""
    next_step = context.step + 1

    def say() -> None:
        while context._core.step < next_step:
            time.sleep(0.001)
        pipe.send("inside")

    threading.Thread(target=say).start()


def wait_for_the_others(rank: int, ranks: int, pipe: Connection, phase: str, handler: str) -> None:
    """Rank 0 begins a step, says so, and waits for the others. They come when they are told to."""
    handlers = {
        "default": signal.default_int_handler,
        "raises": raise_asked,
        "notes": lambda number, frame: pipe.send("noted"),
    }
    signal.signal(signal.SIGINT, handlers[handler])
    plan = plan_for(ranks, rank)
    context = connect(rank, pipe)
    q, k, v, dout = tensors_for(plan)

    def forward() -> torch.Tensor:
        if phase == "in parts":
            step = distca.dispatch(q, k, v, plan, context=context)
            distca.attend(step)
            return distca.collect(step)[0]
        return distca.core_attention(q, k, v, plan, context=context)[0]

    out = forward() if phase == "backward" else None
    if rank == 0:
        say_when_inside(context, pipe)
    else:
        pipe.recv()
    pipe.send(outcome_of(forward if out is None else lambda: out.backward(dout)))
    pipe.send(fault_of(forward))
    pipe.recv()


@pytest.mark.parametrize("phase", ["forward", "backward", "in parts"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("handler", "raised"), [("default", "KeyboardInterrupt"), ("raises", "Asked")])
def test_a_rank_that_waits_ends_with_what_the_handler_raises(phase: str, ranks: int, handler: str, raised: str) -> None:
    others = list(range(1, ranks))
    with Group(wait_for_the_others, ranks, phase, handler) as group:
        group.exchange_addresses()
        assert group.receive(0) == "inside"
        os.kill(group.pids[0], signal.SIGINT)
        kind, waited_for = group.receive(0)
        assert kind == raised
        assert f"interrupted by {raised} while it waited for rank " in waited_for
        group.tell("come", others)
        for rank in others:
            kind, message = group.receive(rank)
            assert kind == "PeerLeftError", message
            assert "rank 0 abandoned this context after an error of its own" in message
            assert f"interrupted by {raised}" in message
        for rank in range(ranks):
            assert group.receive(rank)[0] == "ContextPoisonedError"
        group.tell("end")


def test_a_handler_that_returns_runs_at_once_and_the_step_goes_on() -> None:
    with Group(wait_for_the_others, 2, "forward", "notes") as group:
        group.exchange_addresses()
        assert group.receive(0) == "inside"
        for _ in range(2):
            os.kill(group.pids[0], signal.SIGINT)
            assert group.receive(0) == "noted"  # rank 1 has not come yet
        group.send(1, "come")
        for rank in range(2):
            assert [group.receive(rank), group.receive(rank)] == [("", "")] * 2
        group.tell("end")


class Late(Exception):
    """What a handler raises that is an ordinary error, as those of time limits and of elastic training are."""


def raise_late(*_: object) -> None:
    raise Late


def wait_in_a_job(rank: int, ranks: int, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, raise_late)
    plan = plan_for(ranks, rank)
    context = connect(rank, pipe)
    q, k, v, _ = tensors_for(plan)
    told = []

    def tell_the_job(kind: str, text: str) -> None:
        told.append((kind, text))

    context._core.set_job([], tell_the_job)
    if rank == 0:
        say_when_inside(context, pipe)
        pipe.send(outcome_of(lambda: distca.core_attention(q, k, v, plan, context=context)))
        pipe.send(told)
    pipe.recv()


def test_the_rest_of_the_job_is_told_what_a_handler_has_raised() -> None:
    with Group(wait_in_a_job, 2) as group:
        group.exchange_addresses()
        assert group.receive(0) == "inside"
        os.kill(group.pids[0], signal.SIGINT)
        assert group.receive(0)[0] == "Late"
        [(kind, text)] = group.receive(0)
        assert (kind, "interrupted by Late while it waited for rank 1" in text) == ("OperatingSystemError", True), text
        group.tell("end")


def connect_interrupted(rank: int, ranks: int, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    listener = _C.ShmListener()
    pipe.send(listener.address)
    addresses = pipe.recv()

    def join() -> None:
        pipe.send("connecting")
        connect_to(listener, rank, addresses)

    pipe.send(outcome_of(join))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_waits_for_others_to_connect_can_be_interrupted(ranks: int) -> None:
    with Group(connect_interrupted, ranks) as group:
        addresses = [group.receive(rank) for rank in range(ranks)]
        group.send(0, addresses)
        assert group.receive(0) == "connecting"
        os.kill(group.pids[0], signal.SIGINT)
        assert group.receive(0)[0] == "KeyboardInterrupt"
        group.tell(addresses, list(range(1, ranks)))
        for rank in range(1, ranks):
            assert group.receive(rank) == "connecting"
            kind, message = group.receive(rank)
            assert (kind, "rank 0" in message) == ("PeerDiedError", True), message
