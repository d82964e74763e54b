"""`distca bench published`: the simulator beside figures that were published, from public constants alone.

Nothing is fitted. The cluster is the preset h200-ib400, whose products take the best published rate; and the same with
the paper's own assumption on products. A figure is a hit if it is within a quarter of the published one, or inside its
range.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from distca.apps.bench.harness import Result, Row
from distca.apps.common.workloads import draw_documents, pretrain_lengths, read_lengths
from distca.simulator.case import Case, Documents, Program
from distca.simulator.device import Gemm
from distca.simulator.machine import Machine
from distca.simulator.network import Network
from distca.simulator.one_f_one_b import OneForwardOneBackward
from distca.simulator.reading import read_cluster, read_model
from distca.simulator.setup import Parallelism
from distca.simulator.strategies import STRATEGIES
from distca.simulator.strategies.all_gather import AllGather

TENSOR = 8
#: Tokens of a home in the runs of each model: their batches at 128K tokens of context, table 3.
TOKENS = {"llama-8b": 131072, "llama-34b": 65536}
NODES = (8, 16, 32)
SHORT = 65536
#: How far a hit may be from the published figure.
HIT = 0.25


@dataclasses.dataclass(frozen=True)
class Beside:
    """A figure as published and as modelled. A range has two ends."""

    name: str
    least: float
    most: float
    modelled: float

    @property
    def hit(self) -> bool:
        """Whether it is near or inside what was published."""
        slack = HIT if self.least == self.most else 0.0
        return self.least * (1 - slack) <= self.modelled <= self.most * (1 + slack)

    @property
    def row(self) -> Row:
        """It as a line of a table."""
        said = f"{self.least:g}" if self.least == self.most else f"{self.least:g} to {self.most:g}"
        said = said.replace(" to inf", " or more")
        return Row(f"{self.name}: published {said}, {'hit' if self.hit else 'miss'}; modelled", self.modelled, "")


def run(rounds: int | None = None, short: bool = False) -> Result:
    """All figures, means of `rounds` draws of documents. `short` leaves out the paper's own rate of products."""
    rounds = rounds or (1 if short else 4)
    said = json.loads((files("distca.simulator") / "presets" / "published.json").read_text())
    rates = (
        {"best products": None} if short else {"best products": None, "products as assumed": said["products"]["tflops"]}
    )
    found = [
        dataclasses.replace(one, name=f"{name}: {one.name}")
        for name, rate in rates.items()
        for one in _figures(said, rate, rounds)
    ]
    hits = Row("hits (modelled, all of them)", sum(one.hit for one in found), f"of {len(found)}")
    details = {
        "published": said,
        "draws": rounds,
        "figures": [
            {**dataclasses.asdict(one), "most": None if math.isinf(one.most) else one.most, "hit": one.hit}
            for one in found
        ],
    }
    return Result("published", [*(one.row for one in found), hits], details)


def _figures(said: dict[str, Any], rate: float | None, draws: int) -> Iterator[Beside]:
    time, memory = said["gathered_share_of_time"], said["gathered_share_of_memory"]
    of_memory = dict(zip(memory["nodes"], memory["values"], strict=True))
    for nodes, share in zip(time["nodes"], time["values"], strict=True):
        of_time, kept = _gathering(nodes, rate)
        yield Beside(f"{nodes} nodes, all-gather's share of a step", share, share, of_time)
        if nodes in of_memory:
            yield Beside(f"{nodes} nodes, gathered keys' share of memory", of_memory[nodes], of_memory[nodes], kept)
    chunks = said["idle_share_of_variable_chunks"]
    for data, share in zip(chunks["data"], chunks["values"], strict=True):
        idle = _idle("variable-chunks", data, rate, draws)
        yield Beside(f"data parallel {data}, idle share of variable-length chunks", share, share, idle)
    share = said["idle_share_of_disaggregation"]["values"][0]
    yield Beside("data parallel 8, idle share of distca", share, share, _idle("distca", 8, rate, draws))
    single, byte, wlb = (said[name] for name in ("single_over_ping_pong", "one_byte_speedup", "speedup_over_ideal_wlb"))
    for model in TOKENS:
        for nodes in NODES:
            times = [_step_times(model, nodes, rate, seed) for seed in range(draws)]
            over = {name: statistics.mean(one[name] / one["distca"] for one in times) for name in times[0]}
            where = f"{model} on {nodes} nodes"
            yield Beside(f"{where}, single stream / ping-pong", single["least"], single["most"], over["distca-single"])
            faster = (model, nodes) == ("llama-8b", 8)  # the exception; nothing says by how much
            least, most = (byte["most"], math.inf) if faster else (byte["least"], byte["most"])
            yield Beside(f"{where}, speed-up by one byte a message", least, most, 1 / over["one byte"])
            yield Beside(f"{where}, ideal WLB / distca", wlb["least"], wlb["most"], over["ideal WLB"])


