"""`distca bench replay`: how long ranks idle in a training step of many ranks, with and without balance.

Attention is not computed. Every task takes the time that was measured for its size (a cost table of `distca profile`),
the rest of a layer takes the time of its FLOP at the same rate, and rows travel over an emulated link. Everything that
plans and moves rows is the real code, with one thread a rank.
"""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import distca
from distca import testing
from distca.apps.bench.harness import Result, Row
from distca.apps.bench.ranks import bytes_sent, on_threads
from distca.apps.common.workloads import draw_documents, pretrain_lengths, read_lengths
from distca.trace.timeline import figures, windows

RANKS = 8
LAYERS = 4
#: Tokens of each half of a micro-batch on each rank.
TOKENS = 65536
#: Four query heads a key/value head, as in Llama 3 8B. Rows have few bytes: the link alone decides how long they take.
HEADS = distca.Heads(q=4, kv=1, dim=8, dtype=torch.bfloat16)
COSTS = "cpu-avx512"
#: FLOP of Llama 3 8B: of a layer without attention for a token, and of its 32 heads of 128 for a visible pair.
DENSE_FLOP, PAIR_FLOP = 2 * 218e6, 4 * 32 * 128
#: The share of DENSE_FLOP before attention: the projections of queries, keys and values.
BEFORE = 25 / 218
#: Mean seconds of attention of a half in forward, for a layer. Measured times are scaled to this.
SECONDS = 0.1
#: Seconds on the busiest link for each second of attention.
TRAFFIC = 0.6
IDLE_WANTED = 0.021


class Step(NamedTuple):
    """A training step: its seconds, and for each rank the share in which it neither computed nor moved rows."""

    seconds: float
    idle: list[float]


class Setup(NamedTuple):
    """What is replayed.

    Attributes:
        plans: the plans of both halves, with and without balance.
        forward, backward: the costs with which mean attention takes SECONDS in forward.
        dense: seconds of the rest of a layer in forward.
        link: the emulated link.
    """

    plans: dict[bool, list[distca.Plan]]
    forward: distca.CostModel
    backward: distca.CostModel
    dense: float
    link: distca.Link


def setup() -> Setup:
    """Draws the documents, plans, and scales the measured times."""
    documents = read_lengths(pretrain_lengths())
    layouts = [distca.Layout.from_documents(draw_documents(documents, RANKS, TOKENS, seed=seed)) for seed in range(2)]
    costs = distca.CostModel.load(COSTS)
    plans = {
        balance: [
            distca.plan(layout, HEADS, tolerance=0.01, balance=balance, cost=costs, overlap=True) for layout in layouts
        ]
        for balance in (True, False)
    }
    forward, backward = scaled_costs(layouts, SECONDS)
    dense = SECONDS * DENSE_FLOP / (PAIR_FLOP * _pairs_of_a_token(layouts))
    link = distca.Link(bytes_sent(plans[True]) / (TRAFFIC * 3.5 * 2 * SECONDS), latency=1e-5)
    return Setup(plans, forward, backward, dense, link)


def take_steps(of: Setup, rounds: int) -> dict[bool, list[Step]]:
    """The steps with and without balance, so many of each. A first one is not counted."""
    slot_bytes = max(plan.stats.slot_bytes for plan in of.plans[True])
    contexts = testing.loopback(
        RANKS,
        max_tokens=TOKENS,
        heads=HEADS,
        cost=distca.CostModel.load(COSTS),
        replay=(of.forward, of.backward),
        heap_bytes=2 * slot_bytes,
        link=of.link,
    )
    try:
        return {
            balance: [_step(contexts, of.plans[balance], of.dense, ping_pong=balance) for _ in range(rounds + 1)][1:]
            for balance in (True, False)
        }
    finally:
        for context in contexts:
            context.close()


