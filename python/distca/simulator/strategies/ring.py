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
    seconds_of = [_pair_seconds(times, layout, group) for group in groups]
    rows = [layout.num_rows(home) for home in range(homes)]
    steps = []
    for step in range(max(map(len, groups))):
        seconds = torch.zeros(homes, dtype=torch.float64)
        passed = torch.zeros(homes, homes, dtype=torch.float64)
        for group, of_pairs in zip(groups, seconds_of, strict=True):
            size = len(group)
            for place, home in enumerate(group if step < size else []):
                source = (place - step if forward else place + 1 + step) % size
                seconds[home] = of_pairs[place, source]
                travels = rows[group[source]] if step < size - 1 else 0
                if not forward and step > 0:
                    travels += rows[group[(place + step) % size]]
                passed[home, group[(place + (1 if forward else -1)) % size]] += travels * key_bytes(heads)
        steps.append((seconds, passed))
    return StageWork(torch.zeros(homes, dtype=torch.float64), ring=steps)


def _pair_seconds(times: PieceTimes, layout: Layout, group: Sequence[int]) -> torch.Tensor:
    """``[size, size]`` seconds of each home of a ring with the keys of each one.

    A chunk of queries sees its own rows causally, and those of earlier chunks wholly.
    """
    begin, end = _chunks(layout, group)
    size = len(group)
    seconds = torch.zeros(size, size, dtype=torch.float64)
    rows = end - begin
    for source in range(size):
        earlier = end[source] <= begin.unsqueeze(2)  # [size, queries, keys, documents]
        keys = (rows[source] * earlier).sum(2)
        # A piece is one number, because numbers are told apart faster than pairs. Both are below 2^31.
        found, number = torch.unique((rows << 31 | keys).reshape(-1), return_inverse=True)
        pieces = [(piece >> 31, piece & (2**31 - 1)) for piece in found.tolist()]
        took = [times.seconds(of, seen, causal=False) if of and seen else 0.0 for of, seen in pieces]
        seconds[:, source] = torch.tensor(took, dtype=torch.float64)[number].reshape(size, -1).sum(1)
        own = (times.seconds(of, of, causal=True) for of in rows[source].flatten().tolist() if of)
        seconds[source, source] += sum(own)
    return seconds


def _chunks(layout: Layout, group: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """``[size, chunks, documents]`` the first row of each chunk on the homes of a ring, and the one behind the last.

    A home has as many chunks of a document as the one with most; the others are empty.
    """
    found: list[dict[int, list[tuple[int, int]]]] = []
    for home in group:
        of_home: dict[int, list[tuple[int, int]]] = {}
        for document, begin, end in layout.segments(home):
            of_home.setdefault(document, []).append((begin, end))
        found.append(of_home)
    number = {document: index for index, document in enumerate(sorted({n for of_home in found for n in of_home}))}
    most = max((len(chunks) for of_home in found for chunks in of_home.values()), default=1)
    bounds = torch.zeros(2, len(group), most, len(number), dtype=torch.int64)
    for place, of_home in enumerate(found):
        for document, chunks in of_home.items():
            bounds[:, place, : len(chunks), number[document]] = torch.tensor(chunks).T
    return bounds[0], bounds[1]
