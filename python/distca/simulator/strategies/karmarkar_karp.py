"""Whole documents dealt by the differencing method of Karmarkar and Karp, over a*L + b*L^2.

Sources: Karmarkar and Karp, The Differencing Method of Set Partitioning, UC Berkeley technical report CSD-83-113, 1982.
RL frameworks deal samples like this: verl, ``verl/utils/seqlen_balancing.py`` (HybridFlow, arXiv 2409.19256), first to
data parallel ranks, and then on each rank to micro-batches.

What differs: verl counts ``24576 * L + L^2``, the ratio of a model of 7B; here a and b are the operations of the given
model, with causal attention. verl gives ranks equally many samples unless told otherwise; here they have any number.
Its micro-batches are as many as a limit on tokens asks for; here the parallelism says how many.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from distca.planner.layout import Layout
from distca.simulator.case import Case, Documents, Program, Strategy
from distca.simulator.one_f_one_b import OneForwardOneBackward
from distca.simulator.setup import Model


class KarmarkarKarp(Strategy):
    """Whole documents of all micro-batches are dealt to data ranks, and those of each rank to its micro-batches.

    Context ranks are used as data ranks. Micro-batches of a rank come in the order of their cost, so that ranks have
    similar ones at the same time.
    """

    name = "karmarkar-karp"
    about = "whole documents, dealt by Karmarkar-Karp over a*L + b*L^2"
    cuts = False

    def prepare(self, case: Case) -> Program:
        """The program of 1F1B on the documents as they are dealt."""
        dealt = deal(case.documents, case.model)
        return OneForwardOneBackward(case, [Layout.from_documents(of) for of in dealt])


def document_cost(length: int, model: Model) -> int:
    """Operations of forward of a document, a*L + b*L^2: its weights, and causal attention in all layers."""
    weights = model.layers * model.layer_weights + model.head_weights
    return 2 * weights * length + 2 * model.layers * model.q_heads * model.head_dim * length**2


def deal(documents: Documents, model: Model) -> Documents:
    """The same documents in as many micro-batches and homes."""
    lengths = [n for micro_batch in documents for of_home in micro_batch for n in of_home]
    homes = _parts(lengths, len(documents[0]), model)
    by_home = [_parts(of_home, len(documents), model) for of_home in homes]
    return [[of_home[number] for of_home in by_home] for number in range(len(documents))]


def _parts(lengths: Sequence[int], count: int, model: Model) -> list[list[int]]:
    """The lengths in so many parts, the costliest part first."""
    parts = partition([document_cost(n, model) for n in lengths], count)
    return [[lengths[index] for index in part] for part in parts]


class _Sums(NamedTuple):
    """Parts of a partial solution: sum and items of each, largest sum first. It sorts by its spread, largest first."""

    negative_spread: int
    number: int
    parts: list[tuple[int, list[int]]]


def partition(costs: Sequence[int], count: int) -> list[list[int]]:
    """Indices of costs in so many parts of similar sums, the largest sum first.

    Every cost begins as a solution of its own, with all other parts empty. The two solutions with the largest spread
    between their largest and smallest sum become one: the largest part of one is joined with the smallest of the other,
    and so on. No sums of the result differ by more than the largest cost.

    Examples:
        >>> from distca.simulator.strategies.karmarkar_karp import partition
        >>> partition([8, 7, 6, 5, 4], 2)
        [[1, 3, 4], [0, 2]]
    """
    heap = [_Sums(-cost, index, [(cost, [index])] + [(0, [])] * (count - 1)) for index, cost in enumerate(costs)]
    if not heap:
        return [[] for _ in range(count)]
    if count == 1:
        return [list(range(len(costs)))]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(one.parts, reversed(other.parts), strict=True)
        parts = [(a + b, left + right) for (a, left), (b, right) in pairs]
        parts.sort(key=lambda part: -part[0])
        heapq.heappush(heap, _Sums(parts[-1][0] - parts[0][0], number, parts))
        number += 1
    return [sorted(items) for _, items in heap[0].parts]
