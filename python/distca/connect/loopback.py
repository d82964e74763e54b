"""`distca.loopback`: a whole attention group in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from distca import _C
from distca.connect.options import attention_problem, chosen_attention, core_options, device_name, slot_bytes_of
from distca.connect.row_exchange import Meetings, RowExchange, ThreadRows
from distca.context import Context
from distca.errors import InvalidArgumentError
from distca.heads import LayerHeads
from distca.planner.cost import CostModel

_groups = itertools.count()


def loopback(
    num_ranks: int,
    *,
    max_tokens: int,
    heads: LayerHeads,
    heap_bytes: int | None = None,
    timeout: float = 600.0,
    cost: CostModel | None = None,
    device: torch.device | str = "cpu",
    attention: str | None = None,
) -> list[Context]:
    """Makes a whole group in this process, for tests. Use each context from a thread of its own.

    On CUDA the ranks share a GPU, and each must work on a stream of its own (``with torch.cuda.stream(...)``), because
    on a common stream they would wait for each other. For a GPU, autograd runs the backward of all threads' graphs in
    one thread, where ranks would wait for each other for ever. Run backward under
    ``torch.autograd.set_multithreading_enabled(False)``.

    Args:
        num_ranks: number of ranks.
        max_tokens, heads, heap_bytes, timeout, cost, device, attention: as in `distca.init`.

    Returns:
        The contexts of the ranks, by rank.

    Raises:
        InvalidArgumentError: an argument is wrong, or arguments exclude each other.
        DeviceError: the device is not there.
    """
    return make_group(num_ranks, max_tokens, heads, heap_bytes, timeout, cost, device_name(device), attention)


def make_group(
    num_ranks: int,
    max_tokens: int,
    heads: LayerHeads,
    heap_bytes: int | None,
    timeout: float,
    cost: CostModel | None,
    device: str,
    attention: str | None,
    emulation: ModuleType | None = None,
    **options: Any,
) -> list[Context]:
    """Does what `loopback` does.

    With `emulation`, that module makes the core's contexts in place of `_C`, and has options of its own.
    """
    attention = chosen_attention(attention, device, heads)
    if problem := attention_problem(device, attention, heads):
        raise InvalidArgumentError(f"loopback: {problem}")
    group = next(_groups)
    cost = cost or CostModel()
    made_by: Any = emulation or _C
    cores = made_by.make_loopback(
        names=[f"loopback/{group}/{rank}" for rank in range(num_ranks)],
        device=device,
        attention=attention,
        **options,
        **core_options(slot_bytes_of(max_tokens, heads, heap_bytes), timeout, cost),
    )
    meetings = Meetings()

    def rows(rank: int) -> Callable[[Sequence[int]], RowExchange]:
        return lambda ranks: ThreadRows(meetings.of(ranks), list(ranks).index(rank), timeout)

    return [Context(core, heads, cost, emulation=emulation, rows=rows(core.rank)) for core in cores]
