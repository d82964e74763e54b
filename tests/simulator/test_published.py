"""Published figures: when a modelled one is a hit, and how lengths and rates come about."""

from __future__ import annotations

import pytest

from distca.apps.bench import published_peers
from distca.apps.bench.beside import Beside, scaled_as_published
from distca.simulator.strategies.wlb import by_sequence


def test_a_figure_is_a_hit_within_a_quarter_or_inside_its_range() -> None:
    assert [Beside("a", 8.0, 8.0, x).hit for x in (5.9, 6.0, 10.0, 10.1)] == [False, True, True, False]
    assert [Beside("a", 1.0, 1.2, x).hit for x in (0.99, 1.0, 1.2, 1.21)] == [False, True, True, False]
    # Of a speed-up of 1.4 a quarter is 0.1.
    assert [Beside("a", 1.4, 1.4, x, base=1.0).hit for x in (1.29, 1.31, 1.49, 1.51)] == [False, True, True, False]


def test_lengths_are_scaled_as_the_paper_says() -> None:
    # Every second document below 64K once, the others four times; twice as long, and cut at 128K.
    assert scaled_as_published([10, 11, 12, 65536, 70000], 131072) == [20, 24] + [131072, 131072] * 4


def test_the_rate_of_attention_alone_is_that_of_the_device_where_nothing_travels() -> None:
    # One GPU, no exchange: cuDNN's published rate of 32K rows is 688 TFLOP/s in forward and 581 in backward.
    assert published_peers._rate("wlb", [32768], 1, "forward") == pytest.approx(688, rel=0.02)
    assert published_peers._rate("wlb", [32768], 1, "backward") == pytest.approx(581, rel=0.02)


def test_sequences_have_the_tokens_of_the_context() -> None:
    sequences = published_peers._sequences(131072, 3, seed=0)
    assert [sum(sequence) for sequence in sequences] == [131072] * 3
    rows = [by_sequence(sequences[0], 4).num_rows(rank) for rank in range(4)]
    assert max(rows) - min(rows) <= 2
