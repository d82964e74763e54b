"""Groups of ranks that nobody else uses: their collectives meet no others in another order.

They are in none of ``torch.distributed``'s lists. Therefore they can be left without a trace, and its end does not
concern them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_numbers: Counter[tuple[int, ...]] = Counter()  # how many groups of these ranks were made
_open: set[PrivateGroup] = set()  # kept alive: a forked child must not end its parent's threads and sockets


class PrivateGroup:
    """A group of some ranks. All of them make it.

    Args:
        ranks: the ranks in ``torch.distributed``, this one among them.
        timeout: seconds to wait for the other ranks; None for torch.distributed's own limit.
        device: the type of the device that tensors are on: NCCL serves ``"cuda"``, and gloo others.

    Raises:
        RuntimeError: the ranks do not come together.
    """

    def __init__(self, ranks: Sequence[int], timeout: float | None, device: str = "cpu") -> None:
        members = tuple(ranks)
        name = f"distca/{'_'.join(map(str, members))}/{_numbers[members]}/{device}"
        _numbers[members] += 1
        limit = dist.distributed_c10d.default_pg_timeout if timeout is None else timedelta(seconds=timeout)
        self.num_ranks = len(members)
        self._pid = os.getpid()
        self._backend: Any = connected(name, members.index(dist.get_rank()), len(members), limit, device)
        _open.add(self)

    def all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, which are alike in shape."""
        everyone = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        waited(self._live().allgather([everyone], [mine]))
        return everyone

    def all_to_all(
        self, sent: torch.Tensor, counts: Sequence[int], rows: torch.Tensor, received: Sequence[int]
    ) -> None:
        """Sends `counts` rows of `sent` to the ranks. `rows` become those that come: `received` from each."""
        all_to_all_single(self._live(), rows, sent, list(received), list(counts))

    def _live(self) -> Any:
        if self._backend is None:
            raise RuntimeError("this rank has left the group")
        return self._backend

    def close(self) -> None:
        """Leaves the group."""
        if self._pid == os.getpid():
            self._backend = None
            _open.discard(self)


def connected(name: str, rank: int, num_ranks: int, limit: timedelta, device: str) -> Any:
    """A backend of ``torch.distributed`` that is in no list of groups.

    Raises:
        RuntimeError: the ranks do not come together (`is_late` tells whether in time).
    """
    make: Callable[..., Any] = dist.ProcessGroupNCCL if device == "cuda" else dist.ProcessGroupGloo
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    return _within(limit.total_seconds() + 1.0, lambda: make(store, rank, num_ranks, limit))


def is_late(error: Exception | str) -> bool:
    """Whether an error of ``torch.distributed``, or its text, says that a wait took too long."""
    return any(words in str(error).lower() for words in ("timed out", "timeout"))


def all_to_all_single(
    backend: Any, output: torch.Tensor, input: torch.Tensor, output_sizes: list[int], input_sizes: list[int]
) -> None:
    """Does what ``torch.distributed.all_to_all_single`` does, over a backend that is in no list of groups."""
    options = dist.distributed_c10d.AllToAllOptions()
    backend.alltoall_base(output, input, output_sizes, input_sizes, options).wait()


def waited(work: Any) -> None:
    """Waits for a collective. PyTorch's own wait cannot be interrupted, and at Python's end it aborts the process if
    another thread is in it.
    """
    pause = 0.0
    while not work.is_completed():
        time.sleep(pause)
        pause = min(pause + 2e-5, 2e-3)
    work.wait()


def _within(seconds: float, make: Callable[[], Any]) -> Any:
    """What `make` returns or raises. Raises RuntimeError if it takes longer, and then leaves its thread running."""
    made: list[Any] = []

    def run() -> None:
        try:
            made.append(make())
        except Exception as error:
            made.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not made:
        raise RuntimeError(f"timed out: no answer within {seconds:g} s")
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]
