"""How ranks hand each other rows of a tensor other than by a step of core attention."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from distca.errors import DistcaError, PeerDiedError, PeerTimeoutError
from distca.planner.private_group import PrivateGroup, is_late


class RowExchange(ABC):
    """All ranks of a context give each other rows. All of them make the same calls in the same order."""

    @abstractmethod
    def bytes_of_all(self, sent: torch.Tensor, counts: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """The rows that the other ranks have for this one, by rank.

        Args:
            sent: uint8 ``[sum(counts), bytes]``, contiguous.
            counts: how many of these rows go to each rank, in this order.
            received: how many come from each rank.

        Returns:
            uint8 ``[sum(received), bytes]``.

        Raises:
            PeerDiedError, PeerTimeoutError: a rank has ended, or does not come.
        """

    @abstractmethod
    def close(self) -> None:
        """Leaves the group, if there is one."""

    def move(self, rows: torch.Tensor, counts: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """As `bytes_of_all`, for rows ``[sum(counts), ...]`` of any dtype. Gradients go back the same way."""
        moved: torch.Tensor = _Moved.apply(rows, self, counts, received)  # type: ignore[no-untyped-call]
        return moved


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, exchange: RowExchange, counts: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        ctx.exchange, ctx.counts, ctx.received = exchange, counts, received
        of_row = rows.shape[1:]
        sent = rows.reshape(rows.shape[0], math.prod(of_row)).contiguous().view(torch.uint8)
        return exchange.bytes_of_all(sent, counts, received).view(rows.dtype).reshape(-1, *of_row)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return ctx.exchange.move(gradient, ctx.received, ctx.counts), None, None, None


class GroupRows(RowExchange):
    """A private group of ``torch.distributed``: NCCL for rows on GPUs, and gloo otherwise. All of the ranks make it.

    Args:
        ranks: the ranks in ``torch.distributed``.
        device: the type of device on which rows are.
        timeout: seconds to wait for the other ranks; None for torch.distributed's own limit.
    """

    def __init__(self, ranks: list[int], device: str, timeout: float | None) -> None:
        try:
            self._private = PrivateGroup(ranks, timeout, device)
        except RuntimeError as error:
            raise _unreachable(error) from error

    def close(self) -> None:
        """Leaves the group."""
        self._private.close()

    def bytes_of_all(self, sent: torch.Tensor, counts: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        try:
            return self._private.all_to_all(sent, counts, received)
        except RuntimeError as error:
            raise _unreachable(error) from error


class ThreadRows(RowExchange):
    """Ranks that are threads of this process.

    Args:
        meeting: what all ranks share.
        rank: this rank.
        timeout: seconds to wait for the other ranks.
    """

    def __init__(self, meeting: Meeting, rank: int, timeout: float) -> None:
        self._meeting, self._rank, self._timeout = meeting, rank, timeout

    def bytes_of_all(self, sent: torch.Tensor, counts: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        here = self._meeting
        here.sent[self._rank] = list(sent.split(list(counts)))
        try:
            here.barrier.wait(self._timeout)
            rows = torch.cat([of_rank[self._rank] for of_rank in here.sent])
            here.barrier.wait(self._timeout)
        except threading.BrokenBarrierError as error:
            raise PeerTimeoutError("the ranks could not exchange rows: one of them did not come") from error
        return rows

    def close(self) -> None:
        """Does nothing."""


class Meeting:
    """Where the ranks of `ThreadRows` meet."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks)
        self.sent: list[list[torch.Tensor]] = [[]] * num_ranks


def _unreachable(error: RuntimeError) -> DistcaError:
    """The error for one of PyTorch's from an exchange of rows."""
    kind = PeerTimeoutError if is_late(error) else PeerDiedError
    return kind(f"the ranks could not exchange rows: one of them has ended, or makes other calls: {error}")
