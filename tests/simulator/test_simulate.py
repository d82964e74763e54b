"""Whole steps: invariants of the model, and steps that were added up by hand."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from distca.calls import Call
from distca.simulator.case import Documents
from distca.simulator.one_f_one_b import order_of_1f1b
from distca.simulator.setup import Parallelism
from distca.simulator.simulate import StrategyResult, simulate, spans_of
from distca.simulator.strategies import STRATEGIES
from distca.simulator.strategies.variable_chunks import deal
from support.simulated import DOCUMENTS, MODEL, SHAPES, cluster


def _simulate(
    shape: Parallelism, names: list[str], documents: Documents = DOCUMENTS, *, speed: float = 1.0, per_node: int = 4
) -> list[StrategyResult]:
    ranks = shape.homes * shape.tensor * shape.pipeline
    return simulate(
        documents,
        cluster=cluster(ranks, per_node, speed=speed),
        model=MODEL,
        parallelism=shape,
        strategies=names,
        record=True,
    )


#: Every strategy in every shape where it can run.
RUNS = [
    pytest.param(name, shape, id=f"{name}-{key}")
    for name, strategy in STRATEGIES.items()
    for key, shape in SHAPES.items()
    if strategy.applies(shape, MODEL, steps=2)
]


@pytest.mark.parametrize(("name", "shape"), RUNS)
def test_a_rank_does_one_thing_at_a_time_and_all_of_it_within_the_step(name: str, shape: Parallelism) -> None:
    (result,) = _simulate(shape, [name])
    for home, idle in enumerate(result.idle):
        spans = spans_of(result.events, home)
        assert all(before[2] <= after[1] for before, after in itertools.pairwise(spans))
        assert spans[0][1] >= 0 and spans[-1][2] <= result.seconds
        computed = sum(end - begin for what, begin, end in spans if what != "wait")
        assert idle == pytest.approx(1 - computed / result.seconds)
    assert 0 < result.mfu < 1 and 0 <= result.exposed_communication < 1


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(RUNS), st.floats(1.0, 20.0))
def test_more_bandwidth_never_slows_a_step_down(run: Any, speed: float) -> None:
    name, shape = run.values
    assume(not name.startswith("wlb"))  # its packing depends on what tokens cost, and therefore on the links
    (slow,), (fast,) = (_simulate(shape, [name], speed=s) for s in (1.0, speed))
    assert fast.seconds <= slow.seconds * (1 + 1e-12)


def test_several_steps_take_the_mean_time_and_all_tokens_count() -> None:
    shape, first, second = SHAPES["data"], DOCUMENTS, [[[7000] * 3] * 4] * 2
    setting = {"cluster": cluster(4), "model": MODEL, "parallelism": shape, "strategies": ["unbalanced", "distca"]}
    apart = [simulate(documents, **setting) for documents in (first, second)]
    together = simulate(first, following=[second], **setting)
    for of_both, one, other in zip(together, *apart, strict=True):
        assert of_both.seconds == pytest.approx((one.seconds + other.seconds) / 2)
        assert of_both.bytes_inside == pytest.approx((one.bytes_inside + other.bytes_inside) / 2)
        tokens = sum(n for documents in (first, second) for of in documents for homes in of for n in homes)
        assert of_both.tokens_per_second == pytest.approx(tokens / (2 * of_both.seconds))
        idle = one.idle[0] * one.seconds + other.idle[0] * other.seconds
        assert of_both.idle[0] == pytest.approx(idle / (2 * of_both.seconds))


def test_unequal_documents_leave_something_to_gain() -> None:
    documents = [[[60000], [1000] * 60, [1000] * 60, [1000] * 60]] * 2
    alone, single, both = _simulate(SHAPES["data"], ["unbalanced", "distca-single", "distca"], documents, speed=1e4)
    assert single.seconds < 0.8 * alone.seconds and both.seconds < 0.8 * alone.seconds


def test_the_ranks_of_a_node_may_change_places() -> None:
    swapped = [[of[1], of[0], of[3], of[2]] for of in DOCUMENTS]
    for name in ("unbalanced", "variable-chunks"):
        (there,), (here,) = (_simulate(SHAPES["data"], [name], documents) for documents in (DOCUMENTS, swapped))
        assert here.seconds == pytest.approx(there.seconds, rel=1e-12)


def test_two_ranks_make_the_calls_of_the_runtime_in_its_order() -> None:
    shape, documents = Parallelism(data=2), [[[4000, 1000], [500, 500]]]
    (result,) = simulate(
        documents,
        cluster=cluster(2),
        model=dataclasses.replace(MODEL, layers=2),
        parallelism=shape,
        strategies=["distca"],
        record=True,
    )
    calls = [call for call, _ in itertools.groupby(event.call for event in result.events) if call is not None]
    forward = ["d00", "d01", "a00", "a01", "c00", "d10", "c01", "d11", "a10", "a11", "c10", "c11"]
    backward = ["d11", "d10", "a11", "a10", "c11", "d01", "c10", "d00", "a01", "a00", "c01", "c00"]
    parts = {"d": "dispatch", "a": "attend", "c": "collect"}
    wanted = [
        Call(parts[part], phase, int(layer), int(half))
        for phase, names in (("forward", forward), ("backward", backward))
        for part, layer, half in names
    ]
    assert calls == wanted
    seen = [torch.stack([event.begin for event in result.events if event.call == call]).amin(0) for call in wanted]
    assert all(bool((before <= after).all()) for before, after in itertools.pairwise(seen))


@pytest.mark.parametrize("name", ["unbalanced", "distca-single"])
def test_a_step_of_one_rank_takes_what_its_parts_take_by_hand(name: str) -> None:
    # 8,192 tokens of one document. Rates: 800 TFLOP/s, 4 TB/s; attention is the point of the cost table.
    (result,) = simulate(
        [[[8192]]], cluster=cluster(1), model=MODEL, parallelism=Parallelism(), strategies=[name], record=True
    )
    rows = 8192
    products = 2 * rows * (1024 * 2048 + 1024 * 1024 + 3 * 1024 * 4096) / 800e12
    bound = 2 * rows * (2 * 1024 + 2 * 2048 + 8 * 1024 + 3 * 4096) / 4e12
    head = 2 * rows * 1024 * 1000 / 800e12 + 2 * rows * (2 * 1024 + 2 * 1000) / 4e12
    weights = 4 * (1024 * 128 * 24 + 3 * 1024 * 4096 + 2 * 1024) + 2 * 1024 * 1000
    dense = 3 * (4 * (products + bound) + head) + weights * 30 / 4e12
    spans = spans_of(result.events, 0)
    assert sum(end - begin for what, begin, end in spans if what != "attention") == pytest.approx(dense)
    # cuDNN's published rates at 8K: 644 TFLOP/s forward, 541 backward (of 2.5 times the operations).
    flop = 4 * 8 * 128 * rows * (rows + 1) / 2
    attention = 4 * (flop / 644e12 + 2.5 * flop / 541e12)
    assert sum(end - begin for what, begin, end in spans if what == "attention") == pytest.approx(attention, rel=0.1)


def test_1f1b_of_equal_micro_batches_has_its_bubble_and_no_other() -> None:
    model = dataclasses.replace(MODEL, vocabulary=1)
    times = {}
    for micro_batches in (1, 4):
        shape = Parallelism(pipeline=2, micro_batches=micro_batches)
        (result,) = simulate(
            [[[8192]]] * micro_batches,
            cluster=cluster(2, speed=1e9),
            model=model,
            parallelism=shape,
            strategies=["unbalanced"],
            record=True,
        )
        times[micro_batches] = max(event.begin.max() for event in result.events if event.what == "optimizer")
    # One micro-batch goes through both stages, forward and backward: 2 (f + b). Each other one takes f + b.
    assert float(times[4] / times[1]) == pytest.approx(5 / 2, rel=1e-2)  # latency and logits besides
    order = [phase[0] + str(number) for phase, number in order_of_1f1b(1, 3, 4)]
    assert order == ["f0", "f1", "b0", "f2", "b1", "f3", "b2", "b3"]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30))
def test_variable_chunks_have_all_documents_and_attention_as_equal_as_the_longest_allows(lengths: list[int]) -> None:
    chunks = [chunk for micro_batch in deal([[lengths, []], [[], []]]) for chunk in micro_batch]
    assert sorted(n for chunk in chunks for n in chunk) == sorted(lengths) and len(chunks) == 4
    pairs = [sum(n * (n + 1) // 2 for n in chunk) for chunk in chunks]
    assert max(pairs) - min(pairs) <= max(n * (n + 1) // 2 for n in lengths)
