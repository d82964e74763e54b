"""`distca.loopback`: a whole attention group in one process."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import torch

from distca import _C
from distca.connect.options import attention_problem, core_options, device_name, slot_bytes_of
from distca.context import Context
from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.planner.cost import CostModel

_groups = itertools.count()


def loopback(
    num_ranks: int,
    *,
    max_tokens: int,
    heads: Heads,
    heap_bytes: int | None = None,
    timeout: float = 600.0,
    cost: CostModel | None = None,
    device: torch.device | str = "cpu",
    attention: str | None = None,
) -> list[Context]:
    """Makes a whole group in this process, for tests; each context must be used from a thread of its own.

    On CUDA the ranks share a GPU, and each must work on a stream of its own (``with torch.cuda.stream(...)``), for on a
    common one they would wait for each other. Autograd runs the backward of all threads' graphs on a GPU in one thread,
    where ranks would wait for each other for ever: run them under
    ``torch.autograd.set_multithreading_enabled(False)``.

    Args:
        num_ranks: number of ranks.
        max_tokens, heads, heap_bytes, timeout, cost, device, attention: as for :func:`distca.init`.

    Raises:
        InvalidArgumentError: for wrong arguments, or such that do not go together.
    """
    return make_group(num_ranks, max_tokens, heads, heap_bytes, timeout, cost, device_name(device), attention)


def make_group(
    num_ranks: int,
    max_tokens: int,
    heads: Heads,
    heap_bytes: int | None,
    timeout: float,
    cost: CostModel | None,
    device: str,
    attention: str | None,
    emulation: ModuleType | None = None,
    **options: Any,
) -> list[Context]:
    """`loopback`; with `emulation`, what makes the core's contexts in place of ``_C``, with options of its own."""
    attention = _C.chosen_attention(attention, device)
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
    return [Context(core, heads, cost, emulation=emulation) for core in cores]
