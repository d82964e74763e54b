"""A pipelined model in ping-pong computes what one process computes. `every_ping_pong.py` has all the other cases."""

from __future__ import annotations

from support.halved_stages import Case, assert_exact


def test_stages_of_different_depth_in_ping_pong_are_exact_whatever_is_checkpointed() -> None:
    cases = [
        Case([1, 2], microbatches=(0, 1, 5)),
        Case([1, 2], recompute="layer"),
        Case([1, 2], microbatches=(0, 1), recompute="stage"),
        Case([1, 1], microbatches=(0, 1), chunks=2, recompute="layer", save_attention=True),
    ]
    assert_exact(cases, ranks=4)
