"""Both at once: an all-to-all among neighbours, as of Ulysses, and a ring over the groups that they form.

Sources: Fang and Zhao, USP: A Unified Sequence Parallelism Approach, arXiv 2405.07719; ``cp_comm_type = a2a+p2p`` of
Megatron-core, whose ``hierarchical_context_parallel_sizes`` are the two sizes. An all-to-all gives each rank all rows
of its group for a share of the heads. The ranks that have the same heads in different groups are a ring: its steps are
those of `Ring`, with the rows of a group in the place of those of a rank. Then another all-to-all brings results back.

The groups are as large as they can be: the greatest common divisor of the context ranks and of the key/value heads of a
tensor rank. Where that is one, or all ranks, this is a ring, or Ulysses.

What differs: Megatron pads documents to multiples of twice the context ranks; here chunks may differ by a row.
"""

from __future__ import annotations

import math

import torch

from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.planner.layout import Layout
from distca.simulator.case import Case, Program, Strategy
from distca.simulator.device import Device
from distca.simulator.one_f_one_b import OneForwardOneBackward, PhaseWork
from distca.simulator.setup import Model, Parallelism
from distca.simulator.strategies.all_gather import cut_by_document
from distca.simulator.strategies.ring import key_bytes, ring_work
from distca.simulator.strategies.ulysses import all_to_all
from distca.simulator.work import StageWork


class UlyssesRing(Strategy):
    """The documents of ``context`` neighbouring ranks are cut head-tail over these ranks: groups within a ring."""

    name = "ulysses-ring"
    about = (
        "documents cut over the context parallel group, all-to-all among neighbours, a ring over these neighbourhoods"
    )

    def applies(self, parallelism: Parallelism, model: Model, steps: int = 1) -> bool:
        """With context ranks of which some, and not all, can share the key/value heads."""
        size = _size(model.heads.divided(parallelism.tensor), parallelism.context)
        return parallelism.chunks == 1 and 1 < size < parallelism.context

    def prepare(self, case: Case) -> Program:
        """The program of 1F1B on the cut documents."""
        context, heads = case.parallelism.context, case.heads
        size = _size(heads, context)
        if context > 1 and not 1 < size < context:
            raise InvalidArgumentError(
                f"simulate: ulysses-ring with context = {context} and {heads.kv} key/value heads of a tensor rank; a "
                f"common divisor above 1 and below {context} is expected"
            )
        layouts = cut_by_document(case)
        works = [ulysses_ring_work(layout, context, size, heads, case.cluster.device) for layout in layouts]
        rows = max(layout.num_rows(home) for layout in layouts for home in range(layout.num_ranks))
        under_way = 2 * 2 * rows * key_bytes(heads)  # keys and their gradients, coming and going
        return OneForwardOneBackward(case, layouts, attention=works, once=float(under_way))


def _size(heads: Heads, context: int) -> int:
    return math.gcd(heads.kv, context)


def ulysses_ring_work(layout: Layout, context: int, size: int, heads: Heads, device: Device) -> PhaseWork:
    """Attention of documents that are cut head-tail over groups of homes.

    Args:
        layout: the rows of the homes of a stage. Every document lies on ``context`` neighbours.
        context: how many homes share a document.
        size: how many neighbours exchange rows for heads; a divisor of ``context`` and of the key/value heads.
        heads: of a tensor rank.
        device: what computes.
    """
    homes = layout.num_ranks
    joined = Layout([_joined(layout, range(first, first + size)) for first in range(0, homes, size)])
    groups = [
        list(range(first, min(first + context // size, joined.num_ranks)))
        for first in range(0, joined.num_ranks, context // size)
    ]
    of_groups = ring_work(joined, groups, heads.divided(size), device)
    inward, homeward = all_to_all(layout, heads, size)
    work = {}
    for phase, of_group in of_groups.items():
        ring = [(took.repeat_interleave(size), _along(passed, size)) for took, passed in of_group.ring]
        there, back = (inward, homeward) if phase == "forward" else (homeward.T.contiguous(), inward.T.contiguous())
        work[phase] = StageWork(torch.zeros(homes, dtype=torch.float64), there, back, ring)
    return work


def _joined(layout: Layout, homes: range) -> list[tuple[int, int, int]]:
    """The rows of several homes as those of one, in the order of documents."""
    joined: list[tuple[int, int, int]] = []
    for document, begin, end in sorted(segment for home in homes for segment in layout.segments(home)):
        if joined and joined[-1][0] == document and joined[-1][2] == begin:
            begin = joined.pop()[1]
        joined.append((document, begin, end))
    return joined


def _along(passed: torch.Tensor, size: int) -> torch.Tensor:
    """What groups pass to each other, as what their homes with the same heads do."""
    return torch.kron(passed, torch.eye(size, dtype=passed.dtype))
