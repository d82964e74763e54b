"""Data, tensor and pipeline parallelism together, in eight processes and in four, beside one process in float64.

pytest runs this file only if it is named (`make pipeline`). `test_tensor_parallel.py` has a few of the cases.
"""

from __future__ import annotations

import distca
from support.tensor_stages import Case, assert_exact

RECOMPUTED = [(None, False), ("layer", False), ("stage", False), ("layer", True)]

CASES = [
    *(Case(layers=layers, microbatches=3, recompute=how, save_attention=saved)
      for layers in ([2, 2], [1, 2]) for how, saved in RECOMPUTED),
    *(Case(layers=[1, 1], chunks=2, recompute=how, save_attention=saved) for how, saved in RECOMPUTED),
    *(Case(layers=[2, 1], order=order, recompute="layer")
      for order in (("data", "pipeline", "tensor"), ("tensor", "pipeline", "data"))),
    Case(layers=[1, 2], heads=distca.Heads(q=4, kv=1, dim=8), recompute="layer"),
    Case(tensor=4, data=1, layers=[2, 1]),
    Case(tensor=4, data=2, recompute="layer", save_attention=True),
    Case(data=1, layers=[1, 2, 1, 1], microbatches=3),
    *(Case(layers=[1, 2], recompute=how, save_attention=saved, ping_pong=True) for how, saved in RECOMPUTED),
]  # fmt: skip

ONE_STAGE = [
    Case(recompute=how, save_attention=saved, ping_pong=ping_pong)
    for ping_pong in (False, True) for how, saved in RECOMPUTED
]  # fmt: skip


def test_eight_processes_compute_what_one_process_computes() -> None:
    """All cases in one launch."""
    assert_exact(CASES)


def test_four_processes_in_one_stage_compute_what_one_process_computes() -> None:
    """All cases in one launch."""
    assert_exact(ONE_STAGE)
