"""The largest logits of layers that do not ask for them, which their context finds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import distca
from support.batches import LENGTHS, random_batch, rows_of_rank, scattered
from support.groups import loopback_group, on_all_ranks
from support.largest_logits import Options, largest_logits, of_steps

HEADS = distca.Heads(4, 2, 16, 24)


def test_a_context_finds_those_of_layers_that_do_not_ask() -> None:
    batch = random_batch((200, 90), HEADS, 5)
    plan = distca.plan(distca.Layout([[(0, 0, 200)], [(1, 0, 90)], []]), HEADS, tolerance=0.0, min_rows=1)

    def work(rank: int, context: distca.Context) -> Any:
        q, k, v = (rows_of_rank(batch, plan.layout, rank, t) for t in (batch.q, batch.k, batch.v))
        mine: Options = {"plan": plan.for_rank(rank), "context": context}
        with context.max_logits() as found:
            if rank == 2:
                for _ in range(3):
                    distca.serve(mine["plan"], "forward", context=context)
            else:
                assert len(distca.core_attention(q, k, v, **mine, layer=3)) == 2
                assert len(distca.core_attention(-2 * q, k, v, **mine, layer="last")) == 2
                asked = distca.core_attention(q / 2, k, v, **mine, layer=3, max_logits=True)[2]
        if rank < 2:
            assert torch.equal(asked, found[3] / 2)
            asked.fill_(7)  # it is the caller's
        before = dict(found)
        with context.max_logits() as again:
            step = distca.dispatch(q, k, v, **mine)
            distca.attend(step)
            assert len(distca.collect(step)) == 2
        distca.core_attention(q, k, v, **mine)
        assert dict(found) == before and list(again) == [None]
        assert rank == 2 or torch.equal(again[None], found[3])
        with again:
            if rank == 2:
                distca.serve(mine["plan"], "forward", context=context, max_logits=True)
            else:
                distca.core_attention(q / 4, k, v, **mine)
        assert rank == 2 or torch.equal(again[None], found[3] / 4)
        return found

    with loopback_group(plan) as contexts:
        first, second, third = on_all_ranks(contexts, work)
    assert dict(third) == {}
    for found, rows in ((first, slice(0, 200)), (second, slice(200, 290))):
        assert list(found) == [3, "last"]
        for layer, factor in ((3, 1.0), ("last", -2.0)):
            right = largest_logits(batch, HEADS.dim**-0.5 * factor)[rows].amax(0)
            torch.testing.assert_close(found[layer].double(), right, rtol=1e-6, atol=1e-6)


def test_activation_checkpointing_inside_of_it_finds_the_same_with_and_without_saved_results() -> None:
    batch, layout = random_batch(LENGTHS, HEADS, 3), scattered(LENGTHS, 2, 1)
    plan = distca.plan(layout, HEADS, tolerance=0.0, min_rows=1)

    def call(q: Any, k: Any, v: Any, plan: distca.Plan, in_parts: bool, context: distca.Context, **options: Any) -> Any:
        q, k, v = (t.nan_to_num().requires_grad_() for t in (q, k, v))

        def layer(q: torch.Tensor) -> torch.Tensor:
            if not in_parts:
                return distca.core_attention(q * 2, k, v, plan, context=context, layer=1)[0].sin()
            step = distca.dispatch(q * 2, k, v, plan, context=context, layer=1)
            distca.attend(step)
            return distca.collect(step)[0].sin()

        with context.max_logits() as found:
            checkpoint(layer, q, use_reentrant=False, **options).sum().backward()
        return found[1], q.grad

    def plain(q: Any, k: Any, v: Any, plan: distca.Plan, context: distca.Context) -> Any:
        q, k, v = (t.nan_to_num().requires_grad_() for t in (q, k, v))
        out, _, largest = distca.core_attention(q * 2, k, v, plan, context=context, max_logits=True)
        out.sin().sum().backward()
        return largest, q.grad

    right = of_steps(batch, [plan], plain)[0]
    for in_parts in (False, True):
        for options in ({}, {"context_fn": distca.save_core_attention}):
            for mine, theirs in zip(of_steps(batch, [plan], call, in_parts=in_parts, **options)[0], right, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_context_that_misses_some_or_is_asked_twice_or_recorded_says_so() -> None:
    batch, plan = random_batch((30,), HEADS, 6), distca.plan(distca.Layout.from_documents([[30]]), HEADS)
    compiled = torch.compile(distca.core_attention, backend="aot_eager", fullgraph=True)
    wrong = distca.InvalidArgumentError
    rows = (batch.q.requires_grad_(), batch.k, batch.v)
    with loopback_group(plan, streams=True) as (context,):
        found = context.max_logits()
        with pytest.raises(wrong, match="1 forward steps did not tell .* without torch.compile"), found:
            distca.core_attention(*rows, plan, context=context)
            out, _ = compiled(*rows, plan, context=context)
        assert list(found) == [None]
        with found:
            for other, said in ((context.max_logits, "finds them already"), (context.record, "pass max_logits=True")):
                with pytest.raises(wrong, match=said), other():
                    pass
            out.sum().backward()  # that is no forward step
        assert dict(found) == {}
        with pytest.raises(wrong, match="a recording is open"), context.record(), context.max_logits():
            pass
        with context.max_logits() as found:
            distca.core_attention(*rows, plan, context=context)
        assert list(found) == [None]
