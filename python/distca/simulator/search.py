"""Every strategy at its best parallelism: the one with most tokens a second of those that fit into the memory.

A set-up is a `Parallelism`. The sequences of a step are the same in all of them. Set-ups are left out only if another
one is as fast for certain, or if they cannot fit; `Found` counts them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from distca.errors import InvalidArgumentError
from distca.simulator.bounds import end_seconds, least_memory, least_work
from distca.simulator.case import Case, Documents
from distca.simulator.machine import Deadline, Machine, TooSlow
from distca.simulator.network import Network
from distca.simulator.setup import Cluster, Model, Parallelism
from distca.simulator.simulate import StrategyResult, result_of
from distca.simulator.strategies import STRATEGIES

#: What a set-up may differ in.
DIMENSIONS = ("data", "context", "tensor", "pipeline", "micro_batches", "fsdp", "recompute")


@dataclasses.dataclass(frozen=True)
class Found:
    """The best set-up of a strategy.

    Attributes:
        strategy: the strategy's name.
        case: the best set-up with its documents; None if no set-up fits.
        result: its step; None if no set-up fits.
        tried: set-ups whose step was modelled.
        slower: set-ups that cannot be faster than the best one, because of what every rank must compute, or because
            they recompute and fit without.
        too_large: set-ups that do not fit into the memory.
    """

    strategy: str
    case: Case | None
    result: StrategyResult | None
    tried: int
    slower: int
    too_large: int

    def as_json(self) -> dict[str, Any]:
        """Everything but the documents, for JSON."""
        counts = {name: getattr(self, name) for name in ("strategy", "tried", "slower", "too_large")}
        if self.case is None or self.result is None:
            return {**counts, "parallelism": None, "result": None}
        parallelism = dataclasses.asdict(self.case.parallelism)
        return {**counts, "parallelism": parallelism, "result": self.result.as_json()}


def search(
    sequences: Sequence[Sequence[int]],
    *,
    cluster: Cluster,
    model: Model,
    strategies: Iterable[str] | None = None,
    fixed: Mapping[str, int | bool] | None = None,
    tolerance: float = 0.05,
) -> list[Found]:
    """Finds the best set-up of every strategy for a step on the same sequences.

    Args:
        sequences: the lengths of each sequence's documents, in tokens. A data rank takes whole sequences; a strategy
            may cut their documents over its context ranks.
        cluster, model: what the step runs on.
        strategies: names of `STRATEGIES`; all by default.
        fixed: values of some `DIMENSIONS`.
        tolerance: that of distca's plans.

    Raises:
        InvalidArgumentError: a strategy or a dimension is unknown, there are no documents, or no strategy has a set-up
            that fits.
    """
    chosen = list(STRATEGIES if strategies is None else strategies)
    unknown = [name for name in chosen if name not in STRATEGIES]
    if unknown:
        raise InvalidArgumentError(f"simulate: strategy {unknown[0]!r}; allowed are {', '.join(STRATEGIES)}")
    if not any(sequences):
        raise InvalidArgumentError("simulate: there are no documents")
    fixed = fixed or {}
    found = [_best(name, sequences, cluster, model, fixed, tolerance) for name in chosen]
    if all(one.result is None for one in found):
        said = "".join(f", {name.replace('_', '-')} {value}" for name, value in fixed.items())
        if not any(one.too_large for one in found):
            raise InvalidArgumentError(
                f"simulate: no set-up of {cluster.ranks} ranks{said} can share {len(sequences)} sequences: give more "
                "or other sequences, or fix less"
            )
        raise InvalidArgumentError(
            f"simulate: none of {sum(one.too_large for one in found):,} set-ups of {cluster.ranks} ranks{said} fits "
            f"into {cluster.device.memory / 1e9:,.0f} GB a rank: use more ranks, or shorter or fewer sequences"
        )
    return found


def set_ups(
    name: str, sequences: Sequence[Sequence[int]], cluster: Cluster, model: Model, fixed: Mapping[str, int | bool]
) -> Iterator[Parallelism]:
    """All set-ups of a strategy that this cluster and model allow and that share the sequences equally."""
    for dimension in fixed:
        if dimension not in DIMENSIONS:
            raise InvalidArgumentError(f"search: {dimension} = {fixed[dimension]!r}; not a dimension of the search")

    def values(dimension: str, of: Iterable[int]) -> list[int]:
        return [value for value in of if fixed.get(dimension, value) == value]

    ranks = cluster.ranks
    for tensor in values("tensor", _divisors(min(ranks, cluster.ranks_per_node))):
        for pipeline in values("pipeline", _divisors(ranks // tensor)):
            for context in values("context", _divisors(ranks // tensor // pipeline)):
                data = ranks // tensor // pipeline // context
                if len(sequences) % data or (context > 1 and not STRATEGIES[name].cuts):
                    continue
                for micro_batches in values("micro_batches", _divisors(len(sequences) // data)):
                    for fsdp in values("fsdp", (False, True)):
                        for recompute in values("recompute", (False, True)):
                            made = Parallelism(
                                data=data,
                                context=context,
                                tensor=tensor,
                                pipeline=pipeline,
                                micro_batches=micro_batches,
                                fsdp=bool(fsdp),
                                recompute=bool(recompute),
                            )
                            if fixed.get("data", data) == data and _allowed(made, cluster, model):
                                yield made


def shared(sequences: Sequence[Sequence[int]], parallelism: Parallelism) -> Documents:
    """The sequences dealt in their order to micro-batches and data ranks. The first of the context ranks has them."""
    each = len(sequences) // (parallelism.micro_batches * parallelism.data)
    groups = [
        [n for sequence in sequences[first : first + each] for n in sequence]
        for first in range(0, len(sequences), each)
    ]
    homes = [[group, *([[]] * (parallelism.context - 1))] for group in groups]
    return [
        [of_home for group in homes[first : first + parallelism.data] for of_home in group]
        for first in range(0, len(homes), parallelism.data)
    ]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _allowed(parallelism: Parallelism, cluster: Cluster, model: Model) -> bool:
    if parallelism.fsdp and parallelism.homes == 1:
        return False  # nothing to share weights with
    try:
        parallelism.check(cluster, model)
    except InvalidArgumentError:
        return False
    return True


def _best(
    name: str,
    sequences: Sequence[Sequence[int]],
    cluster: Cluster,
    model: Model,
    fixed: Mapping[str, int | bool],
    tolerance: float,
) -> Found:
    """Models the set-ups of a strategy, those first that look fast, and each only as long as it may be the best."""
    best: tuple[float, Case, StrategyResult] | None = None
    tried = slower = too_large = 0
    fits: set[Parallelism] = set()
    order = []
    for parallelism in set_ups(name, sequences, cluster, model, fixed):
        case = Case(shared(sequences, parallelism), cluster, model, parallelism, tolerance)
        if least_memory(case) > cluster.device.memory:
            too_large += 1
        else:
            work, end = least_work(case), end_seconds(case)
            bubble = 1 + (parallelism.pipeline - 1) / parallelism.micro_batches
            order.append((parallelism.recompute, work * bubble + end, len(order), work, end, case))
    for recompute, _, _, work, end, case in sorted(order, key=lambda one: one[:3]):
        if best is not None and work + end >= best[0]:
            slower += 1
            continue
        if recompute and dataclasses.replace(case.parallelism, recompute=False) in fits:
            slower += 1
            continue
        program = STRATEGIES[name].prepare(case)
        if program.memory.total > cluster.device.memory:
            too_large += 1
            continue
        tried += 1
        fits.add(case.parallelism)
        deadline = None if best is None else Deadline(best[0], work, end)
        machine = Machine(Network(cluster, case.parallelism.tensor), cluster.device, deadline=deadline)
        with contextlib.suppress(TooSlow):
            program.play(machine)
            seconds = float(machine.now.max())
            if best is None or seconds < best[0]:
                best = seconds, case, result_of(name, program, case)
    if best is None:
        return Found(name, None, None, tried, slower, too_large)
    return Found(name, best[1], best[2], tried, slower, too_large)
