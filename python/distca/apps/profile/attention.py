"""Times of attention for tasks of many sizes: the points of a cost model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from distca import _C
from distca.apps.common.timing import seconds
from distca.heads import DTYPES, Heads
from distca.ops import attention

#: Query rows and visible keys of the measured tasks: powers of two, because the cost model takes only those.
Q_ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 4096)
KV_ROWS = (16, 64, 256, 1024, 4096, 16384)
_KEYS_PER_CALL = 8192

Choice = Callable[[Sequence[float]], float]


def grid(heads: Heads, rounds: int, choose: Choice = min) -> list[dict[str, float]]:
    """All task sizes, measured. Of the times of each, `choose` takes one."""
    return [
        measure(heads, q_rows, kv_rows, rounds, choose) for kv_rows in KV_ROWS for q_rows in Q_ROWS if q_rows <= kv_rows
    ]


def cost_table(heads: Heads, points: list[dict[str, float]]) -> dict[str, Any]:
    """The content of a cost model's file, but for the machine's facts."""
    return {
        "kind": "measured",
        "device": f"cpu-{_C.cpu_isa()}",
        "heads": [heads.q, heads.kv, heads.dim, heads.value_dim],
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == heads.dtype),
        "points": points,
    }


def measure(heads: Heads, q_rows: int, kv_rows: int, rounds: int, choose: Choice = min) -> dict[str, float]:
    """Measures one task: the last ``q_rows`` rows of a causal document of ``kv_rows``.

    Forward and backward are those of the local kernel, with as many threads as PyTorch has. Small tasks are timed many
    in a call, as they come in a step.

    Returns:
        The sizes, and the time of forward and of backward that `choose` takes, in nanoseconds.
    """
    num_tasks = max(1, _KEYS_PER_CALL // kv_rows)
    generator = torch.Generator().manual_seed(0)

    def rows(number: int, num_heads: int, dim: int) -> torch.Tensor:
        return torch.randn(number, num_heads, dim, generator=generator).to(heads.dtype).requires_grad_()

    q = rows(num_tasks * q_rows, heads.q, heads.dim)
    k, v = rows(num_tasks * kv_rows, heads.kv, heads.dim), rows(num_tasks * kv_rows, heads.kv, heads.value_dim)
    tasks = torch.tensor(
        [(i * q_rows, (i + 1) * q_rows, i * kv_rows, (i + 1) * kv_rows) for i in range(num_tasks)], dtype=torch.int64
    )
    out, _ = attention(q, k, v, tasks)
    backward = partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)
    return {
        "q_rows": q_rows,
        "kv_rows": kv_rows,
        "forward_ns": _ns(partial(attention, q.detach(), k.detach(), v.detach(), tasks), rounds, choose) / num_tasks,
        "backward_ns": _ns(backward, rounds, choose) / num_tasks,
    }


def _ns(work: Callable[[], object], rounds: int, choose: Choice) -> float:
    """One of the times of so many calls, in nanoseconds. A first call warms up and is not counted."""
    work()
    return 1e9 * choose([seconds(work) for _ in range(rounds)])
