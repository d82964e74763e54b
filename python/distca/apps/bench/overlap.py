"""`distca bench overlap`: how much traffic over an emulated link ping-pong hides, and how long a step then takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

import distca
from distca.apps.bench.harness import Result, Row
from distca.apps.common.timing import alternate, median_ratio
from distca.trace.timeline import figures, windows

# Causal pairs are 3.4 : 0.6 on two ranks. Each half of the micro-batch has this layout.
LENGTHS = [[4096], [1024, 1024, 1024, 1024]]
HEADS = distca.Heads(q=8, kv=8, dim=64)
WIDTH = 512
LAYERS = 2
#: Measured times of tasks on such a CPU. If pairs alone were balanced, one rank would have more to do and be waited
#: for.
COST = "cpu-avx512"
#: Seconds on the link for each second of attention.
TRAFFIC = 0.6


class Layer(torch.nn.Module):
    """A transformer layer without normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, plan: distca.Plan, context: distca.Context) -> torch.Tensor:
        """x [T, WIDTH] -> [T, WIDTH]."""
        q, k, v = self.qkv(x).view(-1, 3, HEADS.q, HEADS.dim).unbind(1)
        x = x + self.out(distca.core_attention(q, k, v, plan, context=context)[0].flatten(1))
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Model(torch.nn.Module):
    """A stack of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor, plan: distca.Plan, context: distca.Context) -> torch.Tensor:
        """x [T, WIDTH] -> [T, WIDTH]."""
        for layer in self.layers:
            x = layer(x, plan, context)
        return x


class Measured(NamedTuple):
    """What one rank measured: seconds of each round, and its traces over the link."""

    ping_pong: list[float]
    single_stream: list[float]
    signal_only: list[float]
    without_link: list[float]
    traces: list[distca.Trace]
    traces_of_single: list[distca.Trace]
    traffic: float  # seconds for each second of attention


def run(rounds: int | None = None, short: bool = False) -> Result:
    """Forward and backward of two halves on two single-threaded processes."""
    rounds = rounds or (5 if short else 9)
    ranks: list[Measured] = distca.launch(_run_rank, rounds, ranks=2, threads=1)
    first = ranks[0]
    in_rounds = list(zip(*(rank.traces for rank in ranks), strict=True))
    single_in_rounds = list(zip(*(rank.traces_of_single for rank in ranks), strict=True))
    hidden, of_single = ([min(t.hidden for t in traces) for traces in each] for each in (in_rounds, single_in_rounds))
    computing, of_single_computing = ([_computing(traces) for traces in each] for each in (in_rounds, single_in_rounds))
    idle, idle_of_single = ([_idle(traces) for traces in each] for each in (in_rounds, single_in_rounds))
    return Result(
        "overlap",
        [
            Row("time on the link / time of attention, busiest rank", max(rank.traffic for rank in ranks), "x"),
            Row("traffic hidden by ping-pong, worst rank, median", statistics.median(hidden), "", at_least=0.9),
            Row("traffic hidden in a single stream", statistics.median(of_single), ""),
            Row("share of traffic's time in which a rank computes, worst rank", statistics.median(computing), ""),
            Row("the same in a single stream", statistics.median(of_single_computing), ""),
            Row("idle share of a step, slowest rank, median", statistics.median(least for least, _ in idle), ""),
            Row("idle share of a step, rank that idles most", statistics.median(most for _, most in idle), ""),
            Row("idle share in a single stream, slowest rank", statistics.median(a for a, _ in idle_of_single), ""),
            Row(
                "ping-pong step / the same with one byte a message",
                median_ratio(first.ping_pong, first.signal_only),
                "x",
                at_most=1.03,
            ),
            Row("single-stream step / ping-pong step", median_ratio(first.single_stream, first.ping_pong), "x"),
            Row("ping-pong step / the same without a link", median_ratio(first.ping_pong, first.without_link), "x"),
        ],
        {
            "lengths_of_each_half": LENGTHS,
            "heads": [HEADS.q, HEADS.kv, HEADS.dim],
            "width": WIDTH,
            "layers": LAYERS,
            "cost": COST,
            "dtype": "float32",
            "rounds": rounds,
            "hidden_in_each_round": hidden,
            "computing_in_each_round": computing,
            "idle_of_slowest_rank_in_each_round": [least for least, _ in idle],
        },
    )


def _run_rank(rounds: int) -> Measured:
    torch.manual_seed(0)
    layout = distca.Layout.from_documents(LENGTHS)
    model = Model()
    rows = layout.num_rows(dist.get_rank())
    halves = torch.randn(2, rows, WIDTH)
    cost = distca.CostModel.load(COST)
    make = partial(distca.init, max_tokens=max(map(sum, LENGTHS)), heads=HEADS, transport="shm", cost=cost)
    step = partial(_step, model, halves)
    with make(name="bench/overlap/no-link") as context:
        plan = distca.plan(layout, HEADS, context=context, tolerance=0.01, overlap=True)
        attention = _attention_seconds(context, partial(step, plan, context, False))
        size = torch.tensor([attention, float(_bytes_sent(plan))], dtype=torch.float64)
        dist.all_reduce(size, dist.ReduceOp.MAX)
        link = distca.Link(bytes_per_second=2 * LAYERS * float(size[1] / size[0]) / TRAFFIC, latency=1e-5)
        with (
            make(name="bench/overlap/link", link=link) as slow,
            make(name="bench/overlap/signals", link=distca.Link(link.bytes_per_second, link.latency, True)) as signals,
        ):
            slow.start_trace()
            works = [
                partial(step, plan, slow, True),
                partial(step, plan, slow, False),
                partial(step, plan, signals, True),
                partial(step, plan, context, True),
            ]
            traces: list[list[distca.Trace]] = [[] for _ in works]
            timed = [_between_barriers(work, slow, into) for work, into in zip(works, traces, strict=True)]
            ping_pong, single_stream, signal_only, without_link = alternate(timed, rounds)
    return Measured(
        ping_pong,
        single_stream,
        signal_only,
        without_link,
        traces=traces[0][-rounds:],
        traces_of_single=traces[1][-rounds:],
        traffic=statistics.median(trace.traffic / trace.attending for trace in traces[0]),
    )


def _computing(traces: Sequence[distca.Trace]) -> float:
    """The share of computing in the time in which rows to or from a rank were under way; the worst rank's."""
    return min(rank.hidden / rank.traffic for rank in figures(traces, windows(traces)).ranks)


