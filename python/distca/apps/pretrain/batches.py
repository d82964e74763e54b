"""What Megatron's schedule and ours take micro-batches from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams

from distca.apps.pretrain.context_parallel import SharedDocuments, SharedSeqParams
from distca.integrations.megatron_batches import rotate_by_row
from distca.planner.layout import Layout

MakeBatches = Callable[[], Iterator[dict[str, torch.Tensor]]]


class LocalBatches(Iterator[dict[str, torch.Tensor]]):
    """Micro-batches for Megatron's own schedule and attention, with the interface of `PlannedBatches`.

    Args:
        batches: of `MicroBatches`.
        chunk: the chunk of the model that takes them.
        group: the ranks over which the documents of a slot are cut, head-tail; None if each rank has its own.
    """

    def __init__(
        self, batches: Iterator[dict[str, torch.Tensor]], chunk: Any, group: dist.ProcessGroup | None = None
    ) -> None:
        self._batches, self._group = batches, group
        self._current: dict[str, torch.Tensor] | None = None
        self._positions: list[torch.Tensor] = []  # of the micro-batch that the chunk has not seen yet
        if group is not None:
            rotate_by_row(chunk, lambda: self._positions.pop() if self._positions else None)

    def __next__(self) -> dict[str, torch.Tensor]:
        self._current = next(self._batches)
        self._positions = [self._current["position_ids"][0]]
        return self._current

    def packed_seq_params(self) -> Any:
        """Megatron's parameters of the documents of the current micro-batch."""
        assert self._current is not None
        ends, longest = self._current["cu_seqlens"], int(self._current["position_ids"].max()) + 1
        if self._group is not None:
            ends = ends[[0, -1]]  # positions are those of rows
        if torch.cuda.is_available():
            ends = ends.cuda(non_blocking=True)
        if self._group is None:
            return PackedSeqParams("thd", ends, ends, None, None, longest, longest)
        lengths, ranks = self._current["lengths"].tolist(), dist.get_world_size(self._group)
        layout = Layout.head_tail(lengths, ranks=ranks)
        shared = SharedDocuments(layout, dist.get_rank(self._group), self._group, ends.device)
        return SharedSeqParams("thd", ends, ends, None, None, longest, longest, shared=shared)


def repeated(make: MakeBatches, count: int) -> Iterator[dict[str, torch.Tensor]]:
    """The first `count` micro-batches over and over."""
    return itertools.chain.from_iterable(itertools.islice(make(), count) for _ in itertools.count())
