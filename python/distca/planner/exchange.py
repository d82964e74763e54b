"""How the ranks tell each other what they have loaded, step by step, in the thread that plans ahead."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from distca.errors import DistcaError, InvalidArgumentError, PeerDiedError, PeerLeftError, PeerTimeoutError
from distca.planner.private_group import PrivateGroup, is_late

Loaded = TypeVar("Loaded", covariant=True)
Layouts = TypeVar("Layouts", covariant=True)

# Codes that a rank sends in place of the number of its words.
ENDED = -1
FAILED = -2
STOPPED = -3


class Steps(Iterator[tuple[Loaded, Layouts]]):
    """A source of steps: what was loaded, and the layout or layouts of all ranks.

    If the pass ends before its last step, `abort` is told why.
    """

    def abort(self, code: int) -> None:
        """Says that this rank takes no further step: it has failed (`FAILED`) or was stopped (`STOPPED`)."""


def not_the_end(error: BaseException) -> BaseException:
    """The error, or another one for a StopIteration of a function that the user gave: it would end the pass as if no
    batch followed.
    """
    if not isinstance(error, StopIteration):
        return error
    made = RuntimeError("a function that was given to plan ahead raised StopIteration")
    made.__cause__ = error
    return made


class Exchange:
    """The private gloo group over which the ranks exchange what they have loaded. All of them make it.

    Args:
        group: the ranks; by default all.
        timeout: seconds to wait for the other ranks; None for torch.distributed's own limit.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float | None = None) -> None:
        self._private: PrivateGroup | None = None
        self.num_ranks = 1
        self.is_waiting = False  # for the other ranks
        if dist.is_initialized():
            self._private = PrivateGroup(dist.get_process_group_ranks(group), timeout)
            self.num_ranks = self._private.num_ranks

    def close(self) -> None:
        """Leaves the group."""
        if self._private is not None:
            self._private.close()

    def counts(self, mine: int) -> list[int]:
        """What each rank says about the step: the number of its words, or one of the codes."""
        return [int(count) for (count,) in self._gather(torch.tensor([mine], dtype=torch.int64, device="cpu"))]

    def words(self, mine: list[int], counts: list[int]) -> list[list[int]]:
        """The words of every rank."""
        longest = max(max(counts), 0)
        if longest == 0:
            return [[] for _ in counts]
        padded = torch.zeros(longest, dtype=torch.int64, device="cpu")
        padded[: len(mine)] = torch.tensor(mine, dtype=torch.int64, device="cpu")
        return [row[: max(count, 0)] for row, count in zip(self._gather(padded), counts, strict=True)]

    def _gather(self, mine: torch.Tensor) -> list[list[int]]:
        if self._private is None:
            return [mine.tolist()]
        self.is_waiting = True
        try:
            return [theirs.tolist() for theirs in self._private.all_gather(mine)]
        finally:
            self.is_waiting = False


class GatheredSteps(Steps[Loaded, Layouts], Generic[Loaded, Layouts]):
    """Steps of which every rank tells the others something. All ranks make the same exchanges until one ends the pass.

    Attributes:
        exchange: the group.
        name: the class that the user iterates over, for messages.
        step: the number of the step.
    """

    def __init__(self, exchange: Exchange, name: str) -> None:
        self.exchange, self.name = exchange, name
        self.step = 0
        self._over = False  # the ranks agreed that no further exchange follows

    @abstractmethod
    def _load(self) -> tuple[Any, list[int] | None]:
        """What this rank loads for a step, and what it tells the others: None if its loader has ended."""

    @abstractmethod
    def _is_last(self, counts: list[int]) -> bool:
        """Whether no step follows, as all ranks conclude alike from what they said."""

    @abstractmethod
    def _layouts(self, words: list[list[int]], counts: list[int]) -> Any:
        """The layouts of a step from what the ranks have told."""

    def __next__(self) -> tuple[Any, Any]:
        try:
            loaded, mine = self._load()
        except StopIteration as error:  # loaders that end do so inside
            raise not_the_end(error) from error
        counts = self._counts(ENDED if mine is None else len(mine))
        for rank, count in enumerate(counts):
            if count in (FAILED, STOPPED):
                self._over = True
                what = "failed; its own error says why" if count == FAILED else "stopped iterating"
                raise PeerLeftError(f"{self.name}: rank {rank} of {len(counts)} {what} (before step {self.step})")
        if self._is_last(counts):
            self._over = True
            raise StopIteration
        words = self.exchange.words(mine or [], counts)
        self.step += 1
        return loaded, self._layouts(words, counts)

    def abort(self, code: int) -> None:
        if not self._over:
            self._over = True
            self._counts(code)

    def _counts(self, mine: int) -> list[int]:
        try:
            return self.exchange.counts(mine)
        except RuntimeError as error:
            self._over = True
            raise PeerDiedError(
                f"{self.name}: the ranks could not exchange lengths of step {self.step}: {error}"
            ) from error


def gathered_lengths(lengths: Callable[[], list[int]], find: Callable[[], Exchange | None]) -> list[list[int]]:
    """The lengths of the documents of every rank. All ranks call it.

    Args:
        lengths: finds the lengths of this rank's documents. Of what it raises, the other ranks are told.
        find: finds or makes the exchange of the ranks; None if this one is alone.

    Raises:
        InvalidArgumentError: on all ranks, if `lengths` raised it on one. The message begins with that rank.
        PeerLeftError: `lengths` raised another error on another rank.
        PeerDiedError, PeerTimeoutError: a rank has left the group, or does not come within its timeout.
    """
    try:
        exchange = find()
    except RuntimeError as error:
        raise _unreachable(error) from error
    if exchange is None:
        return [lengths()]
    failed: Exception | None = None
    try:
        mine = [_TOLD, *lengths()]
    except Exception as error:  # whatever it is, the others must not wait for this rank
        refused = isinstance(error, InvalidArgumentError)
        failed = None if refused else error
        text = str(error) if refused else f"{type(error).__name__}: {error}"
        mine = [_REFUSED if refused else _RAISED, *text.encode(errors="replace")[:_TEXT_BYTES]]
    try:
        of_ranks = exchange.words(mine, exchange.counts(len(mine)))
    except RuntimeError as error:
        raise (failed or _unreachable(error)) from error
    if failed is not None:
        raise failed
    for rank, (kind, *told) in enumerate(of_ranks):
        if kind != _TOLD:
            message = f"rank {rank}: {bytes(told).decode(errors='replace')}"
            raise InvalidArgumentError(message) if kind == _REFUSED else PeerLeftError(message)
    return [told for _, *told in of_ranks]


def _unreachable(error: RuntimeError) -> DistcaError:
    """The error for one of PyTorch's from an exchange of lengths."""
    return (PeerTimeoutError if is_late(error) else PeerDiedError)(
        "the ranks could not exchange the lengths of their documents: a rank has ended, or has no further batch; "
        f"all ranks need equally many batches, or distca.PlanAhead in place of this exchange: {error}"
    )


# What a rank's words are: lengths, or the text of an error.
_TOLD, _REFUSED, _RAISED = range(3)
_TEXT_BYTES = 4000
