"""`distca plan --compare`: balance and bytes of every strategy on one batch, without a cluster. Plans are real."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from distca.apps.common.files import write_given
from distca.errors import InvalidArgumentError
from distca.simulator.case import Case, Program
from distca.simulator.device import Device, Gemm
from distca.simulator.machine import Machine
from distca.simulator.network import Network
from distca.simulator.setup import Cluster, LinkClass, Model, Parallelism
from distca.simulator.strategies import STRATEGIES
from distca.simulator.verdict import LITTLE, OURS

#: Attention whose time is the number of visible pairs; backward counts 2.5 times forward.
_PAIRS: Mapping[str, Any] = {
    "heads": [1, 1, 1, 1],
    "points": [{"q_rows": 1, "kv_rows": 1, "forward_ns": 1.0, "backward_ns": 2.5}],
}
_FIXED = {
    "layout": "documents",
    "longer_than": None,
    "context": None,
    "mask": "causal",
    "window": None,
    "servers": None,
    "value_dim": None,
    "min_rows": None,
    "objective": "all",
    "whole_heads": False,
    "retain_bytes": 0,
    "capacity": None,
    "no_balance": False,
    "heap": None,
    "plot": None,
}
"""What the comparison does not take, with the values that it has instead."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """A strategy on a batch.

    Attributes:
        strategy: its name.
        context: ranks of a context parallel group; 1 for strategies that keep documents whole.
        attention: largest attention of a rank over the mean.
        tokens: most tokens of a rank over the mean.
        rank_bytes: bytes of attention that a rank sends in forward and backward of a layer, the mean over ranks.
        padding: share of the rows that belong to no document.
    """

    strategy: str
    context: int
    attention: float
    tokens: float
    rank_bytes: float
    padding: float


def run(options: argparse.Namespace, documents: Sequence[Sequence[int]]) -> int:
    """Prints the comparison, and writes it to ``--json``."""
    for name, value in _FIXED.items():
        if getattr(options, name) != value:
            raise InvalidArgumentError(
                f"--compare compares whole batches of causal attention: leave out --{name.replace('_', '-')}"
            )
    model = Model(1, 1, 1, 1, options.q_heads, options.kv_heads, options.head_dim, options.dtype)
    compared = compare(
        documents,
        model=model,
        cost=options.cost,
        ranks_per_node=options.ranks_per_node,
        tolerance=options.tolerance,
    )
    print(table(compared))
    if options.json is not None:
        content = {"kind": "planned", "strategies": [dataclasses.asdict(one) for one in compared]}
        write_given("--json", options.json, json.dumps(content, indent=1) + "\n")
    return 0


def compare(
    documents: Sequence[Sequence[int]],
    *,
    model: Model,
    cost: str = "pairs",
    ranks_per_node: int | None = None,
    tolerance: float = 0.05,
) -> list[Compared]:
    """Every strategy on one micro-batch; strategies that cut documents have the largest context that they allow.

    Args:
        documents: for each rank the lengths of its documents.
        model: the heads of its attention count.
        cost: ``"pairs"``, or a cost table with times.
        ranks_per_node: neighbouring ranks that are a node; all by default.
        tolerance: that of distca's plans.

    Raises:
        InvalidArgumentError: there are no documents, or a value is not allowed.
    """
    ranks = len(documents)
    if not any(documents):
        raise InvalidArgumentError("plan --compare: there are no documents")
    link = LinkClass(1.0, 0.0)  # no time counts
    device = Device(_PAIRS if cost == "pairs" else cost, (Gemm(1, 1, 1, 1.0),), 1.0, 1.0, 1.0)
    cluster = Cluster(ranks, ranks_per_node or ranks, link, link, device)
    compared = []
    for name, strategy in STRATEGIES.items():
        for context in reversed([n for n in range(1, ranks + 1) if ranks % n == 0]):
            shape = Parallelism(data=ranks // context, context=context)
            if (strategy.cuts or context == 1) and strategy.applies(shape, model):
                break
        else:
            continue
        if name in OURS:
            shape = Parallelism(data=ranks)  # documents stay where they are
        case = Case([[list(of_rank) for of_rank in documents]], cluster, model, shape, tolerance)
        compared.append(_compared(name, strategy.prepare(case), case))
    return compared


def _compared(name: str, program: Program, case: Case) -> Compared:
    machine, end = (Machine(Network(case.cluster, 1, ideal=True), case.cluster.device) for _ in range(2))
    program.play(machine)
    case.finish(end)  # the gradients of weights travel alike in all strategies
    network, weights = machine.network, end.network
    moved = network.bytes_inside + network.bytes_between - weights.bytes_inside - weights.bytes_between
    tokens = [sum(layout.num_rows(home) for layout in program.layouts) for home in range(case.num_homes)]
    seconds = machine.attention
    return Compared(
        name,
        case.parallelism.context,
        float(seconds.max() / seconds.mean()),
        max(tokens) * len(tokens) / sum(tokens),
        moved / case.num_homes,
        1 - sum(case.lengths) / sum(tokens),
    )


def table(compared: Sequence[Compared]) -> str:
    """The strategies side by side, and whether there is something to balance."""
    lines = [
        f"{'planned, not run':20} {'context':>7} {'attention':>10} {'tokens':>8} {'bytes a rank':>13} {'padding':>8}"
    ]
    lines += [
        f"{one.strategy:20} {one.context:7} {one.attention:10.3f} {one.tokens:8.3f} {one.rank_bytes / 1e6:10,.1f} MB "
        f"{one.padding:8.1%}"
        for one in compared
    ]
    lines.append("attention, tokens: largest / mean of the ranks; bytes: forward and backward of a layer")
    alone = next((one for one in compared if one.strategy == "unbalanced"), None)
    if alone is not None and alone.attention <= 1 + LITTLE:
        lines.append(f"nothing to gain: all ranks have equal attention (largest / mean {alone.attention:.3f})")
    return "\n".join(lines)
