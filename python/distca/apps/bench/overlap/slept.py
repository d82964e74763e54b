"""Ranks that sleep: threads of one process, in which attention and the rest of a layer take the time of a cost table.

Ranks that compute would have to share cores if there are more ranks than cores. Then a rank computes faster while
another one waits, and a wait costs less than it does where every rank has a processor of its own. Ranks that sleep do
not disturb each other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

import distca
from distca import testing
from distca.apps.bench.overlap.cases import LATENCY, Measured, take_step
from distca.apps.bench.ranks import bytes_sent, on_threads
from distca.apps.bench.replay import COSTS, HEADS, SleepingModel, scaled_costs
from distca.apps.common.timing import alternate

#: Mean seconds of attention of a half in forward, for a layer.
SECONDS = 0.02
#: Seconds of the rest of a layer for each second of attention, in forward.
DENSE = 0.5


def plan_of(documents: Sequence[Sequence[int]]) -> distca.Plan:
    """The plan of each half, which have the same documents."""
    layout, cost = distca.Layout.from_documents(documents), distca.CostModel.load(COSTS)
    return distca.plan(layout, HEADS, cost=cost, tolerance=0.01, overlap=True)


def run_ranks(
    documents: Sequence[Sequence[int]], layers: int, cases: Sequence[tuple[float, int]]
) -> list[list[Measured]]:
    """Measures on all ranks; the arguments are those of `computed.run_rank`. Returns a list for each rank."""
    plan = plan_of(documents)
    ranks = plan.layout.num_ranks
    forward, backward = scaled_costs([plan.layout], SECONDS)
    attention = SECONDS * (1 + _attention_of(plan, backward) / _attention_of(plan, forward))
    make = partial(
        testing.loopback,
        ranks,
        max_tokens=max(map(sum, documents)),
        heads=HEADS,
        cost=distca.CostModel.load(COSTS),
        replay=(forward, backward),
        heap_bytes=2 * plan.stats.slot_bytes,
    )
    found: list[list[Measured]] = [[] for _ in range(ranks)]
    for traffic, rounds in cases:
        speed = bytes_sent([plan]) / (traffic * attention)
        with ExitStack() as stack:
            links = (distca.Link(speed, LATENCY), distca.Link(speed, LATENCY, signal_only=True), None)
            of_kind = dict(zip(("link", "one_byte", "without"), (make(link=link) for link in links), strict=True))
            for context in (context for group in of_kind.values() for context in group):
                stack.enter_context(context)
            traces = on_threads(partial(_rounds, of_kind, plan, layers, rounds), ranks)
        for rank in range(ranks):
            found[rank].append(Measured(speed, traces[rank]))
    return found


def _attention_of(plan: distca.Plan, cost: distca.CostModel) -> float:
    """Seconds of all tasks."""
    assert cost.unit_ns is not None
    lengths, share = plan.layout.document_lengths, plan.heads.q // plan.heads.kv
    units = sum(
        cost.core.cost(0, 0, lengths[task.document], task.q_begin, task.q_end)
        * share
        * (task.kv_head_end - task.kv_head_begin)
        for task in plan.tasks
    )
    return units * cost.unit_ns * 1e-9


def _rounds(
    of_kind: dict[str, list[distca.Context]],
    of_all: distca.Plan,
    layers: int,
    rounds: int,
    rank: int,
    start: threading.Barrier,
) -> dict[str, list[distca.Trace]]:
    """The steps of one rank, in its thread."""
    contexts, plan = {kind: of[rank] for kind, of in of_kind.items()}, of_all.for_rank(rank)
    model = SleepingModel(layers, DENSE * SECONDS)
    shape = (plan.num_rows, HEADS.q + 2 * HEADS.kv, HEADS.dim)
    halves = [{"x": torch.zeros(shape, dtype=HEADS.dtype, requires_grad=True), "plan": plan} for _ in range(2)]
    traces: dict[str, list[distca.Trace]] = {kind: [] for kind in contexts}

    def step(kind: str) -> None:
        traces[kind].append(take_step(model, halves, contexts[kind], True, start.wait))

    for context in contexts.values():
        context.start_trace()
    alternate([partial(step, kind) for kind in contexts], rounds)
    return {kind: each[-rounds:] for kind, each in traces.items()}
