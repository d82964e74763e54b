"""Ranks that compute: processes with one thread each, attention and matrix products of a small model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

import distca
from distca.apps.bench.overlap.cases import LATENCY, Measured, take_step
from distca.apps.bench.ranks import bytes_sent
from distca.apps.common.timing import alternate

HEADS = distca.Heads(q=4, kv=4, dim=64)
#: The model is narrow. With short documents, attention then has as large a part as in a large model with long ones.
WIDTH = 128
#: Measured times of tasks on such a CPU. If pairs alone were balanced, one rank would have more to do and be waited
#: for.
COST = "cpu-avx512"


class Layer(torch.nn.Module):
    """A transformer layer without normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * HEADS.q * HEADS.dim, bias=False)
        self.out = torch.nn.Linear(HEADS.q * HEADS.dim, WIDTH, bias=False)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, plan: distca.Plan, context: distca.Context) -> torch.Tensor:
        """x [T, WIDTH] -> [T, WIDTH]."""
        q, k, v = self.qkv(x).view(-1, 3, HEADS.q, HEADS.dim).unbind(1)
        x = x + self.out(distca.core_attention(q, k, v, plan, context=context)[0].flatten(1))
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Model(torch.nn.Module):
    """A stack of layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(layers)])

    def forward(self, x: torch.Tensor, plan: distca.Plan, context: distca.Context) -> torch.Tensor:
        """x [T, WIDTH] -> [T, WIDTH]."""
        for layer in self.layers:
            x = layer(x, plan, context)
        return x


def plan_of(documents: Sequence[Sequence[int]], context: distca.Context | None = None) -> distca.Plan:
    """The plan of each half, which have the same documents."""
    layout, cost = distca.Layout.from_documents(documents), distca.CostModel.load(COST)
    return distca.plan(layout, HEADS, context=context, cost=cost, tolerance=0.01, overlap=True)


def run_rank(
    documents: Sequence[Sequence[int]], layers: int, cases: Sequence[tuple[float, int]], single_stream: bool
) -> list[Measured]:
    """Measures on one rank of a process group.

    Args:
        documents: lengths of each rank's documents, in each half.
        layers: layers of the model.
        cases: measured one after another: for each the seconds on the link for each second of attention, in a step,
            and how often each kind of step is taken.
        single_stream: whether steps with one half after the other are taken too.
    """
    torch.manual_seed(0)
    model = Model(layers)
    inputs = torch.randn(2, sum(documents[dist.get_rank()]), WIDTH)
    cost = distca.CostModel.load(COST)
    make = partial(distca.init, max_tokens=max(map(sum, documents)), heads=HEADS, transport="shm", cost=cost)
    found = []
    with make(name="bench/overlap/without") as without:
        plan = plan_of(documents, without)
        halves = [{"x": x, "plan": plan} for x in inputs]
        step = partial(take_step, model, halves, together=dist.barrier)
        without.start_trace()
        # The least of some steps: what else the machine does only adds to it.
        attention = _most(min([step(without, False).attending for _ in range(4)][1:]))
        for traffic, rounds in cases:
            speed = 2 * layers * bytes_sent([plan]) / (traffic * attention)
            with (
                make(name="bench/overlap/link", link=distca.Link(speed, LATENCY)) as link,
                make(name="bench/overlap/one-byte", link=distca.Link(speed, LATENCY, signal_only=True)) as one_byte,
            ):
                kinds = {"link": (link, True), "one_byte": (one_byte, True), "without": (without, True)}
                if single_stream:
                    kinds |= {"single": (link, False), "single_one_byte": (one_byte, False)}
                for context in (link, one_byte):
                    context.start_trace()
                traces: dict[str, list[distca.Trace]] = {kind: [] for kind in kinds}
                works = [partial(_keep, traces[kind], partial(step, *of)) for kind, of in kinds.items()]
                alternate(works, rounds)
            found.append(Measured(speed, {kind: each[-rounds:] for kind, each in traces.items()}))
    return found


def _keep(traces: list[distca.Trace], step: Callable[[], distca.Trace]) -> None:
    traces.append(step())


def _most(seconds: float) -> float:
    """The largest value of all ranks."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)
