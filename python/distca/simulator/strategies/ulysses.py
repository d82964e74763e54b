"""Ulysses: an all-to-all gives each rank all rows of some heads before attention, and another one its rows after it.

Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, section 3. With P ranks a rank sends (P - 1) / P of its
queries, keys and values, and of its outputs. Backward sends the gradients of all four. Key/value heads that are fewer
than the ranks are repeated, so that each rank has one: Bekman et al., Arctic Long Sequence Training, arXiv 2506.13996,
section 3.2. The number of ranks must divide that of the query heads.

What differs: the paper cuts one sequence; here the packed documents of a group are cut into equal runs of rows. An
all-to-all is messages from each rank to each other one, without a barrier.
"""

from __future__ import annotations

import torch

from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.planner.layout import Layout
from distca.simulator.case import Case, Program, Strategy
from distca.simulator.one_f_one_b import OneForwardOneBackward, PhaseWork
from distca.simulator.setup import Model, Parallelism
from distca.simulator.ticking import packed
from distca.simulator.work import PieceTimes, StageWork


class Ulysses(Strategy):
    """Each of ``context`` neighbouring ranks has a run of the group's rows, and in attention a share of the heads."""

    name = "ulysses"
    about = "rows cut over the context parallel group, attention of all rows by heads, all-to-all around it"

    def applies(self, parallelism: Parallelism, model: Model, steps: int = 1) -> bool:
        """With context ranks, if their number divides the query heads of a tensor rank."""
        heads = model.heads.divided(parallelism.tensor)
        return parallelism.context > 1 and parallelism.chunks == 1 and not _misfit(heads, parallelism.context)

    def prepare(self, case: Case) -> Program:
        """The program of 1F1B on the cut rows. Copies of repeated key/value heads are kept to backward."""
        context, heads = case.parallelism.context, case.heads
        if context > 1 and _misfit(heads, context):
            raise InvalidArgumentError(
                f"simulate: ulysses with context = {context}; a divisor of the {heads.q} query heads of a tensor rank, "
                f"and a divisor or multiple of its {heads.kv} key/value heads, is expected"
            )
        layouts = packed(case)
        works = [_work(case, micro_batch, layout) for micro_batch, layout in zip(case.documents, layouts, strict=True)]
        rows = max(layout.num_rows(home) for layout in layouts for home in range(layout.num_ranks))
        repeated = max(context - heads.kv, 0) * (heads.dim + heads.value_dim) * heads.dtype.itemsize
        return OneForwardOneBackward(case, layouts, attention=works, buffers=float(rows * repeated))


def _misfit(heads: Heads, context: int) -> bool:
    return bool(heads.q % context or (heads.kv % context and context % heads.kv))


def exchanged_bytes(rows: int, heads: Heads, ranks: int) -> tuple[float, float]:
    """Bytes that a rank of so many rows sends to each other rank before attention, and after it, in forward.

    Backward sends as many after attention as forward before it, and the other way round.
    """
    kv = max(heads.kv, ranks)
    before = rows * (heads.q * heads.dim + kv * (heads.dim + heads.value_dim)) * heads.dtype.itemsize / ranks
    after = rows * heads.q * heads.value_dim * heads.dtype.itemsize / ranks
    return before, after


def all_to_all(layout: Layout, heads: Heads, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[homes, homes]`` bytes that ``size`` neighbours send each other before attention, and after it, in forward."""
    homes = layout.num_ranks
    inward, homeward = (torch.zeros(homes, homes, dtype=torch.float64) for _ in range(2))
    before, after = exchanged_bytes(1, heads, size)
    for first in range(0, homes, size):
        group = slice(first, first + size)
        rows = torch.tensor([layout.num_rows(home) for home in range(homes)[group]], dtype=torch.float64)
        inward[group, group] = (rows * before).unsqueeze(1)
        homeward[group, group] = rows * after  # to the home of the rows, from each rank alike
    for matrix in (inward, homeward):
        matrix.fill_diagonal_(0.0)
    return inward, homeward


def _work(case: Case, micro_batch: list[list[int]], layout: Layout) -> PhaseWork:
    context, heads, homes = case.parallelism.context, case.heads, layout.num_ranks
    inward, homeward = all_to_all(layout, heads, context)
    work = {}
    for phase in ("forward", "backward"):
        times = PieceTimes(case.cluster.device, phase, heads.q)
        seconds = torch.zeros(homes, dtype=torch.float64)
        for first in range(0, homes, context):
            lengths = [n for of_home in micro_batch[first : first + context] for n in of_home]
            seconds[first : first + context] = sum(times.seconds(n, n, causal=True) for n in lengths) / context
        forward = phase == "forward"
        # The gradients of outputs come where forward sends outputs from, and those of queries and keys go back.
        there, back = (inward, homeward) if forward else (homeward.T.contiguous(), inward.T.contiguous())
        work[phase] = StageWork(seconds, there, back)
    return work
