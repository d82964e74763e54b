"""Models whose layers differ in their heads: a mapping from windows to heads, wherever heads are asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import distca
from distca.connect.options import attention_problem, chosen_attention
from distca.heads import shapes_of
from distca.pipeline import PipelinePlans
from support.batches import random_batch
from support.groups import compute
from support.oracle import NAMES

WINDOW = 20
#: The layers with a window have the larger rows.
HEADS = {None: distca.Heads(4, 1, 32), WINDOW: distca.Heads(6, 2, 24, 40)}
LENGTHS = (90, 30, 7)
LAYOUT = distca.Layout.packed(list(LENGTHS), ranks=2, tokens_per_rank=64)


def test_each_window_has_the_plan_of_its_heads() -> None:
    plans = distca.plans(LAYOUT, HEADS, windows=[WINDOW, None, WINDOW], tolerance=0.0, min_rows=1)
    assert list(plans) == [WINDOW, None]
    for window, heads in HEADS.items():
        alone = distca.plan(LAYOUT, heads, window=window, tolerance=0.0, min_rows=1)
        assert plans[window].digest == alone.digest
        assert plans.for_rank(1)[window].digest == alone.digest


def test_chunks_and_windows_may_have_heads_of_their_own() -> None:
    chunk, heads = distca.Chunk(16), distca.Heads(2, 2, 8)
    plans = distca.plans(LAYOUT, HEADS | {chunk: heads}, windows=[chunk, None])
    assert plans[chunk].heads == heads and plans[None].heads == HEADS[None]


def test_steps_of_layers_with_other_heads_share_a_context() -> None:
    plans = distca.plans(LAYOUT, HEADS, windows=[None, WINDOW], tolerance=0.0, min_rows=1)
    for window, plan in plans.items():
        batch = random_batch(LENGTHS, HEADS[window], 3)
        apart = distca.plan(distca.Layout.from_documents([LENGTHS]), HEADS[window], window=window)
        for name, ours, alone in zip(NAMES, compute(batch, plan), compute(batch, apart), strict=True):
            torch.testing.assert_close(ours, alone, msg=f"{name} of {window}")


def test_windows_that_have_one_effect_are_not_taken_for_each_other_where_heads_differ() -> None:
    short = distca.Layout.from_documents([[7], [5]])
    plans = distca.plans(short, HEADS, windows=[None, WINDOW])
    with pytest.raises(
        distca.InvalidArgumentError, match="window of 15; there are plans for None, 20, whose heads differ"
    ):
        plans.for_window(15)
    alike = distca.plans(short, dict.fromkeys(HEADS, HEADS[None]), windows=[None, WINDOW])
    assert alike.for_window(15) is alike[None]


def test_calls_of_no_layer_with_other_numbers_of_heads_have_no_largest_logits_together() -> None:
    layout = distca.Layout.from_documents([LENGTHS])
    [context] = distca.loopback(1, max_tokens=sum(LENGTHS), heads=HEADS)
    with (
        pytest.raises(distca.InvalidArgumentError, match=r"calls of layer None have different numbers of query heads"),
        context.max_logits() as found,
    ):
        for window, plan in distca.plans(layout, HEADS, windows=[None, WINDOW]).items():
            batch = random_batch(LENGTHS, HEADS[window], 3)
            for layer in (None, f"of {window}"):
                distca.core_attention(batch.q, batch.k, batch.v, plan, context=context, layer=layer)
    assert {layer: len(of_layer) for layer, of_layer in found.items()} == {"of None": 4, "of 20": 6}


def test_a_context_has_the_same_heads_in_every_process() -> None:
    """Sets of dtypes have another order in each."""
    heads = {None: distca.Heads(4, 1, 64, dtype=torch.bfloat16), 20: distca.Heads(4, 1, 64, dtype=torch.float16)}
    assert [shape.dtype for shape in shapes_of("init", heads)] == [torch.bfloat16, torch.float16]
    mapping = dict(heads)
    [context] = distca.loopback(1, max_tokens=8, heads=mapping)
    mapping.clear()
    assert context.layer_heads == heads


def test_a_context_is_as_large_as_the_largest_rows_need() -> None:
    for first, *_ in (distca.loopback(2, max_tokens=5000, heads=heads) for heads in (HEADS, HEADS[WINDOW])):
        assert first.slot_bytes > distca.loopback(1, max_tokens=5000, heads=HEADS[None])[0].slot_bytes
        assert first.heads == HEADS[WINDOW]
    one, same = (
        distca.loopback(1, max_tokens=5000, heads=heads)[0] for heads in (HEADS, dict.fromkeys(HEADS, HEADS[WINDOW]))
    )
    assert one.slot_bytes == same.slot_bytes
    assert (one.layer_heads, one.plan_independent) == (HEADS, True)


def test_batches_planned_ahead_have_the_heads_of_each_window() -> None:
    with distca.PlanAhead([LAYOUT], heads=HEADS, layout=lambda layout: layout, windows=[None, WINDOW]) as steps:
        [(_, plans)] = steps
    assert {window: plan.heads for window, plan in plans.items()} == HEADS


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: distca.plans(LAYOUT, HEADS, windows=[None, 30]),
            r"plans: heads are given for the windows \[None, 20\], and there are layers of the windows \[30\]",
        ),
        (lambda: distca.plans(LAYOUT, {}, windows=[None]), r"plans: heads = \{\}; a distca\.Heads for each window"),
        (
            lambda: distca.plans(LAYOUT, {None: (4, 2, 8)}, windows=[None]),
            r"plans: heads\[None\] is a tuple; a distca\.Heads is expected",
        ),
        (lambda: distca.init(max_tokens=8, heads={}), r"init: heads = \{\}; a distca\.Heads for each window"),
        (
            lambda: distca.plan(LAYOUT, HEADS),
            r"plan: heads are a mapping from \[None, 20\]; a plan has one head shape: distca\.plans makes",
        ),
        (
            lambda: distca.PlanAhead([LAYOUT], heads=HEADS, layout=lambda layout: layout).__iter__().__next__(),
            "plan: heads are a mapping",
        ),
        (
            lambda: PipelinePlans([LAYOUT], HEADS, stages=[[0, 1], [2, 3]], layers=1),
            r"PipelinePlans: heads are a mapping .* must have the same heads",
        ),
    ],
)
def test_heads_that_do_not_fit_the_layers_are_refused(make: Any, message: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=message):
        make()


def test_the_kernel_is_chosen_for_all_layers_and_a_layer_that_it_cannot_compute_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU whose own kernels take dims up to 32."""

    def choice(_: str | None, device: str, q: int, kv: int, dim: int, v_dim: int, dtype: int) -> str:
        return "own" if max(dim, v_dim) <= 32 else "flash"

    def problem(q: int, kv: int, dim: int, v_dim: int, dtype: int, device: int) -> str:
        return "" if max(dim, v_dim) <= 32 else f"dim {v_dim} on device {device}"

    monkeypatch.setattr("distca._C.chosen_attention", choice)
    monkeypatch.setattr("distca._C.own_attention_problem", problem)
    assert chosen_attention(None, "cuda:1", HEADS) == "own"
    assert attention_problem("cuda:1", "own", HEADS) == "attention = 'own': dim 40 on device 1"
    assert chosen_attention(None, "cuda:1", {7: HEADS[WINDOW]}) == "flash"
    assert attention_problem("cuda:1", "own", {7: HEADS[None]}) == ""
