"""Ping-pong in every kind of pipeline: stages, depths, chunks and recomputation, each beside one process in float64.

pytest runs this file only if it is named. `test_halved_model.py` has a few of the cases.
"""

from __future__ import annotations

import pytest

from support.halved_stages import Case, assert_exact

RECOMPUTED = [
    (None, False),
    ("layer", False),
    ("stage", False),
    ((1, 2), False),
    ("layer", True),
    ((1, 2), True),
]

#: Layers of each stage's chunks, micro-batches, chunks, ranks.
PIPELINES = [
    ([3, 3], (0, 1, 2, 3), 1, 4),
    ([1, 3], (0, 1, 4, 5, 2), 1, 4),
    ([3, 1], (5,), 1, 4),
    ([1, 3], (0, 3), 2, 4),
    ([3, 1, 1], (0, 1, 2, 4), 1, 3),
    ([1, 3, 1], (5, 0), 1, 6),
    ([1, 1, 3], (1, 0, 3), 2, 3),
    ([3], (0, 5), 1, 2),
]


@pytest.mark.parametrize("number", range(len(PIPELINES)), ids=lambda number: str(PIPELINES[number]))
def test_a_pipeline_in_ping_pong_computes_what_one_process_computes(number: int) -> None:
    layers, microbatches, chunks, ranks = PIPELINES[number]
    cases = [Case(layers, microbatches, chunks, recompute, save_attention) for recompute, save_attention in RECOMPUTED]
    assert_exact(cases, ranks)
