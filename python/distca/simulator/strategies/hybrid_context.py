"""Megatron's hybrid (dynamic) context parallelism: each document has a group of its own, of a power of two of ranks.

Source: Megatron-core 0.16.1, ``model_parallel_config.py`` (``hybrid_context_parallel``, ``max_seqlen_per_dp_cp_rank``)
and ``pipeline_parallel/hybrid_cp_schedule.py``; in later versions ``dynamic_context_parallel``. `hybrid_schedule` has
its schedule. The ranks of a group are a ring (`ring`).

What differs: Megatron runs the documents of a rank one after the other; here those of a round are one pass, which
takes the same time where launches take none. Memory is that of the largest document. The most tokens of a rank are
those that Megatron's documentation begins with: the longest document over the context ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from distca.errors import InvalidArgumentError
from distca.planner.layout import Layout
from distca.simulator.case import Case, Program, Strategy
from distca.simulator.one_f_one_b import OneForwardOneBackward
from distca.simulator.setup import Model, Parallelism
from distca.simulator.strategies.hybrid_schedule import Group, schedule
from distca.simulator.strategies.ring import key_bytes, ring_work


class HybridContext(Strategy):
    """The documents of all micro-batches are scheduled in rounds over all data and context ranks."""

    name = "hybrid-context"
    about = "Megatron's hybrid context parallelism: each document on its own power of two of ranks, in rounds"
    keeps_rows = False  # but those of a round

    def applies(self, parallelism: Parallelism, model: Model, steps: int = 1) -> bool:
        """With context ranks and no pipeline, if data x context is a power of two."""
        return parallelism.context > 1 and parallelism.chunks == 1 and not _misfit(parallelism)

    def prepare(self, case: Case) -> Program:
        """The program of the rounds, with a barrier after each."""
        homes = case.parallelism.homes
        if _misfit(case.parallelism):
            raise InvalidArgumentError(
                f"simulate: hybrid-context with data x context = {homes} and pipeline = {case.parallelism.pipeline}; a "
                "power of two and no pipeline are expected"
            )
        lengths = case.lengths
        rounds = schedule(lengths, homes, most_tokens=-(-max(lengths) // case.parallelism.context))
        layouts = [layout_of(groups, lengths) for groups in rounds]
        works = [
            ring_work(layout, rings_of(groups), case.heads, case.cluster.device)
            for layout, groups in zip(layouts, rounds, strict=True)
        ]
        rows = max(-(-lengths[number] // group.size) for of in rounds for group in of for number in group.documents)
        under_way = 2 * 2 * rows * key_bytes(case.heads)  # keys and their gradients, coming and going
        return OneForwardOneBackward(case, layouts, attention=works, rows=rows, once=float(under_way), barrier=True)


def _misfit(parallelism: Parallelism) -> bool:
    return parallelism.pipeline > 1 or parallelism.homes & (parallelism.homes - 1) != 0


def rings_of(groups: Sequence[Group]) -> list[list[int]]:
    """The homes of each group of a round: neighbours, in the order of the groups."""
    ends = list(itertools.accumulate(group.size for group in groups))
    return [list(range(end - group.size, end)) for group, end in zip(groups, ends, strict=True)]


def layout_of(groups: Sequence[Group], lengths: Sequence[int]) -> Layout:
    """The rows of a round: the documents of each group are cut head-tail over its ranks."""
    parts = [
        (Layout.head_tail([lengths[number] for number in group.documents], ranks=group.size), ring)
        for group, ring in zip(groups, rings_of(groups), strict=True)
    ]
    return Layout.join(parts, num_ranks=sum(group.size for group in groups))
