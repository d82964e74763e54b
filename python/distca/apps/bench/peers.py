"""Other ways to share attention between ranks, for comparison, on torch.distributed and distca's local kernel.

Both need the tokens of every document spread evenly over the ranks, in 2 * ranks chunks of equal length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from distca.ops import attention

Collective = Callable[[torch.Tensor], torch.Tensor]


def _chunk(length: int, ranks: int) -> int:
    if length % (2 * ranks):
        raise ValueError(f"a document of {length} rows on {ranks} ranks: a multiple of {2 * ranks} is expected")
    return length // (2 * ranks)


class _Gather(torch.autograd.Function):
    """[rows, ...] of each rank -> [ranks, rows, ...]. Backward sums the ranks' gradients and keeps its own rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        gathered = x.new_empty(dist.get_world_size(), *x.shape)
        dist.all_gather(list(gathered.unbind()), x.contiguous())
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        own = grads[0].new_empty(grads[0].shape[1:])
        dist.reduce_scatter(own, list(grads[0].contiguous().unbind()))
        return own


class _Swap(torch.autograd.Function):
    """Sends part i of [ranks, ...] to rank i. Backward does the same with the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        swapped = torch.empty_like(x)
        dist.all_to_all_single(swapped, x.contiguous())
        return swapped

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _Swap.forward(None, grads[0].contiguous())


class AllGather:
    """Context parallelism as in Megatron and Llama 3: keys and values of all ranks are gathered, queries stay.

    Rank r holds chunk r and the r-th from the end of each document. Causal work is therefore even.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        order, tasks, row, begin = [], [], 0, 0
        for length in lengths:
            chunk = _chunk(length, ranks)
            for index in (rank, 2 * ranks - 1 - rank):
                tasks.append((row, row + chunk, begin, begin + (index + 1) * chunk))
                row += chunk
            begin += length
        of_rank, offset = row, 0
        for length in lengths:
            chunk = _chunk(length, ranks)
            for index in range(2 * ranks):
                holder, second = (index, 0) if index < ranks else (2 * ranks - 1 - index, 1)
                first = holder * of_rank + offset + second * chunk
                order.append(torch.arange(first, first + chunk))
            offset += 2 * chunk
        self.num_rows = of_rank
        self._tasks, self._order = torch.tensor(tasks), torch.cat(order)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q, k, v ``[rows, heads, dim]`` of this rank -> out of the same rows."""
        gather = cast("Collective", _Gather.apply)
        k, v = (gather(t).flatten(0, 1).index_select(0, self._order) for t in (k, v))
        return attention(q, k, v, self._tasks)[0]


class AllToAll:
    """Ulysses: each rank computes all tokens of a share of the heads instead of all heads of a share of the tokens.

    Rank r holds the r-th part of the documents' tokens, one document after another. The number of heads must be a
    multiple of the number of ranks.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._ranks = dist.get_world_size()
        self.num_rows = sum(lengths) // self._ranks
        ends = torch.tensor(lengths).cumsum(0)
        begins = ends - torch.tensor(lengths)
        self._tasks = torch.stack([begins, ends, begins, ends], 1)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q, k, v ``[rows, heads, dim]`` of this rank -> out of the same rows."""
        swap = cast("Collective", _Swap.apply)
        q, k, v = (swap(torch.stack(t.chunk(self._ranks, dim=1))).flatten(0, 1) for t in (q, k, v))
        out, _ = attention(q, k, v, self._tasks)
        parts = swap(out.unflatten(0, (self._ranks, -1)))
        return torch.cat(parts.unbind(), dim=1)
