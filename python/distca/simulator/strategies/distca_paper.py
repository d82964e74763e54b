"""The released DistCA: its planner, its messages and its kernel's rates, in ping-pong.

Source: Zhuang et al., Efficient Long-context Language Model Training by Core Attention Disaggregation, arXiv
2510.18121, and its release. `released_planner` has its planner. A move sends queries, and the keys and values of the
whole document. A server begins when all rows have come, and computes all its tasks in one call. Backward sends queries,
keys, values, outputs and their gradients; gradients of keys are added up on the server and go home once a document.
The release plans with growing tolerances (``MIN_TOLERANCE_FACTOR`` and so on) until its buffers hold every message.
Their size is an option of it. Here they may take the memory that is left, and at least the 2 GiB of its experiments:
one for what a rank sends and one for what it receives, for each half.

Rates of FlashAttention-2 on an H200 are those of figure 5, by rows of a shard. Nothing says how fast its backward is;
it is taken to be slower by the same factor as cuDNN's at 32K rows. They take the place of the table ``h200`` alone;
other devices keep their own.

The documents of context ranks are cut over them as the release does, from both ends. A rank that computes rows of a cut
document gets the keys and values that it does not hold, as often as tasks that moved need them.

What differs: halves are those of `distca.halves`, where the release takes two batches. The padding of documents and
copies in a rank's own memory take no time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from distca.planner.layout import PADDING, Layout
from distca.planner.plan import Plan
from distca.simulator.case import Case, Program, Strategy
from distca.simulator.network import Traffic
from distca.simulator.setup import Model, Parallelism
from distca.simulator.strategies.released_planner import Item, cut_documents, released_plan
from distca.simulator.ticking import Ticking
from distca.simulator.work import AttentionWork, PieceTimes

#: The tolerances that the release tries, in this order.
TOLERANCES = (0.05, 0.06, 0.07, 0.08, 0.09, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
#: The least bytes of a buffer for the messages of a rank in one direction.
BUFFER_BYTES = 2 * 2**30
#: TFLOP/s of FlashAttention-2 in forward by the rows of a shard (figure 5), and how much slower backward is.
FA2_RATES = {16: 40, 32: 80, 64: 155, 128: 285, 256: 295, 512: 305, 1024: 308, 2048: 310}
FA2_BACKWARD = 581 / 688


class DistcaPaper(Strategy):
    """The released planner over all homes of all stages, in ping-pong.

    Args:
        flash_attention_2: whether attention has the rates of FlashAttention-2, or the device's own.
    """

    cuts = False

    def __init__(self, *, flash_attention_2: bool) -> None:
        self._flash_attention_2 = flash_attention_2
        self.name = "distca-paper" if flash_attention_2 else "distca-paper-fa3"
        self.about = f"the released DistCA, at the rates of {'FlashAttention-2' if flash_attention_2 else 'the device'}"

    def applies(self, parallelism: Parallelism, model: Model, steps: int = 1) -> bool:
        """In every parallelism."""
        return True

    def prepare(self, case: Case) -> Program:
        """The program of the ticks, with halves."""
        device = case.cluster.device
        if self._flash_attention_2 and device.attention == "h200":
            device = dataclasses.replace(device, attention=fa2_table())
            case = dataclasses.replace(case, cluster=dataclasses.replace(case.cluster, device=device))
        return Released(case)


def fa2_table() -> Mapping[str, Any]:
    """A cost table of FlashAttention-2 on an H200. Shards of fewer than 16 rows take the time of 16."""
    points = []
    for octave in range(12):
        rows, keys = 2**octave, 2**20
        flop = 4 * 128 * (rows * keys - rows * (rows - 1) // 2)
        forward = flop / (FA2_RATES.get(rows, 40 * rows / 16) * 1e3)
        points.append(
            {"q_rows": rows, "kv_rows": keys, "forward_ns": forward, "backward_ns": 2.5 * forward / FA2_BACKWARD}
        )
    return {"heads": [1], "points": points}


class Released(Ticking):
    """The ticks of distca with the released planner's tasks and messages."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, ping_pong=True, layouts=released_layouts(case))
        left = case.cluster.device.memory - self.memory_without_arenas.total
        self.buffer_bytes = max(BUFFER_BYTES, left / 4)
        self._items: dict[Plan, list[Item]] = {}

    @property
    def slot_bytes(self) -> float:
        """Bytes of the buffers of a half, as large as the largest message."""
        ticks = range(len(self.plans.table))
        items = [self.items_of(self.plan_of(tick, part)) for tick in ticks for part in self.plans.parts]
        return 2 * max(float(self._messages(of).max()) for of in items)

    def items_of(self, plan: Plan) -> list[Item]:
        """The tasks for the layout of a plan, by the first tolerance whose messages fit into the buffer."""
        if plan not in self._items:
            items = items_of(plan.layout)
            for tolerance in TOLERANCES:
                self._items[plan] = released_plan(items, plan.layout.num_ranks, self.case.heads, tolerance)
                if float(self._messages(self._items[plan]).max()) <= self.buffer_bytes:
                    break
        return self._items[plan]

    def attention_of(self, plan: Plan, phase: str) -> AttentionWork:
        """What the homes compute and send in a layer."""
        case, items = self.case, self.items_of(plan)
        times = PieceTimes(case.cluster.device, phase, case.heads.q)
        seconds = torch.zeros(case.num_homes, dtype=torch.float64)
        for item in items:
            for begin, end in item.pieces:
                seconds[item.server] += times.seconds(end - begin, end, causal=True)
        there, back = (Traffic.of(matrix, case.per_node) for matrix in self.bytes_of(items, phase))
        return AttentionWork(torch.zeros_like(seconds), seconds, there, back)

    def bytes_of(self, items: list[Item], phase: str) -> tuple[torch.Tensor, torch.Tensor]:
        """``[homes, homes]`` bytes that go to servers and that come home."""
        heads, homes = self.case.heads, self.case.num_homes
        number = heads.dtype.itemsize
        query, out, statistics = heads.q * heads.dim * number, heads.q * heads.value_dim * number, heads.q * 4
        keys = heads.kv * (heads.dim + heads.value_dim) * number
        there, back = (torch.zeros(homes, homes, dtype=torch.float64) for _ in range(2))
        held: dict[int, dict[int, int]] = {}  # rows of each document on each home
        for item in items:
            of_document = held.setdefault(item.document, {})
            of_document[item.home] = of_document.get(item.home, 0) + item.rows
        once = set()
        for item in items:
            first = (item.document, item.server) not in once
            once.add((item.document, item.server))
            moved = item.server != item.home
            for home, rows in held[item.document].items():
                if home == item.server:
                    continue
                there[home, item.server] += rows * keys * (moved or first)
                back[item.server, home] += rows * keys * (first and phase == "backward")
            if moved:
                forward = phase == "forward"
                there[item.home, item.server] += item.rows * (query + (0 if forward else 2 * out + statistics))
                back[item.server, item.home] += item.rows * (out + statistics if forward else query)
        return there, back

    def _messages(self, items: list[Item]) -> torch.Tensor:
        """Bytes that each home sends or receives in each message."""
        matrices = [matrix for phase in ("forward", "backward") for matrix in self.bytes_of(items, phase)]
        return torch.stack([matrix.sum(dim) for matrix in matrices for dim in range(2)])


def released_layouts(case: Case) -> list[Layout]:
    """For each micro-batch its rows: whole documents, or cut over the ranks of each context parallel group."""

    def cut(lengths: list[int], ranks: int) -> Layout:
        if ranks == 1:
            return Layout.from_documents([lengths])
        segments: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
        for item in cut_documents(lengths, ranks):
            segments[item.home] += [(item.document, begin, end) for begin, end in item.pieces]
        return Layout(segments)

    return case.layouts(cut)


def items_of(layout: Layout) -> list[Item]:
    """The rows of each document on each rank of such a layout."""
    lengths, items = layout.document_lengths, []
    for rank in range(layout.num_ranks):
        found: dict[int, list[tuple[int, int]]] = {}
        for document, begin, end in layout.segments(rank):
            if document != PADDING:
                found.setdefault(document, []).append((begin, end))
        for document, pieces in found.items():
            length, (begin, end) = lengths[document], min(pieces)
            items.append(Item(document, length, rank, rank, begin, min(end, length - length // 2)))
    return items
