"""Contexts: their names, their arguments, and what a closed or missing one says."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import distca
from support.batches import random_batch, rows_of_rank
from support.groups import compute, loopback_group, run_step
from support.refusals import HEADS, LAYOUT, LENGTHS, Group, plan_of_two


def test_a_context_that_is_not_there_is_refused_with_those_that_are(group: Group) -> None:
    with pytest.raises(distca.InvalidArgumentError, match='no context "nobody".*distca.init.*"loopback/'):
        distca.core_attention(*group.inputs(), group.plan, context="nobody")
    with pytest.raises(distca.InvalidArgumentError, match='no context "default"'):
        distca.core_attention(*group.inputs(), group.plan)
    group.check_still_works()


def test_a_copy_of_what_holds_a_context_holds_the_same_one_and_a_pickle_is_refused() -> None:
    for closes in (False, True):
        (context,) = distca.loopback(1, max_tokens=8, heads=HEADS)
        module = torch.nn.Linear(1, 1)
        module.context = context
        if closes:
            context.close()
        copied = copy.deepcopy(module)
        assert copied.context is context and copy.copy(context) is context
        assert copied.weight is not module.weight
        with pytest.raises(TypeError, match=f"context '{context.name}' cannot be pickled, .* call distca.init in each"):
            pickle.dumps(module)
        context.close()


def test_a_closed_context_is_refused_and_may_be_closed_again() -> None:
    plan = plan_of_two()
    batch = random_batch(LENGTHS, HEADS, 1)
    with loopback_group(plan) as contexts:
        inputs = [rows_of_rank(batch, LAYOUT, 0, t) for t in (batch.q, batch.k, batch.v)]
        contexts[0].close()
        contexts[0].close()
        name = contexts[0].name
        for call in (
            lambda: distca.plan(LAYOUT, HEADS, context=contexts[0]),
            lambda: distca.plans(LAYOUT, HEADS, context=contexts[0], windows=[None]),
            lambda: distca.core_attention(*inputs, plan, context=contexts[0]),
        ):
            with pytest.raises(distca.InvalidArgumentError, match=f'context "{name}" is closed$'):
                call()
        for call in (
            lambda: distca.plan(LAYOUT, HEADS, context=name),
            lambda: distca.core_attention(*inputs, plan, context=name),
        ):
            with pytest.raises(distca.InvalidArgumentError, match=f"no context .{name}.*this name was closed"):
                call()


def test_a_closed_context_is_not_taken_for_the_one_that_has_its_name_now() -> None:
    heads = distca.Heads(2, 1, 8)
    layout = distca.Layout.from_documents([[8]])
    closed = distca.init(max_tokens=8, heads=heads)
    closed.close()
    q, k, v = (torch.zeros(8, n, 8) for n in (2, 1, 1))
    with distca.init(max_tokens=8, heads=heads) as context:
        plan = distca.plan(layout, heads, context=context)
        for call in (
            lambda: distca.plan(layout, heads, context=closed),
            lambda: distca.core_attention(q, k, v, plan, context=closed),
            lambda: distca.dispatch(q, k, v, plan, context=closed),
        ):
            with pytest.raises(distca.InvalidArgumentError, match='context "default" is closed; there is another one'):
                call()
        assert context.step == 0
        distca.core_attention(q, k, v, plan, context=context)


def test_a_name_in_use_is_refused_until_it_is_closed() -> None:
    with distca.init(max_tokens=8, heads=HEADS, name="taken") as first:
        with pytest.raises(distca.InvalidArgumentError, match="'taken' exists already"):
            distca.init(max_tokens=8, heads=HEADS, name="taken")
        assert distca.get_context("taken") is first
    with distca.init(max_tokens=8, heads=HEADS, name="taken") as second:
        assert distca.get_context("taken") is second


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heap_bytes": 0}, "heap_bytes = 0"),
        ({"heap_bytes": 127}, "heap_bytes = 127; at least 128"),
        ({"heap_bytes": -5}, "heap_bytes = -5"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"timeout": 0.0}, "timeout = 0"),
        ({"timeout": -1.0}, "timeout = -1"),
        ({"timeout": float("nan")}, "timeout = nan"),
        ({"transport": "carrier pigeon"}, "'carrier pigeon'; one of auto, shm, torch, cuda-ipc, nvshmem, loopback"),
        ({"cost": distca.CostModel(0, 0)}, "not both 0"),
    ],
    ids=str,
)
def test_arguments_of_init_out_of_range_are_refused(options: dict[str, object], said: str) -> None:
    arguments: dict[str, object] = {"max_tokens": 8, "heads": HEADS, "name": "refused"}
    with pytest.raises(distca.InvalidArgumentError) as caught:
        distca.init(**(arguments | options))  # type: ignore[arg-type]
    assert said in str(caught.value)
    assert distca.get_context("refused") is None


def test_the_smallest_heap_that_is_accepted_serves_a_rank_alone() -> None:
    plan = distca.plan(distca.Layout.from_documents([LENGTHS]), HEADS)
    batch = random_batch(LENGTHS, HEADS, 1)
    with distca.init(max_tokens=8, heads=HEADS, heap_bytes=128, name="small") as context:
        assert context.slot_bytes == 64
        ours = run_step(batch, plan, context)
    for a, b in zip(ours, compute(batch, plan), strict=True):
        assert torch.equal(a, b)
