"""How ranks hand each other rows of a tensor other than by a step of core attention."""

from __future__ import annotations

import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from distca.errors import DistcaError, PeerDiedError, PeerTimeoutError
from distca.planner.private_group import PrivateGroup, is_late


class RowExchange(ABC):
    """Ranks of a context give each other rows. All of them make the same calls in the same order."""

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
        come = self.move_parts(
            [[part] for part in rows.split(list(counts))], [[(count, *rows.shape[1:])] for count in received]
        )
        return torch.cat([part for (part,) in come])

    def move_parts(
        self, parts: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[torch.Tensor]]:
        """Hands several tensors to each rank at once. Gradients go back the same way.

        Args:
            parts: those for each rank, of any shapes, and of the same number and dtypes for all ranks.
            shapes: the shapes of those that come from each rank.

        Returns:
            Those that come from each rank.
        """
        flat = itertools.chain(*parts)
        moved: tuple[torch.Tensor, ...] = _Moved.apply(self, shapes, *flat)  # type: ignore[no-untyped-call]
        return _by_rank(moved, len(parts))


class _Moved(torch.autograd.Function):
    """Tensors for each rank, one rank after another, become those from each rank."""

    @staticmethod
    def forward(
        ctx: Any, exchange: RowExchange, shapes: Sequence[Sequence[Sequence[int]]], *flat: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        parts = _by_rank(flat, len(shapes))
        ctx.exchange, ctx.shapes = exchange, [[part.shape for part in of_rank] for of_rank in parts]
        sent = [[part.reshape(-1).contiguous().view(torch.uint8) for part in of_rank] for of_rank in parts]
        sizes = [
            [math.prod(shape) * like.element_size() for shape, like in zip(of_rank, parts[0], strict=True)]
            for of_rank in shapes
        ]
        received = exchange.bytes_of_all(
            torch.cat([*itertools.chain(*sent)])[:, None],
            [sum(map(len, of_rank)) for of_rank in sent],
            [sum(of_rank) for of_rank in sizes],
        )
        made = []
        pieces = received[:, 0].split([*itertools.chain(*sizes)])
        for piece, shape, like in zip(pieces, itertools.chain(*shapes), itertools.cycle(parts[0]), strict=False):
            made.append(like.new_empty(shape))
            made[-1].view(-1).view(torch.uint8).copy_(piece)  # a piece may begin where its dtype may not
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *_Moved.apply(ctx.exchange, ctx.shapes, *gradients)  # type: ignore[no-untyped-call]


def _by_rank(flat: Sequence[torch.Tensor], num_ranks: int) -> list[list[torch.Tensor]]:
    each = len(flat) // num_ranks
    return [list(flat[each * rank : each * (rank + 1)]) for rank in range(num_ranks)]


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
        rows = sent.new_empty(sum(received), *sent.shape[1:])  # a lack of memory is the fault of no other rank
        try:
            self._private.all_to_all(sent, counts, rows, received)
        except RuntimeError as error:
            raise _unreachable(error) from error
        return rows


class ThreadRows(RowExchange):
    """Ranks that are threads of this process.

    Args:
        meeting: what all ranks share.
        rank: this rank's number among them.
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
            here.sent[self._rank] = []  # nobody reads it any more
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


class Meetings:
    """Where some of a process's ranks meet: always the same ones in the same place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[int, ...], Meeting] = {}

    def of(self, ranks: Sequence[int]) -> Meeting:
        """Where these ranks meet."""
        with self._lock:
            return self._made.setdefault(tuple(ranks), Meeting(len(ranks)))


def _unreachable(error: RuntimeError) -> DistcaError:
    """The error for one of PyTorch's from an exchange of rows."""
    kind = PeerTimeoutError if is_late(error) else PeerDiedError
    return kind(f"the ranks could not exchange rows: one of them has ended, or makes other calls: {error}")