def _case(model: str, documents: Documents, shape: Parallelism, rate: float | None) -> Case:
    cluster = read_cluster("h200-ib400", shape.homes * shape.tensor)
    if rate is not None:
        device = dataclasses.replace(cluster.device, gemms=(Gemm(8192, 8192, 8192, rate),))
        cluster = dataclasses.replace(cluster, device=device)
    return Case(documents, cluster, read_model(model), shape)


def _played(program: Program, case: Case, *, signal_only: bool = False) -> Machine:
    network = Network(case.cluster, case.parallelism.tensor, signal_only=signal_only)
    machine = Machine(network, case.cluster.device)
    program.play(machine)
    return machine


def _gathering(nodes: int, rate: float | None) -> tuple[float, float]:
    """Shares of time and memory of gathered keys, with 128K tokens a node in documents of 32K."""
    shape = Parallelism(context=nodes, tensor=TENSOR)
    case = _case("llama-8b", [[[32768] * 4] * nodes], shape, rate)
    program = AllGather().prepare(case)
    assert isinstance(program, OneForwardOneBackward)
    without = OneForwardOneBackward(case, program.layouts)
    times = [float(_played(one, case).now.max()) for one in (program, without)]
    return 1 - times[1] / times[0], program.memory.buffers / program.memory.total


def _idle(strategy: str, data: int, rate: float | None, draws: int) -> float:
    """Mean idle share with 512K tokens a home. What tensor parallelism exchanges counts as work, as it is on all."""
    shares = []
    for seed in range(draws):
        documents = [draw_documents(lengths_of_paper(524288), data, 524288, seed)]
        case = _case("llama-8b", documents, Parallelism(data=data, tensor=TENSOR), rate)
        machine = _played(STRATEGIES[strategy].prepare(case), case)
        work = machine.dense + machine.attention + machine.exchanging
        shares.append(max(0.0, 1 - float(work.mean() / machine.now.max())))
    return statistics.mean(shares)


def _step_times(model: str, nodes: int, rate: float | None, seed: int) -> dict[str, float]:
    """Seconds of a step by each way, on the same documents."""
    documents = [draw_documents(lengths_of_paper(131072), nodes, TOKENS[model], seed)]

    def seconds(strategy: str, context: int = 1, *, signal_only: bool = False) -> float:
        shape = Parallelism(data=nodes // context, context=context, tensor=TENSOR)
        case = _case(model, documents, shape, rate)
        return float(_played(STRATEGIES[strategy].prepare(case), case, signal_only=signal_only).now.max())

    wlb = [seconds("variable-chunks"), seconds("all-gather", 2), seconds("all-gather", 4)]
    return {
        "distca": seconds("distca"),
        "distca-single": seconds("distca-single"),
        "one byte": seconds("distca", signal_only=True),
        "ideal WLB": min(wlb),
    }


def lengths_of_paper(context: int) -> list[int]:
    """The lengths that the paper draws from, at so many tokens of context."""
    lengths = read_lengths(pretrain_lengths())
    kept = [n for n in lengths if n < SHORT][::2] + 4 * [n for n in lengths if n >= SHORT]
    return [min(context, max(2, n * context // SHORT)) for n in kept]
