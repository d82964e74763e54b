"""Every strategy at its best parallelism: the one with most tokens a second of those that fit into the memory.

A set-up is a `Parallelism`. The sequences of a step are the same in all of them. Set-ups are left out only if another
one is as fast for certain, or if they cannot fit; `Found` counts them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from distca.errors import InvalidArgumentError
from distca.simulator.bounds import end_seconds, least_memory, least_work, optimistic
from distca.simulator.case import Case, Documents, Program
from distca.simulator.contention import played
from distca.simulator.machine import Deadline, TooSlow
from distca.simulator.setup import Cluster, Model, Parallelism
from distca.simulator.simulate import StrategyResult, play
from distca.simulator.strategies import STRATEGIES

#: Documents are not cut over so many context ranks that a rank has fewer tokens of a micro-batch than this.
LEAST_TOKENS = 8192
#: What a set-up may differ in.
DIMENSIONS = ("data", "context", "tensor", "pipeline", "micro_batches", "fsdp", "recompute")


@dataclasses.dataclass(frozen=True)
class Found:
    """The best set-up of a strategy.

    Attributes:
        strategy: the strategy's name.
        parallelism: the best set-up; None if no set-up fits.
        result: its step, the mean of several ones; None if no set-up fits.
        tried: set-ups whose step was modelled.
        slower: set-ups that cannot be faster than the best one, because of what every rank must compute, or because
            they recompute and fit without.
        too_large: set-ups that do not fit into the memory.
    """

    strategy: str
    parallelism: Parallelism | None
    result: StrategyResult | None
    tried: int
    slower: int
    too_large: int

    def as_json(self) -> dict[str, Any]:
        """All of it, for JSON."""
        values = {name: getattr(self, name) for name in ("strategy", "tried", "slower", "too_large")}
        parallelism = None if self.parallelism is None else dataclasses.asdict(self.parallelism)
        return {**values, "parallelism": parallelism, "result": self.result and self.result.as_json()}


def search(
    sequences: Sequence[Sequence[int]],
    *,
    cluster: Cluster,
    model: Model,
    strategies: Iterable[str] | None = None,
    fixed: Mapping[str, int | bool] | None = None,
    tolerance: float = 0.05,
    following: Sequence[Sequence[Sequence[int]]] = (),
) -> list[Found]:
    """Finds the best set-up of every strategy for a step on the same sequences.

    Args:
        sequences: the lengths of each sequence's documents, in tokens. A data rank takes whole sequences; a strategy
            may cut their documents over its context ranks.
        cluster, model: what the step runs on.
        strategies: names of `STRATEGIES`; all by default.
        fixed: values of some `DIMENSIONS`.
        tolerance: that of distca's plans.
        following: the sequences of further steps, as many in each. A strategy may move documents to later steps.

    Raises:
        InvalidArgumentError: a strategy or a dimension is unknown, there are no documents, or no strategy has a set-up
            that fits.
    """
    chosen = list(STRATEGIES if strategies is None else strategies)
    unknown = [name for name in chosen if name not in STRATEGIES]
    if unknown:
        raise InvalidArgumentError(f"simulate: strategy {unknown[0]!r}; allowed are {', '.join(STRATEGIES)}")
    steps = [sequences, *following]
    if not all(any(of_step) for of_step in steps):
        raise InvalidArgumentError("simulate: there are no documents")
    fixed = fixed or {}
    found, at_best = [], optimistic(cluster)
    for name in chosen:
        cases = [
            [Case(shared(of_step, shape), cluster, model, shape, tolerance) for of_step in steps]
            for shape in set_ups(name, len(sequences), sum(map(sum, sequences)), cluster, model, fixed, len(steps))
        ]
        found.append(_best(name, cases, at_best))
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
    name: str,
    sequences: int,
    tokens: int,
    cluster: Cluster,
    model: Model,
    fixed: Mapping[str, int | bool],
    steps: int = 1,
) -> Iterator[Parallelism]:
    """All set-ups of a strategy that this cluster and model allow and that share these sequences equally.

    Args:
        name: of the strategy.
        sequences, tokens: number of sequences of a step, and their tokens in all.
        cluster, model: what the step runs on.
        fixed: values of some `DIMENSIONS`.
        steps: number of steps.
    """
    for dimension in fixed:
        if dimension not in DIMENSIONS:
            raise InvalidArgumentError(f"search: {dimension} = {fixed[dimension]!r}; not a dimension of the search")

    def values(dimension: str, of: Iterable[int]) -> list[int]:
        return [value for value in of if fixed.get(dimension, value) == value]

    ranks, strategy = cluster.ranks, STRATEGIES[name]
    for tensor in values("tensor", _divisors(min(ranks, cluster.ranks_per_node))):
        for pipeline in values("pipeline", _divisors(ranks // tensor)):
            for context in values("context", _divisors(ranks // tensor // pipeline)):
                data = ranks // tensor // pipeline // context
                if sequences % data or (context > 1 and not strategy.cuts):
                    continue
                for micro_batches in values("micro_batches", _divisors(sequences // data)):
                    if context > 1 and tokens // (data * context * micro_batches) < LEAST_TOKENS:
                        continue
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
                            if fixed.get("data", data) != data or not _allowed(made, cluster, model):
                                continue
                            if strategy.applies(made, model, steps):
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


def _best(name: str, set_ups: Sequence[Sequence[Case]], at_best: Cluster) -> Found:
    """Models the set-ups of a strategy, those first that look fast, and each only as long as it may be the best."""
    best: tuple[float, list[Program], Sequence[Case]] | None = None
    tried = slower = too_large = 0
    fits: set[Parallelism] = set()
    order: list[tuple[bool, float, int, float, float, Sequence[Case]]] = []
    for cases in set_ups:
        shape, memory = cases[0].parallelism, cases[0].cluster.device.memory
        if max(least_memory(case, keeps_rows=STRATEGIES[name].keeps_rows) for case in cases) > memory:
            too_large += 1
        else:
            work, end = sum(least_work(case, at_best) for case in cases), end_seconds(cases[0])
            bubble = 1 + (shape.pipeline - 1) / shape.micro_batches
            order.append((shape.recompute, work * bubble + end * len(cases), len(order), work, end, cases))
    for recompute, _, _, work, end, cases in sorted(order, key=lambda one: one[:3]):
        shape = cases[0].parallelism
        without = dataclasses.replace(shape, recompute=False)
        if (best is not None and work + end * len(cases) >= best[0]) or (recompute and without in fits):
            slower += 1
            continue
        programs = STRATEGIES[name].prepare_steps(cases)
        if max(program.memory.total for program in programs) > cases[0].cluster.device.memory:
            too_large += 1
            continue
        tried += 1
        fits.add(shape)
        seconds = _seconds(programs, cases[0], work, end, math.inf if best is None else best[0])
        if seconds is not None:
            best = seconds, programs, cases
    if best is None:
        return Found(name, None, None, tried, slower, too_large)
    _, programs, cases = best
    return Found(name, cases[0].parallelism, play(name, programs, cases), tried, slower, too_large)


def _seconds(programs: Sequence[Program], case: Case, work: float, end: float, limit: float) -> float | None:
    """Seconds of all steps, or None as soon as they cannot be below the limit.

    Args:
        programs: the steps.
        case: the set-up.
        work: seconds that the mean home at least computes and exchanges in all steps, but for their ends.
        end: seconds of the end of a step.
        limit: seconds.
    """
    total = idle = 0.0
    ends = end * len(programs)
    for program in programs:
        try:
            deadline = Deadline(limit, work + idle, ends)
            machine = played(program, case.cluster, case.parallelism.tensor, deadline=deadline)
        except TooSlow:
            return None
        seconds = float(machine.now.max())
        total += seconds
        idle += max(0.0, seconds - end - float((machine.dense + machine.attention + machine.exchanging).mean()))
    return total if total < limit else None