def _idle(traces: Sequence[distca.Trace]) -> tuple[float, float]:
    """Idle shares of a step: of the slowest rank, which idles least, and of the rank that idles most."""
    return figures(traces, windows(traces)).idle_shares


def _step(
    model: torch.nn.Module, halves: torch.Tensor, plan: distca.Plan, context: distca.Context, ping_pong: bool
) -> None:
    calls = [{"x": x, "plan": plan, "context": context} for x in halves]
    first, second = distca.PingPong(model)(*calls) if ping_pong else (model(**call) for call in calls)
    (first.square().mean() + second.square().mean()).backward()


def _attention_seconds(context: distca.Context, step: Callable[[], object]) -> float:
    """Seconds of attention in one step: the median of three, after one step of warm-up."""
    context.start_trace()
    times = []
    for _ in range(4):
        dist.barrier()
        step()
        times.append(context.take_trace().attending)
    return statistics.median(times[1:])


def _bytes_sent(plan: distca.Plan) -> int:
    """Bytes that the rank that sends most sends in a forward and a backward step."""
    sent: dict[int, int] = {}
    for transfer in plan.transfers:
        sent[transfer.source] = sent.get(transfer.source, 0) + transfer.bytes
    return max(sent.values())


def _between_barriers(
    work: Callable[[], object], traced: distca.Context, traces: list[distca.Trace]
) -> Callable[[], None]:
    """Makes all ranks start together; a call is over when the last rank has ended. Its trace is added to the list."""

    def call() -> None:
        dist.barrier()
        traced.take_trace()
        begin = time.monotonic()
        work()
        end = time.monotonic()
        dist.barrier()
        traces.append(traced.take_trace().of_step(len(traces), begin, end))

    return call
