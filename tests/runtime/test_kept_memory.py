"""Memory of backward steps that a longer step has outgrown is kept: what was queued on any stream may still read it."""

from __future__ import annotations

import ctypes
from functools import partial

import torch

import distca
from distca.testing import _emulation
from support.groups import on_all_ranks
from support.processes import HEADS, plan_for, tensors_for
from support.programs import AWKWARD_RANKS

ROWS = (96, 97, 128, 700, 96)


def test_memory_of_backward_steps_is_kept_until_the_context_ends() -> None:
    library = ctypes.CDLL(str(AWKWARD_RANKS.path()))
    library.counted_memory(b"kept", ctypes.c_int64(1 << 20))
    contexts = [distca.Context(_emulation.find_context(f"kept/{rank}"), HEADS, distca.CostModel()) for rank in (0, 1)]

    def step(rank: int, context: distca.Context, rows: int) -> None:
        plan = plan_for(2, rank, rows=rows)
        q, k, v, dout = tensors_for(plan)
        out, _ = distca.core_attention(q, k, v, plan, context=context)
        torch.autograd.grad(out, (q, k, v), dout)

    allocated = []
    for rows in ROWS:
        on_all_ranks(contexts, partial(step, rows=rows))
        allocated.append(library.num_allocated())
    # Sizes are powers of two. Therefore those that were outgrown are together smaller than the last one.
    assert allocated == [1, 1, 1, 2, 2]
    assert library.num_given_back() == 0
    for context in contexts:
        context.close()
    del contexts, context
    assert library.num_given_back() == 2
