"""`distca profile`: measures this machine's attention for tasks of many sizes, and writes a cost model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from distca import _C
from distca.apps.common.machine import setting
from distca.apps.common.options import add_debug
from distca.apps.common.timing import seconds
from distca.errors import InvalidArgumentError
from distca.heads import DTYPES, Heads
from distca.ops import attention

#: Query rows and visible keys of the measured tasks: powers of two, because the cost model takes only those.
Q_ROWS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 4096)
KV_ROWS = (16, 64, 256, 1024, 4096, 16384)
_KEYS_PER_CALL = 8192


def add_command(commands: Any) -> None:
    """Adds `profile` to the parser of the command line."""
    command = commands.add_parser(
        "profile",
        help="measure this machine's attention and write a cost model",
        description="Times forward and backward of single tasks of many sizes on this machine's CPU, and writes the "
        "times as JSON. distca.CostModel.load and `distca plan --cost FILE` read the file.",
    )
    command.add_argument("--q-heads", type=int, default=8, help="query heads (default: 8)")
    command.add_argument("--kv-heads", type=int, default=2, help="key/value heads (default: 2)")
    command.add_argument("--head-dim", type=int, default=64, help="dimension of a head (default: 64)")
    command.add_argument("--dtype", choices=DTYPES, default="fp32", help="dtype of q, k and v (default: fp32)")
    command.add_argument(
        "--rounds", type=int, default=3, help="how often to time each task; the shortest time counts (default: 3)"
    )
    command.add_argument("--out", type=Path, required=True, help="file to write")
    add_debug(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    if options.rounds < 1:
        raise InvalidArgumentError(f"--rounds is {options.rounds}, must be at least 1")
    heads = Heads(options.q_heads, options.kv_heads, options.head_dim, dtype=DTYPES[options.dtype])
    points = [
        measure(heads, q_rows, kv_rows, options.rounds) for kv_rows in KV_ROWS for q_rows in Q_ROWS if q_rows <= kv_rows
    ]
    content = {
        "kind": "measured",
        "device": f"cpu-{_C.cpu_isa()}",
        "heads": [heads.q, heads.kv, heads.dim, heads.value_dim],
        "dtype": options.dtype,
        "points": points,
        **setting(),
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{len(points)} task sizes measured; {options.out} written")
    return 0


def measure(heads: Heads, q_rows: int, kv_rows: int, rounds: int) -> dict[str, float]:
    """Measures one task: the last ``q_rows`` rows of a causal document of ``kv_rows``.

    Forward and backward are those of the local kernel, with as many threads as PyTorch has. Small tasks are timed many
    in a call, as they come in a step.

    Returns:
        The sizes, and the least time of forward and of backward, in nanoseconds.
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
        "forward_ns": _least_ns(partial(attention, q.detach(), k.detach(), v.detach(), tasks), rounds) / num_tasks,
        "backward_ns": _least_ns(backward, rounds) / num_tasks,
    }


def _least_ns(work: Callable[[], object], rounds: int) -> float:
    """The least time of so many calls, in nanoseconds. A first call warms up and is not counted."""
    work()
    return 1e9 * min(seconds(work) for _ in range(rounds))
