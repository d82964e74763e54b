"""Ranks as threads of one process, and what their links carry."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

import distca

Result = TypeVar("Result")


def on_threads(work: Callable[[int, threading.Barrier], Result], ranks: int) -> list[Result]:
    """Calls `work` for each rank, on a thread of its own, with the rank and a barrier of all ranks.

    PyTorch has one thread on each of them.

    Returns:
        What the calls return, in the order of the ranks. The first error of a rank is raised; the barrier is then
        broken for the others.
    """
    start = threading.Barrier(ranks)
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            torch.set_num_threads(1)
            results[rank] = work(rank, start)
        except BaseException as error:
            errors.append(error)
            start.abort()

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def bytes_sent(plans: Sequence[distca.Plan]) -> int:
    """Bytes that the rank that sends most sends in forward and backward of a layer, over all these plans."""
    sent = [0] * plans[0].layout.num_ranks
    for plan in plans:
        for transfer in plan.transfers:
            sent[transfer.source] += transfer.bytes
    return max(sent)
