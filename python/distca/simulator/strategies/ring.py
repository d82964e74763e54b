"""Per-document context parallelism with a ring: keys travel from rank to rank while attention is computed.

Sources: Liu et al., Ring Attention with Blockwise Transformers, arXiv 2310.01889; causal load balance by chunks from
both ends (head-tail, zigzag): Brandon et al., Striped Attention, arXiv 2311.09431, and ``cp_comm_type = p2p`` of
Megatron-core and TransformerEngine (``attention/dot_product_attention/context_parallel.py``), whose steps these are.

With P ranks, forward has P steps. In the first a rank computes its own chunks. In step i it has the keys of the i-th
rank before it: of an earlier rank all its queries see the first chunk, of a later one its last queries see both chunks.
In each of the first P - 1 steps it passes the keys on that it computes with. Backward goes the other way round and ends
with the rank's own keys. It passes keys on in its first P - 1 steps, and in its last P - 1 the gradients of the keys of
the step before. A step ends when computation and messages have ended.

What differs: TransformerEngine pads documents to multiples of 2 P; here chunks may differ by a row. The merging of
partial results takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distca.heads import Heads
from distca.planner.layout import Layout
from distca.simulator.case import Case, Program, Strategy
from distca.simulator.device import Device
from distca.simulator.one_f_one_b import OneForwardOneBackward, PhaseWork
from distca.simulator.setup import Model, Parallelism
from distca.simulator.strategies.all_gather import cut_by_document
from distca.simulator.work import PieceTimes, StageWork


class Ring(Strategy):
    """The documents of ``context`` neighbouring ranks are cut head-tail over these ranks, which form a ring."""

    name = "ring"
    about = "every document cut over its context parallel group, keys passed on in a ring while attention is computed"

    def applies(self, parallelism: Parallelism, model: Model, steps: int = 1) -> bool:
        """With context ranks."""
        return parallelism.context > 1 and parallelism.chunks == 1

    def prepare(self, case: Case) -> Program:
        """The program of 1F1B on the cut documents."""
        layouts = cut_by_document(case)
        context = case.parallelism.context
        groups = [list(range(first, first + context)) for first in range(0, case.parallelism.homes, context)]
        works = [ring_work(layout, groups, case.heads, case.cluster.device) for layout in layouts]
        rows = max(layout.num_rows(home) for layout in layouts for home in range(layout.num_ranks))
        under_way = 2 * 2 * rows * key_bytes(case.heads)  # keys and their gradients, coming and going
        return OneForwardOneBackward(case, layouts, attention=works, once=float(under_way))


def key_bytes(heads: Heads) -> int:
    """Bytes of the keys and values of a row."""
    return heads.kv * (heads.dim + heads.value_dim) * heads.dtype.itemsize


def ring_work(layout: Layout, groups: Sequence[Sequence[int]], heads: Heads, device: Device) -> PhaseWork:
    """Attention of documents that are cut head-tail over groups of homes, each of which is a ring.

    Args:
        layout: the rows of the homes of a stage. Every document lies on one group.
        groups: the homes of each group, in the order of the ring; groups may differ in size.
        heads: of a tensor rank.
        device: what computes.
    """
    return {phase: _ring(layout, groups, heads, device, phase) for phase in ("forward", "backward")}


def _ring(layout: Layout, groups: Sequence[Sequence[int]], heads: Heads, device: Device, phase: str) -> StageWork:
    homes, forward = layout.num_ranks, phase == "forward"
    times = PieceTimes(device, phase, heads.q)
    chunks = [_chunks(layout, home) for home in range(homes)]
    rows = [layout.num_rows(home) for home in range(homes)]
    steps = []
    for step in range(max(map(len, groups))):
        seconds = torch.zeros(homes, dtype=torch.float64)
        passed = torch.zeros(homes, homes, dtype=torch.float64)
        for group in groups:
            size = len(group)
            for place, home in enumerate(group if step < size else []):
                source = group[(place - step if forward else place + 1 + step) % size]
                seconds[home] = _step_seconds(times, chunks[home], chunks[source], own=source == home)
                travels = rows[source] if step < size - 1 else 0
                if not forward and step > 0:
                    travels += rows[group[(place + step) % size]]
                passed[home, group[(place + (1 if forward else -1)) % size]] += travels * key_bytes(heads)
        steps.append((seconds, passed))
    return StageWork(torch.zeros(homes, dtype=torch.float64), ring=steps)


def _chunks(layout: Layout, home: int) -> dict[int, list[tuple[int, int]]]:
    """The rows [begin, end) of each document on a home, in order."""
    found: dict[int, list[tuple[int, int]]] = {}
    for document, begin, end in layout.segments(home):
        found.setdefault(document, []).append((begin, end))
    return {document: sorted(of) for document, of in found.items()}


def _step_seconds(
    times: PieceTimes,
    mine: dict[int, list[tuple[int, int]]],
    theirs: dict[int, list[tuple[int, int]]],
    *,
    own: bool,
) -> float:
    """Seconds of a step: each chunk of queries sees its own rows causally, and those of earlier chunks wholly."""
    total = 0.0
    for document, queries in mine.items():
        for begin, end in queries:
            keys = sum(e - b for b, e in theirs.get(document, []) if e <= begin)
            if keys:
                total += times.seconds(end - begin, keys, causal=False)
            if own:
                total += times.seconds(end - begin, end - begin, causal=True)
    return total