def run(rounds: int | None = None, short: bool = False) -> Result:
    """Ping-pong over balanced plans, against one half after the other with every row computed at home."""
    rounds = rounds or (1 if short else 3)
    of = setup()
    plans, dense = of.plans, of.dense
    steps = take_steps(of, rounds)
    worst = {balance: statistics.median(max(step.idle) for step in steps[balance]) for balance in steps}
    mean = {balance: statistics.median(statistics.mean(s.idle) for s in steps[balance]) for balance in steps}
    times = {balance: statistics.median(step.seconds for step in steps[balance]) for balance in steps}
    return Result(
        "replay",
        [
            Row("idle share of a step, worst rank", worst[True], "", at_most=IDLE_WANTED),
            Row("idle share of a step, mean over ranks", mean[True], ""),
            Row("without balance: worst rank", worst[False], ""),
            Row("without balance: mean over ranks", mean[False], ""),
            Row("time of a step / without balance", times[True] / times[False], "x"),
            Row("largest / mean load, without balance", max(p.stats.imbalance_before for p in plans[True]), "x"),
        ],
        {
            "ranks": RANKS,
            "layers": LAYERS,
            "tokens_of_a_half": TOKENS,
            "lengths": pretrain_lengths().name,
            "costs": COSTS,
            "dense_seconds": dense,
            "attention_seconds": SECONDS,
            "link_traffic_of_attention": TRAFFIC,
            "rounds": rounds,
        },
    )


def scaled_costs(layouts: list[distca.Layout], mean: float) -> tuple[distca.CostModel, distca.CostModel]:
    """Costs of forward and backward, with which a rank's attention in forward takes so many seconds in the mean."""
    forward, backward = (distca.CostModel.load(COSTS, phases=(phase,)) for phase in ("forward", "backward"))
    assert forward.unit_ns is not None and backward.unit_ns is not None
    at_home = [distca.plan(layout, HEADS, balance=False, cost=forward).stats.load for layout in layouts]
    seconds = statistics.mean(statistics.mean(load) for load in at_home) * forward.unit_ns * 1e-9
    forward, backward = (
        dataclasses.replace(cost, unit_ns=cost.unit_ns * mean / seconds)  # type: ignore[operator]
        for cost in (forward, backward)
    )
    return forward, backward


def _pairs_of_a_token(layouts: list[distca.Layout]) -> float:
    """Visible pairs over tokens, mean of the layouts."""
    return statistics.mean(
        sum(n * (n + 1) / 2 for n in layout.document_lengths) / sum(layout.document_lengths) for layout in layouts
    )


class _Sleep(torch.autograd.Function):
    """Sleeps for so many seconds in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class SleepingModel(torch.nn.Module):
    """Layers of attention and sleep: so many layers, each with so many seconds of sleep in forward."""

    def __init__(self, layers: int, dense: float) -> None:
        super().__init__()
        self.layers, self.dense = layers, dense

    def forward(self, x: torch.Tensor, plan: distca.Plan, context: distca.Context) -> torch.Tensor:
        """x [T, 6, D], which is queries, keys and values -> the same shape."""
        for _ in range(self.layers):
            x = _Sleep.apply(x, BEFORE * self.dense)  # type: ignore[no-untyped-call]
            q, k, v = x.split((HEADS.q, HEADS.kv, HEADS.kv), 1)
            out, _ = distca.core_attention(q, k, v, plan, context=context)
            x = torch.cat((out, out[:, :2]), 1)
            x = _Sleep.apply(x, (1 - BEFORE) * self.dense)  # type: ignore[no-untyped-call]
        return x


def _step(contexts: list[distca.Context], plans: list[distca.Plan], dense: float, *, ping_pong: bool) -> Step:
    """Runs forward and backward of both halves on all ranks, which start together."""

    def take(rank: int, start: threading.Barrier) -> distca.Trace:
        step = _rank_step(contexts[rank], [plan.for_rank(rank) for plan in plans], dense, ping_pong)
        contexts[rank].start_trace()
        start.wait()
        begin = time.monotonic()
        step()
        end = time.monotonic()
        return contexts[rank].take_trace().of_step(0, begin, end)

    traces = on_threads(take, RANKS)
    (window,) = windows(traces)
    return Step(window.seconds, [rank.idle_share for rank in figures(traces, [window]).ranks])


def _rank_step(
    context: distca.Context, plans: list[distca.Plan], dense: float, ping_pong: bool
) -> Callable[[], object]:
    model: torch.nn.Module = SleepingModel(LAYERS, dense)
    halves = [
        {
            "x": torch.zeros(plan.num_rows, HEADS.q + 2 * HEADS.kv, HEADS.dim, dtype=HEADS.dtype, requires_grad=True),
            "plan": plan,
            "context": context,
        }
        for plan in plans
    ]
    both = distca.PingPong(model) if ping_pong else None

    def step() -> None:
        first, second = both(*halves) if both is not None else (model(**half) for half in halves)
        (first.float().sum() + second.float().sum()).backward()

    return step
