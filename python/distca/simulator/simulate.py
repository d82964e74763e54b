"""`distca.simulate`: a training step by several strategies, modelled."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from distca.errors import InvalidArgumentError
from distca.simulator.case import Case, Memory, Program, as_documents, check_documents
from distca.simulator.contention import played
from distca.simulator.machine import Event, Machine
from distca.simulator.setup import Cluster, Model, Parallelism
from distca.simulator.strategies import STRATEGIES


@dataclasses.dataclass(frozen=True)
class IdleShares:
    """Why homes idle: parts of their mean idle share, which together are all of it.

    Each is what a step without its cause would save, after those above it are gone.

    Attributes:
        rows: queries, keys and results travel, or keys are gathered.
        links: tensor parallelism, gradients, weights and activations between stages travel.
        uneven: homes have unequal shares of attention.
        fill: what is left: stages of a pipeline without a micro-batch, and homes with fewer tokens than others.
    """

    rows: float
    links: float
    uneven: float
    fill: float

    @property
    def attention(self) -> float:
        """The part that attention is the cause of."""
        return self.rows + self.uneven


@dataclasses.dataclass(frozen=True)
class StrategyResult:
    """What a step is modelled to do; of several steps the mean. No figure here was measured.

    Attributes:
        strategy: the strategy's name.
        seconds: time of the step, that of the slowest rank.
        tokens_per_second: tokens of all documents over that time.
        mfu: operations of forward and backward, recomputation not counted, over what the devices' peak allows.
        idle: for each home the share of the step in which it did not compute. The ranks of a tensor group are one home.
        idle_by_cause: the mean of these shares by cause.
        exposed_communication: share of the step that would be gone if links took no time.
        bytes_inside, bytes_between: bytes inside nodes and between nodes, of all ranks.
        padding: share of the rows that belong to no document.
        attention: share of the step in which the rank that has most attention computes it.
        memory: of the rank that needs most.
        fits: whether that is within the device's memory.
        events: what every home did in the first step, if it was recorded.
    """

    strategy: str
    seconds: float
    tokens_per_second: float
    mfu: float
    idle: list[float]
    idle_by_cause: IdleShares
    exposed_communication: float
    bytes_inside: float
    bytes_between: float
    padding: float
    attention: float
    memory: Memory
    fits: bool
    events: list[Event] = dataclasses.field(repr=False, compare=False, default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Everything but the events, for JSON. ``kind`` says that it is modelled."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "events"}
        nested = {name: dataclasses.asdict(values[name]) for name in ("idle_by_cause", "memory")}
        return {"kind": "modelled", **values, **nested}


def simulate(
    documents: Sequence[Sequence[Sequence[int]]],
    *,
    cluster: Cluster,
    model: Model,
    parallelism: Parallelism,
    strategies: Iterable[str] | None = None,
    tolerance: float = 0.05,
    record: bool = False,
    following: Sequence[Sequence[Sequence[Sequence[int]]]] = (),
) -> list[StrategyResult]:
    """Models a training step by several strategies, side by side. Nothing runs; the plans are those of `distca.plan`.

    Args:
        documents: for each micro-batch, for each of the data x context ranks, the lengths of its documents in tokens.
        cluster, model, parallelism: what the step runs on.
        strategies: names of `STRATEGIES`; by default all that this parallelism allows.
        tolerance: that of distca's plans.
        record: whether results have the events of the step.
        following: the documents of further steps, in the same form. A strategy may move documents to later steps. Steps
            that it needs besides, to take what is left at the end, count in the time.

    Returns:
        A result for each strategy, in their order.

    Raises:
        InvalidArgumentError: there are no documents, they are not those of this parallelism, the parallelism does not
            fit the cluster or the model, a strategy is unknown, or weights and optimizer alone exceed the memory.

    Examples:
        >>> from distca.simulator.reading import read_cluster, read_model
        >>> from distca.simulator.setup import Parallelism
        >>> alone, balanced = distca.simulate(
        ...     [[[65536], [32768] * 2]],
        ...     cluster=read_cluster("h200-ib400", ranks=16),
        ...     model=read_model("llama-8b"),
        ...     parallelism=Parallelism(data=2, tensor=8),
        ...     strategies=["unbalanced", "distca-single"],
        ... )
        >>> balanced.seconds < alone.seconds
        True
    """
    cases = [Case(as_documents(of), cluster, model, parallelism, tolerance) for of in (documents, *following)]
    parallelism.check(cluster, model)
    for case in cases:
        check_documents(case.documents, parallelism)
    if case.state_bytes > cluster.device.memory:
        raise InvalidArgumentError(
            f"simulate: weights, gradients and optimizer take {case.state_bytes / 1e9:,.0f} GB a rank; the device has "
            f"{cluster.device.memory / 1e9:,.0f} GB: use more tensor or pipeline ranks, or fsdp"
        )
    chosen = list(STRATEGIES if strategies is None else strategies)
    unknown = [name for name in chosen if name not in STRATEGIES]
    if unknown:
        raise InvalidArgumentError(f"simulate: strategy {unknown[0]!r}; allowed are {', '.join(STRATEGIES)}")
    if strategies is None:
        chosen = [name for name in chosen if STRATEGIES[name].applies(parallelism, model, len(cases))]
    return [play(name, STRATEGIES[name].prepare_steps(cases), cases, record=record) for name in chosen]


def padding_of(programs: Sequence[Program]) -> float:
    """The share of the rows that belong to no document."""
    layouts = [layout for program in programs for layout in program.layouts]
    rows = sum(layout.num_rows(rank) for layout in layouts for rank in range(layout.num_ranks))
    return 1 - sum(sum(layout.document_lengths) for layout in layouts) / rows


def play(name: str, programs: Sequence[Program], cases: Sequence[Case], *, record: bool = False) -> StrategyResult:
    """Runs the programs of a strategy's steps, and again without what makes homes idle."""
    case, count = cases[0], len(cases)
    tensor, device = case.parallelism.tensor, case.cluster.device

    def run(*, free_rows: bool = False, ideal: bool = False, even: bool = False, record: bool = False) -> list[Machine]:
        return [
            played(
                program, case.cluster, tensor, record=record and not number, even=even, free_rows=free_rows, ideal=ideal
            )
            for number, program in enumerate(programs)
        ]

    def seconds(machines: Sequence[Machine]) -> float:
        return sum(float(machine.now.max()) for machine in machines)

    machines = run(record=record)
    total = seconds(machines)
    work = torch.stack([machine.dense + machine.attention for machine in machines]).sum(0) / total
    others = (run(free_rows=True), run(ideal=True), run(ideal=True, even=True))
    # Attention that makes up for unequal tokens would be a cause below 0, if it were even.
    left = list(itertools.accumulate((seconds(other) / total for other in others), min, initial=1.0))
    causes = [max(0.0, before - after) for before, after in itertools.pairwise([*left, float(work.mean())])]
    lengths = [n for of_step in cases for n in of_step.lengths]
    peak = device.peak_tflops * 1e12 * case.cluster.ranks
    memory = max((program.memory for program in programs), key=lambda memory: memory.total)
    return StrategyResult(
        strategy=name,
        seconds=total / count,
        tokens_per_second=sum(lengths) / total,
        mfu=case.model.flop(lengths) / (total * peak),
        idle=(1 - work).tolist(),
        idle_by_cause=IdleShares(*causes),
        exposed_communication=causes[0] + causes[1],
        bytes_inside=sum(machine.network.bytes_inside for machine in machines) * tensor / count,
        bytes_between=sum(machine.network.bytes_between for machine in machines) * tensor / count,
        padding=padding_of(programs),
        attention=float(torch.stack([machine.attention for machine in machines]).sum(0).max()) / total,
        memory=memory,
        fits=memory.total <= device.memory,
        events=machines[0].events,
    )


def spans_of(events: Sequence[Event], home: int) -> list[tuple[str, float, float]]:
    """What a home did, one after the other: what, and the seconds of begin and end. Empty spans are left out."""
    spans = ((event.what, float(event.begin[home]), float(event.end[home])) for event in events)
    return list(itertools.filterfalse(lambda span: span[1] == span[2], spans))
