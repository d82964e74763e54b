"""Floating-point operations of distca's operators, as `torch.utils.flop_counter.FlopCounterMode` counts them.

Pairs of a row and a key that the mask hides do not count, and what backward computes again does, as in PyTorch's own
formulas: two products of all visible pairs in forward and five in backward, each number of which is two operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from distca import _C
from distca.planner.halves import visible_pairs


def _forward(pairs: int, dim: int, value_dim: int) -> int:
    return 2 * pairs * (dim + value_dim)


def _backward(pairs: int, dim: int, value_dim: int) -> int:
    return 2 * pairs * (3 * dim + 2 * value_dim)


def _pairs_of_plan(q: torch.Tensor, table: torch.Tensor, **_: Any) -> int:
    """Visible pairs of all query heads of the tasks that the plan's rank computes, whosever rows they are."""
    return _C.computed_pairs(table.numpy())


def _pairs_of_tasks(
    q: torch.Tensor, tasks: torch.Tensor, mask: str = "causal", window: int | None = None, **_: Any
) -> int:
    """Visible pairs of all query heads of `distca.attention`."""
    pairs = 0
    for q_begin, q_end, kv_begin, kv_end in tasks.tolist():
        rows, keys = q_end - q_begin, kv_end - kv_begin
        if mask == "full" and window is None:
            pairs += rows * keys
        else:  # the queries are the last rows
            pairs += visible_pairs(keys, window) - visible_pairs(keys - rows, window)
            pairs += visible_pairs(rows, window) - rows if mask == "full" else 0
    return q.shape[1] * pairs


def _register(pairs: Callable[..., int], forwards: list[str], backwards: list[str]) -> None:
    def count(each: Callable[[int, int, int], int], table: torch.Tensor, *heads: torch.Tensor, **options: Any) -> int:
        q, _, v = heads
        if isinstance(table, torch._subclasses.FakeTensor):
            return 0  # nobody knows what it says
        return each(pairs(q, table, **options), q.shape[2], v.shape[2])

    def forward(q: Any, k: Any, v: Any, table: Any, *_: Any, out_val: Any = None, **options: Any) -> int:
        return count(_forward, table, q, k, v, **options)

    def backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, table: Any, *_: Any, out_val: Any = None, **options: Any
    ) -> int:
        return count(_backward, table, q, k, v, **options)

    for names, formula in ((forwards, forward), (backwards, backward)):
        packets: list[Any] = [getattr(torch.ops.distca, name) for name in names]
        register_flop_formula(packets, get_raw=True)(formula)


def register_formulas() -> None:
    """Registers formulas of all operators, which must be loaded."""
    _register(
        _pairs_of_plan,
        ["core_attention", "core_attention_all", "dispatch"],
        ["core_attention_backward", "dispatch_backward"],
    )
    _register(
        _pairs_of_tasks,
        ["attention", "attention_all", "attention_by_flash"],
        ["attention_backward", "attention_by_flash_backward"],
    )
