"""What Megatron's schedule and ours take micro-batches from."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

MakeBatches = Callable[[], Iterator[dict[str, torch.Tensor]]]


class LocalBatches(Iterator[dict[str, torch.Tensor]]):
    """Micro-batches for Megatron's own schedule and attention, with the interface of `PlannedBatches`."""

    def __init__(self, batches: Iterator[dict[str, torch.Tensor]]) -> None:
        self._batches = batches
        self._current: dict[str, torch.Tensor] | None = None

    def __next__(self) -> dict[str, torch.Tensor]:
        self._current = next(self._batches)
        return self._current

    def packed_seq_params(self) -> Any:
        """Megatron's parameters of the documents of the current micro-batch."""
        assert self._current is not None
        ends = self._current["cu_seqlens"]
        longest = int(ends.diff().max())
        if torch.cuda.is_available():
            ends = ends.cuda(non_blocking=True)
        return PackedSeqParams("thd", ends, ends, None, None, longest, longest)


def repeated(make: MakeBatches, count: int) -> Iterator[dict[str, torch.Tensor]]:
    """The first `count` micro-batches over and over."""
    return itertools.chain.from_iterable(itertools.islice(make(), count) for _ in itertools.count())
