"""WLB-LLM: variable-length packing with delay of outliers, and context parallelism by sequence or by document.

Source: Wang et al., WLB-LLM: Workload-Balanced 4D Parallelism for Large Language Model Training, arXiv 2503.17924 (OSDI
2025). Section 4 packs documents so that micro-batches have equal work (`outliers`). Section 5 cuts a packed sequence
over the context ranks: by sequence, ``2 * ranks`` chunks of the whole sequence, or by document, as many of every
document. Short pieces run slower; therefore the way is chosen for each sequence whose slowest rank is expected to take
less time. Keys are gathered before attention.

What differs: the work of a document is the device's modelled time, where the paper profiles kernels. The longest
sequence is the one that memory allows. The thresholds of the queues are chosen for the given documents among eighths of
the longest document, as the paper tunes them on a sample; they are those with the least modelled time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from distca.planner.layout import Layout
from distca.planner.planning import plan
from distca.simulator.case import Case, Program, Strategy
from distca.simulator.one_f_one_b import OneForwardOneBackward
from distca.simulator.setup import Model, Parallelism
from distca.simulator.strategies.outliers import Packed, pack
from distca.simulator.strategies.ring import key_bytes
from distca.simulator.work import PieceTimes


class Wlb(Strategy):
    """Sequences of all micro-batches and data ranks are packed together; each is cut over its context ranks.

    Args:
        delay: whether outliers wait in queues, which needs several steps.
    """

    def __init__(self, *, delay: bool) -> None:
        self._delay = delay
        self.name = "wlb" if delay else "wlb-no-delay"
        self.about = (
            f"WLB-LLM: variable-length packing with{'' if delay else 'out'} delay of outliers, adaptive sharding"
        )

    def applies(self, parallelism: Parallelism, model: Model, steps: int = 1) -> bool:
        """With and without delay differ in several steps alone."""
        return parallelism.chunks == 1 and (self._delay or steps > 1)

    def prepare(self, case: Case) -> Program:
        """The program of 1F1B on the packed documents of one step."""
        return self.prepare_steps([case])[0]

    def prepare_steps(self, cases: Sequence[Case]) -> list[Program]:
        """The programs of all steps that take these documents."""
        case = cases[0]
        data, count = case.parallelism.data, case.parallelism.data * case.parallelism.micro_batches
        batches = [case.lengths for case in cases]
        work, longest = document_work(case), longest_sequence(cases)
        choices = list(_thresholds(max(map(max, batches)))) if self._delay and len(cases) > 1 else [()]
        streams = [pack(batches, count, longest, work, thresholds) for thresholds in choices]
        best = min(streams, key=lambda steps: sum(_step_work(step, data, case.parallelism, work) for step in steps))
        return [self._program(case, step) for step in best]

    def _program(self, case: Case, step: Packed) -> Program:
        data, context = case.parallelism.data, case.parallelism.context
        layouts = []
        for first in range(0, len(step), data):
            parts = [
                (sharded(case, step[first + number]), range(number * context, (number + 1) * context))
                for number in range(data)
            ]
            layouts.append(Layout.join([(part, list(ranks)) for part, ranks in parts], num_ranks=data * context))
        return OneForwardOneBackward(case, layouts, gather=context)


def _thresholds(longest: int) -> Iterator[tuple[int, ...]]:
    """No queue, one queue, or two of them, at eighths of the longest document."""
    eighths = [longest * n // 8 for n in range(1, 9) if longest * n // 8 > 0]
    for levels in range(3):
        yield from itertools.combinations(eighths, levels)


def document_work(case: Case) -> Callable[[int], float]:
    """Seconds of a document in a layer, forward and backward, on one rank: attention and everything in proportion."""
    times = [PieceTimes(case.cluster.device, phase, case.heads.q) for phase in ("forward", "backward")]
    rows = max(1, sum(case.lengths) // (case.parallelism.homes * case.parallelism.micro_batches))
    dense = case.dense([rows] * case.num_homes)
    of_row = 0.0
    for part in (dense.before, dense.after):
        exchanged = 2 * float(part.collective[0]) / case.cluster.inside.bandwidth
        of_row += (float(part.seconds[0] + part.backward_seconds[0]) + exchanged) / rows
    return lambda length: of_row * length + sum(of.seconds(length, length, causal=True) for of in times)


def longest_sequence(cases: Sequence[Case]) -> int:
    """The most tokens of a sequence: what memory allows, but at least the longest document and the mean sequence."""
    case = cases[0]
    parallelism = case.parallelism
    in_flight = min(parallelism.micro_batches, parallelism.pipeline)
    of_token = (case.activation_bytes(2, in_flight) - case.activation_bytes(1, in_flight)) / parallelism.context
    if parallelism.context > 1:
        of_token += key_bytes(case.heads) * in_flight * case.stage_layers
    fits = int((case.cluster.device.memory - case.state_bytes) / of_token)
    count = parallelism.data * parallelism.micro_batches
    means = [-(-sum(case.lengths) // count) for case in cases]
    return max(fits, *means, *(n for case in cases for n in case.lengths))


def _step_work(step: Packed, data: int, parallelism: Parallelism, work: Callable[[int], float]) -> float:
    """About what a step takes: the slowest data rank's sequences, and the pipeline's bubble with its longest one."""
    works = [sum(map(work, sequence)) for sequence in step]
    of_ranks = [works[rank::data] for rank in range(data)]
    return max(sum(of) + (parallelism.pipeline - 1) * max(of) for of in of_ranks)


def sharded(case: Case, lengths: Sequence[int]) -> Layout:
    """A sequence over the context ranks, by document or by sequence, whichever is expected to take less time."""
    context = case.parallelism.context
    ways = [Layout.head_tail(lengths, ranks=context)]
    if context > 1 and lengths:
        ways.append(by_sequence(lengths, context))
    cost = case.cluster.device.cost()
    return min(ways, key=lambda layout: max(plan(layout, case.heads, balance=False, cost=cost).stats.load_before))


def by_sequence(lengths: Sequence[int], ranks: int) -> Layout:
    """Documents one after the other in ``2 * ranks`` chunks; rank r holds the r-th chunk from either end."""
    total = sum(lengths)
    bounds = [total * number // (2 * ranks) for number in range(2 * ranks + 1)]
    ends = list(itertools.accumulate(lengths))
    segments: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for chunk, (begin, end) in enumerate(itertools.pairwise(bounds)):
        rank = min(chunk, 2 * ranks - 1 - chunk)
        for document, length in enumerate(lengths):
            start = ends[document] - length
            first, last = max(begin, start), min(end, ends[document])
            if first < last:
                segments[rank].append((document, first - start, last - start))
    return Layout(segments)
