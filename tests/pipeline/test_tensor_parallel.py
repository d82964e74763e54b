"""With tensor parallelism every process has some heads: loss and gradients are those of one process."""

from __future__ import annotations

import distca
from support.tensor_stages import Case, assert_exact

FOUR_RANKS = [
    Case(),
    Case(recompute="layer"),
    Case(recompute="layer", save_attention=True),
    Case(order=("tensor", "data", "pipeline")),
    Case(data=1, layers=(1, 2), recompute="layer"),
    Case(heads=distca.Heads(q=4, kv=1, dim=8)),
    Case(tensor=4, data=1),
]


def test_tensor_parallel_processes_compute_what_one_process_computes() -> None:
    """In each of the cases with four processes; key/value heads may be fewer than tensor ranks."""
    assert_exact(FOUR_RANKS)


def test_three_tensor_ranks_compute_what_one_process_computes() -> None:
    """With three key/value heads and with one, which all tensor ranks share."""
    assert_exact([Case(tensor=3, data=1, heads=distca.Heads(q=6, kv=kv, dim=8)) for kv in (3, 1)])
