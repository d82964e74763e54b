"""A request for deterministic attention reaches the backend, whichever way a step is taken.

The CPU's kernel is always deterministic, so these tests look at what a backend is told: recording_backend.cpp writes it
down.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import distca
from support.groups import on_all_ranks
from support.processes import HEADS, Group, tensors_for
from support.programs import RECORDER


@pytest.fixture(scope="module")
def recorder() -> Path:
    """The compiled recording backend."""
    return RECORDER.path()


# Below are the ways to take a step: each is run by the rank that has all rows, or by the server, which has none.


def whole_step(plan: distca.Plan, context: distca.Context, **options: bool) -> None:
    q, k, v, dout = tensors_for(plan)
    out, _ = distca.core_attention(q, k, v, plan, context=context, **options)
    out.backward(dout)


def step_of_the_operator(plan: distca.Plan, context: distca.Context, **options: bool) -> None:
    q, k, v, dout = tensors_for(plan)
    out, _ = torch.ops.distca.core_attention(q, k, v, plan.tensor, context=context.name, **options)
    out.backward(dout)


def served_step(plan: distca.Plan, context: distca.Context, **options: bool) -> None:
    for phase in ("forward", "backward"):
        distca.serve(plan, phase, context=context, **options)


def step_of_a_half(plan: distca.Plan, context: distca.Context, **options: bool) -> None:
    whole_step(plan.for_parts(), context, **options)


def two_steps_in_parts(plan: distca.Plan, context: distca.Context, **options: bool) -> None:
    *rows, dout = tensors_for(plan)
    steps = [distca.dispatch(*rows, plan, context=context, **options) for _ in range(2)]
    for step in steps:
        distca.attend(step)
    outs = [distca.collect(step)[0] for step in steps]
    (outs[0] + outs[1]).backward(dout)


def two_served_steps_in_parts(plan: distca.Plan, context: distca.Context, **options: bool) -> None:
    for phase in ("forward", "backward"):
        distca.serve_ping_pong([(plan, plan)], phase, context=context, **options)


Way = Callable[..., None]
WAYS: dict[str, tuple[Way, Way]] = {
    "core_attention": (whole_step, whole_step),
    "the operator": (step_of_the_operator, step_of_the_operator),
    "serve": (whole_step, served_step),
    "core_attention in a half": (step_of_a_half, step_of_a_half),
    "dispatch": (two_steps_in_parts, two_steps_in_parts),
    "serve_ping_pong": (two_steps_in_parts, two_served_steps_in_parts),
}


def _steps(rank: int, ranks: int, pipe: Connection, recorder: str) -> None:
    """For each way and each kind of request, sends what the backend of rank 1 was told. Rank 1 computes all rows of
    rank 0.
    """
    library = ctypes.CDLL(recorder)
    library.recorded_calls.restype = ctypes.c_char_p
    library.record_attention()
    layout = distca.Layout.from_documents([[40, 24], []])
    plan = distca.plan(layout, HEADS, servers=[1], capacity=2**62)
    contexts = distca.loopback(2, max_tokens=64, heads=HEADS, attention="flash")
    for ways in WAYS.values():
        for asked, by_torch in ((False, False), (True, False), (False, True)):
            library.forget_calls()
            # Torch's switch, without the part that imports inductor.
            torch.set_deterministic_debug_mode("error" if by_torch else "default")
            options = [{}, {"deterministic": True} if asked else {}]  # ranks need not make the same request
            on_all_ranks(contexts, lambda r, context: ways[r](plan.for_rank(r), context, **options[r]))  # noqa: B023
            pipe.send(library.recorded_calls().decode())
    for context in contexts:
        context.close()


def test_attention_is_deterministic_where_the_caller_or_torch_asks_for_it(recorder: Path) -> None:
    with Group(_steps, 1, str(recorder)) as group:
        told = {way: [group.receive(0) for _ in range(3)] for way in WAYS}
    whole, in_parts = ["fb", "FB", "FB"], ["ffbb", "FFBB", "FFBB"]
    assert told == {
        "core_attention": whole,
        "the operator": ["fb", "FB", "fb"],  # the operator reads its argument alone
        "serve": whole,
        "core_attention in a half": whole,
        "dispatch": in_parts,
        "serve_ping_pong": in_parts,
    }
