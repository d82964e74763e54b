"""`distca.simulate`: a training step by several strategies, modelled."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from distca.errors import InvalidArgumentError
from distca.simulator.case import Case, Memory, Program, as_documents, check_documents
from distca.simulator.machine import Event, Machine
from distca.simulator.network import Network
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
    """What a step is modelled to do. No figure here was measured.

    Attributes:
        strategy: the strategy's name.
        seconds: time of the step, that of the slowest rank.
        tokens_per_second: tokens of all documents over that time.
        mfu: operations of forward and backward, recomputation not counted, over what the devices' peak allows.
        idle: for each home the share of the step in which it did not compute. The ranks of a tensor group are one home.
        idle_by_cause: the mean of these shares by cause.
        exposed_communication: share of the step that would be gone if links took no time.
        bytes_inside, bytes_between: bytes inside nodes and between nodes, of all ranks.
        memory: of the rank that needs most.
        fits: whether that is within the device's memory.
        events: what every home did, if it was recorded.
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
) -> list[StrategyResult]:
    """Models a training step by several strategies, side by side. Nothing runs; the plans are those of `distca.plan`.

    Args:
        documents: for each micro-batch, for each of the data x context ranks, the lengths of its documents in tokens.
        cluster, model, parallelism: what the step runs on.
        strategies: names of `STRATEGIES`; by default all that this parallelism allows.
        tolerance: that of distca's plans.
        record: whether results have the events of the step.

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
    case = Case(as_documents(documents), cluster, model, parallelism, tolerance)
    parallelism.check(cluster, model)
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
        chosen = [name for name in chosen if _is_apart(name, parallelism)]
    return [play(name, STRATEGIES[name].prepare(case), case, record=record) for name in chosen]


def _is_apart(name: str, parallelism: Parallelism) -> bool:
    """Whether a strategy is there in this parallelism, and differs from the others."""
    if parallelism.chunks > 1:
        return name.startswith("distca")
    return name != "all-gather" or parallelism.context > 1


def play(name: str, program: Program, case: Case, *, record: bool = False) -> StrategyResult:
    """Runs a strategy's program, and again without what makes homes idle."""
    tensor, device = case.parallelism.tensor, case.cluster.device

    def run(*, free_rows: bool = False, ideal: bool = False, even: bool = False, record: bool = False) -> Machine:
        network = Network(case.cluster, tensor, free_rows=free_rows, ideal=ideal)
        machine = Machine(network, device, record=record, even=even)
        program.play(machine)
        return machine

    machine = run(record=record)
    seconds = float(machine.now.max())
    work = (machine.dense + machine.attention) / seconds
    others = (run(free_rows=True), run(ideal=True), run(ideal=True, even=True))
    # Attention that makes up for unequal tokens would be a cause below 0, if it were even.
    left = list(itertools.accumulate((float(one.now.max()) / seconds for one in others), min, initial=1.0))
    causes = [max(0.0, before - after) for before, after in itertools.pairwise([*left, float(work.mean())])]
    peak = case.cluster.device.peak_tflops * 1e12 * case.cluster.ranks
    memory = program.memory
    return StrategyResult(
        strategy=name,
        seconds=seconds,
        tokens_per_second=sum(case.lengths) / seconds,
        mfu=case.model.flop(case.lengths) / (seconds * peak),
        idle=(1 - work).tolist(),
        idle_by_cause=IdleShares(*causes),
        exposed_communication=causes[0] + causes[1],
        bytes_inside=machine.network.bytes_inside * tensor,
        bytes_between=machine.network.bytes_between * tensor,
        memory=memory,
        fits=memory.total <= case.cluster.device.memory,
        events=machine.events,
    )


def spans_of(events: Sequence[Event], home: int) -> list[tuple[str, float, float]]:
    """What a home did, one after the other: what, and the seconds of begin and end. Empty spans are left out."""
    spans = ((event.what, float(event.begin[home]), float(event.end[home])) for event in events)
    return list(itertools.filterfalse(lambda span: span[1] == span[2], spans))
