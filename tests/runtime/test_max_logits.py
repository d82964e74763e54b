"""The largest logits of a step: those of a rank's own rows, whoever computes them, with the same bits in every plan."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distca
from distca import testing
from emulation.emulated_gpu import OPTIONS, EmulatedGpu
from support import flash_on_cpu
from support.batches import LENGTHS, Batch, data_parallel, random_batch, random_tasks, rows_of_rank, scattered, spill
from support.branches import random_tree
from support.groups import fault_of_check, loopback_group, on_all_ranks, outcomes
from support.largest_logits import Options, largest_logits, largest_of_rank, of_steps
from support.ranks import launch
from support.recorded import ROWS, layout_of, tensors_of
from support.score_features import random_sinks

HEADS = distca.Heads(4, 2, 16, 24)


def _plans(layout: distca.Layout, heads: distca.Heads, seed: int, **options: Any) -> list[distca.Plan]:
    tasks = random_tasks(layout, heads.kv, seed)
    return [
        distca.plan(layout, heads, balance=False, **options),
        distca.plan(layout, heads, tolerance=0.0, min_rows=1, **options),
        distca.plan(layout, heads, tasks=tasks, round_bytes=1 if seed % 2 else None, **options),
    ]


@pytest.mark.parametrize("seed", range(8))
def test_they_are_those_of_the_rank_s_rows_and_have_the_same_bits_whatever_the_plan(seed: int) -> None:
    draw = random.Random(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
    heads = distca.Heads(draw.choice([1, 3, 4]) * 2, 2, draw.choice([8, 16, 40]), 24, dtype)
    layout = draw.choice([data_parallel, scattered, spill])(LENGTHS, draw.choice([1, 2, 3, 5]), seed)
    mask, window = draw.choice([("causal", None), ("causal", 50), ("full", None), ("full", 50)])
    scores: Options = {"scale": draw.choice([None, -0.3, 2.0, 0.0]), "softcap": draw.choice([0.0, 1.5])}
    batch = random_batch(LENGTHS, heads, seed)
    if seed % 2:  # no logit is above 0, which is what a row of nothing would have
        batch = dataclasses.replace(batch, q=batch.q.abs(), k=-batch.k.abs())
    plans = _plans(layout, heads, seed, mask=mask, window=window)
    found = of_steps(batch, plans, distca.core_attention, {"reorder_seed": seed}, **scores, max_logits=True)
    plain = of_steps(batch, plans[1:2], distca.core_attention, **scores)[0]
    exact = largest_logits(batch, **scores, mask=mask, window=window)
    for rank in range(layout.num_ranks):
        right = largest_of_rank(batch, layout, rank, exact)
        for of_plan in found:
            out, lse, largest = of_plan[rank]
            assert torch.equal(largest, found[0][rank][2])
            assert torch.equal(out, plain[rank][0]) and torch.equal(lse, plain[rank][1])
        torch.testing.assert_close(largest.double(), right, rtol=1e-6, atol=1e-6)
    of_batch = torch.stack([found[0][rank][2] for rank in range(layout.num_ranks)]).amax(0)
    torch.testing.assert_close(of_batch.double(), exact.amax(0), rtol=1e-6, atol=1e-6)


def test_documents_that_share_rows_see_each_other_or_have_scores_of_their_own_have_theirs() -> None:
    layout = scattered(LENGTHS, 3, 1).with_bidirectional({4: [(10, 90)], 8: [(0, 128)]})
    batch = random_batch(LENGTHS, HEADS, 3)
    found = of_steps(batch, _plans(layout, HEADS, 2), distca.core_attention, max_logits=True)
    exact = largest_logits(batch, bidirectional={4: [(10, 90)], 8: [(0, 128)]})
    for rank in range(3):
        torch.testing.assert_close(
            found[1][rank][2].double(), largest_of_rank(batch, layout, rank, exact), rtol=1e-6, atol=1e-6
        )
        assert all(torch.equal(of_plan[rank][2], found[0][rank][2]) for of_plan in found)

    scores = [
        distca.Scores(window=3 * i + 1) if i % 2 else distca.Scores("full", 40 * (i % 4) or None)
        for i in range(len(LENGTHS))
    ]
    layout = scattered(LENGTHS, 3, 1)
    parts = [random_batch((n,), HEADS, 10 + i) for i, n in enumerate(LENGTHS)]
    batch = Batch(
        LENGTHS, HEADS, *(torch.cat([getattr(part, name) for part in parts]) for name in ("q", "k", "v", "dout"))
    )
    exact = torch.cat(
        [largest_logits(part, mask=s.mask, window=s.window) for part, s in zip(parts, scores, strict=True)]
    )
    found = of_steps(batch, _plans(layout, HEADS, 4, scores=scores), distca.core_attention, max_logits=True)
    for of_plan in found:
        for rank in range(3):
            right = largest_of_rank(batch, layout, rank, exact)
            torch.testing.assert_close(of_plan[rank][2].double(), right, rtol=1e-6, atol=1e-6)

    tree = random_tree(5)
    layout = tree.layout(3, 5)
    total = sum(len(own) for own in tree.own)
    firsts = [sum(len(own) for own in tree.own[:d]) for d in range(len(tree.own))]
    q, k, v = (torch.randn(total, h, 16) for h in (4, 2, 2))

    def rows_of(document: int) -> list[int]:
        return [firsts[d] + row - tree.own[d].start for d, rows in tree.path(document) for row in rows]

    exact = torch.empty(total, 4, dtype=torch.float64)
    for document, own in enumerate(tree.own):
        rows = rows_of(document)
        whole_document = Batch((len(rows),), HEADS, q[rows], k[rows], v[rows], q[rows])
        exact[rows[-len(own) :]] = largest_logits(whole_document)[-len(own) :]
    plans = [distca.plan(layout, distca.Heads(4, 2, 16), tolerance=t, min_rows=1) for t in (0.0, 1.0)]

    def work(rank: int, context: distca.Context) -> list[torch.Tensor]:
        rows = [
            firsts[d] + row - tree.own[d].start if d >= 0 else -1
            for d, begin, end in layout.segments(rank)
            for row in range(begin, end)
        ]
        mine = [t[rows].masked_fill(torch.tensor(rows).lt(0)[:, None, None], math.nan) for t in (q, k, v)]
        right = torch.cat([exact[[row for row in rows if row >= 0]], torch.full((1, 4), -math.inf)]).amax(0)
        found = [
            distca.core_attention(*mine, plan.for_rank(rank), context=context, max_logits=True)[2] for plan in plans
        ]
        return [*found, right]

    with loopback_group(plans) as contexts:
        for first, second, right in on_all_ranks(contexts, work):
            assert torch.equal(first, second)
            torch.testing.assert_close(first.double(), right, rtol=1e-6, atol=1e-6)


def test_steps_in_parts_or_compiled_or_queued_or_that_retain_keys_have_the_same() -> None:
    batch, layout = random_batch(LENGTHS, HEADS, 3), scattered(LENGTHS, 3, 1)
    plans = [distca.plan(layout, HEADS, tolerance=0.0, min_rows=1, retain_bytes=kept) for kept in (0, 1 << 20)]
    sinks = random_sinks(HEADS.q, 1)

    def in_parts(*args: Any, **options: Any) -> Any:
        step = distca.dispatch(*args, **options)
        distca.attend(step)
        return distca.collect(step)

    def overlapped(*args: Any, **options: Any) -> Any:
        first, second = distca.dispatch(*args, **options), distca.dispatch(*args, **options)
        distca.attend(first)
        distca.attend(second)
        a, b = distca.collect(first), distca.collect(second)
        assert torch.equal(a[2], b[2])
        return b

    right = of_steps(batch, plans, distca.core_attention, max_logits=True, sinks=sinks)
    for call in (in_parts, overlapped, torch.compile(distca.core_attention, backend="aot_eager", fullgraph=True)):
        for group in ({}, {"streams": True}, {"streams": True, "hosts": 3}):
            if call not in (in_parts, overlapped) and group:
                continue
            found = of_steps(batch, plans, call, group, max_logits=True, sinks=sinks)
            for of_plan, expected in zip(found, right, strict=True):
                for mine, theirs in zip(of_plan, expected, strict=True):
                    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_they_take_no_gradient_and_change_none() -> None:
    batch, layout = random_batch(LENGTHS, HEADS, 3), scattered(LENGTHS, 2, 1)
    plan = distca.plan(layout, HEADS, tolerance=0.0, min_rows=1, retain_bytes=1 << 20)

    def gradients(q: Any, k: Any, v: Any, plan: Any, in_parts: bool = False, **options: Any) -> Any:
        leaves = [t.nan_to_num().requires_grad_() for t in (q, k, v)]
        if in_parts:
            step = distca.dispatch(*leaves, plan, **options)
            distca.attend(step)
            out, lse, *largest = distca.collect(step)
        else:
            out, lse, *largest = distca.core_attention(*leaves, plan, **options)
        assert not any(one.requires_grad for one in largest)
        (out.sum() + lse.nan_to_num(neginf=0).sum()).backward()
        return [t.grad for t in leaves]

    right = of_steps(batch, [plan], gradients)[0]
    for in_parts in (False, True):
        found = of_steps(batch, [plan], gradients, max_logits=True, in_parts=in_parts)[0]
        for mine, theirs in zip(found, right, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_replay_finds_those_of_its_rows_and_plan() -> None:
    plans = [
        distca.plan(layout_of(seed), HEADS, tasks=random_tasks(layout_of(seed), HEADS.kv, seed)) for seed in range(6)
    ]

    def work(rank: int, context: distca.Context) -> list[tuple[torch.Tensor, torch.Tensor]]:
        q, k, v = (t.detach().clone() for t in tensors_of(9, rank)[:3])
        with context.record(headroom=4.0, rounds=8) as recording:
            largest = distca.core_attention(q, k, v, plans[0].for_rank(rank), context=context, max_logits=True)[2]
        results = []
        for seed, plan in enumerate(plans):
            for tensor, value in zip((q, k, v), tensors_of(seed, rank), strict=False):
                tensor.copy_(value.detach())
            recording.replan(plan.for_rank(rank))
            recording.replay()
            results.append(largest.clone())
        return results

    def on_host(rank: int, context: distca.Context) -> list[torch.Tensor]:
        return [
            distca.core_attention(
                *(t.detach() for t in tensors_of(seed, rank)[:3]),
                plan.for_rank(rank),
                context=context,
                max_logits=True,
            )[2]
            for seed, plan in enumerate(plans)
        ]

    assert all(plan.for_rank(0).num_rows == ROWS for plan in plans)
    with loopback_group(plans, streams=True, timeout=5.0) as contexts:
        mine = on_all_ranks(contexts, work)
    with loopback_group(plans) as contexts:
        right = on_all_ranks(contexts, on_host)
    for of_rank, expected in zip(mine, right, strict=True):
        assert len(of_rank) == len(expected) == 6
        assert all(torch.equal(a, b) for a, b in zip(of_rank, expected, strict=True))


@pytest.mark.parametrize("of_gpu", ["gpu", "own_gpu"])
def test_steps_on_an_emulated_gpu_find_them(request: pytest.FixtureRequest, of_gpu: str) -> None:
    """By the CPU's kernel, and by the kernels of the GPU."""
    request.getfixturevalue(of_gpu)
    heads = distca.Heads(4, 2, 32, dtype=torch.bfloat16)
    lengths = (100, 3, 64, 130)
    batch, layout = random_batch(lengths, heads, 2), scattered(lengths, 3, 5)
    plans = _plans(layout, heads, 3)[1:]
    found = of_steps(batch, plans, distca.core_attention, OPTIONS, max_logits=True)
    exact = largest_logits(batch)
    for of_plan in found:
        for rank in range(3):
            right = largest_of_rank(batch, layout, rank, exact)
            torch.testing.assert_close(of_plan[rank][2].double(), right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wrong", ["yes", 1, torch.tensor(True), [1]], ids=str)
def test_whether_they_are_asked_for_is_true_or_false(wrong: Any) -> None:
    batch, plan = random_batch((30,), HEADS, 6), distca.plan(distca.Layout.from_documents([[30]]), HEADS)
    rows, said = (batch.q, batch.k, batch.v), "max_logits is .*; True or False is expected"
    with loopback_group(plan) as (context,):
        for call in (distca.core_attention, distca.dispatch):
            with pytest.raises(distca.InvalidArgumentError, match=said):
                call(*rows, plan, context=context, max_logits=wrong)
    with pytest.raises(distca.InvalidArgumentError, match=said):
        distca.attention(*rows, max_logits=wrong)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_whose_logits_are_no_numbers_makes_its_head_nan_on_its_rank_alone(bad: float) -> None:
    layout = distca.Layout.from_documents([[90], [200], [70]])
    batch = random_batch((90, 200, 70), HEADS, 3)
    batch.q[150, 2] = bad  # of document 1
    for of_plan in of_steps(batch, _plans(layout, HEADS, 3), distca.core_attention, max_logits=True):
        for rank in range(3):
            assert of_plan[rank][2].isnan().tolist() == [False, False, rank == 1, False]


def test_such_a_row_makes_its_head_nan_on_the_emulated_gpu_too(own_gpu: EmulatedGpu) -> None:
    heads = distca.Heads(4, 2, 32, dtype=torch.bfloat16)
    layout = distca.Layout.from_documents([[90], [200]])
    batch = random_batch((90, 200), heads, 3)
    batch.q[150, 2] = math.nan
    batch.q[:, 1], batch.k[:, 0] = batch.q[:, 1].abs(), -batch.k[:, 0].abs()
    plan = distca.plan(layout, heads, tolerance=0.0, min_rows=1)
    for rank, (_, _, largest) in enumerate(of_steps(batch, [plan], distca.core_attention, OPTIONS, max_logits=True)[0]):
        assert largest.isnan().tolist() == [False, False, rank == 1, False]
        right = largest_of_rank(batch, layout, rank, largest_logits(batch))
        keep = [0, 1, 3]
        torch.testing.assert_close(largest[keep].double(), right[keep], rtol=1e-6, atol=1e-6)


def test_a_rank_without_rows_has_none_and_one_that_only_serves_says_that_they_are_asked_for() -> None:
    batch = random_batch((200,), HEADS, 5)
    plan = distca.plan(distca.Layout([[(0, 0, 200)], [], []]), HEADS, servers=[1, 2])

    def work(rank: int, context: distca.Context) -> Any:
        if rank == 2:
            return distca.serve(plan.for_rank(2), "forward", context=context, max_logits=True)
        rows = [rows_of_rank(batch, plan.layout, rank, t) for t in (batch.q, batch.k, batch.v)]
        return distca.core_attention(*rows, plan.for_rank(rank), context=context, max_logits=True)[2]

    with loopback_group(plan) as contexts:
        first, second, _ = on_all_ranks(contexts, work)
    torch.testing.assert_close(first.double(), largest_logits(batch).amax(0), rtol=1e-6, atol=1e-6)
    assert second.tolist() == [-math.inf] * 4


def test_ranks_that_differ_in_asking_are_told_so() -> None:
    batch = random_batch((100, 30), HEADS, 6)
    plan = distca.plan(distca.Layout.from_documents([[100], [30]]), HEADS, tolerance=0.0, min_rows=1)

    def work(rank: int, context: distca.Context) -> Any:
        rows = [rows_of_rank(batch, plan.layout, rank, t) for t in (batch.q, batch.k, batch.v)]
        return distca.core_attention(*rows, plan.for_rank(rank), context=context, max_logits=rank == 0, softcap=3.0)

    with loopback_group(plan, timeout=20.0) as contexts:
        results = outcomes(contexts, work)
    assert all(isinstance(result, distca.PlanMismatchError) for result in results), results
    told = " ".join(map(str, results))
    assert "softcap 3 and asks for max_logits" in told and "softcap 3" in told.replace("softcap 3 and asks", ""), told


def test_a_softcap_of_minus_zero_does_not_pass_for_asking() -> None:
    """It has the sign that stands for that where ranks compare. Only callers of the operator can pass it."""
    batch = random_batch((100, 30), HEADS, 6)
    plan = distca.plan(distca.Layout.from_documents([[100], [30]]), HEADS, tolerance=0.0, min_rows=1)

    def work(rank: int, context: distca.Context) -> Any:
        rows = [rows_of_rank(batch, plan.layout, rank, t) for t in (batch.q, batch.k, batch.v)]
        options: Options = {"softcap": -0.0} if rank else {"max_logits": True}
        table, call = plan.for_rank(rank).tensor, torch.ops.distca.core_attention_all
        return call(*rows, table, retained_bytes=0, context=context.name, **options)

    with loopback_group(plan, timeout=20.0) as contexts:
        for result in outcomes(contexts, work):
            assert isinstance(result, RuntimeError) and "PlanMismatchError" in str(result), result


def test_more_heads_than_there_is_room_for_are_refused_and_the_context_goes_on() -> None:
    heads = distca.Heads(257, 1, 8)
    batch, plan = random_batch((3,), heads, 6), distca.plan(distca.Layout.from_documents([[3]]), heads)
    with loopback_group(plan) as (context,):
        with pytest.raises(distca.InvalidArgumentError, match="max_logits of 257 query heads; up to 256"):
            distca.core_attention(batch.q, batch.k, batch.v, plan, context=context, max_logits=True)
        distca.core_attention(batch.q, batch.k, batch.v, plan, context=context)


def test_a_queued_step_that_fails_leaves_nan() -> None:
    batch = random_batch((100, 30), HEADS, 6)
    plan = distca.plan(distca.Layout.from_documents([[100], [30]]), HEADS, tolerance=0.0, min_rows=1)
    rows = [rows_of_rank(batch, plan.layout, 0, t) for t in (batch.q, batch.k, batch.v)]
    contexts = testing.loopback(2, max_tokens=130, heads=HEADS, timeout=0.2, streams=True)  # arenas are zeros
    largest = distca.core_attention(*rows, plan.for_rank(0), context=contexts[0], max_logits=True)[2]
    assert isinstance(fault_of_check(contexts[0]), distca.PeerTimeoutError)  # rank 1 never comes
    assert largest.isnan().all()
    for context in contexts:
        context.close()


def _rank(lengths: Sequence[int]) -> list[Any]:
    results = []
    for transport in ("shm", "torch"):
        with distca.init(max_tokens=300, heads=HEADS, transport=transport, name=transport) as context:
            batch = random_batch(lengths, HEADS, 5)
            layout = distca.Layout.from_documents([[n] for n in lengths])
            plan = distca.plan(layout, HEADS, context=context, tolerance=0.0, min_rows=1)
            rows = [rows_of_rank(batch, layout, context.rank, t) for t in (batch.q, batch.k, batch.v)]
            largest = distca.core_attention(*rows, plan, context=context, max_logits=True)[2]
            of_batch = largest.clone()
            dist.all_reduce(of_batch, dist.ReduceOp.MAX)
            results += [largest, of_batch]
    return results


def test_processes_find_them_over_each_transport_and_the_largest_of_all_ranks_is_that_of_the_batch() -> None:
    lengths = (250, 40, 100)
    batch = random_batch(lengths, HEADS, 5)
    exact = largest_logits(batch)
    for rank, results in enumerate(launch(_rank, lengths, ranks=3)):
        right = exact[batch.offsets[rank] : batch.offsets[rank + 1]].amax(0)
        for found, expected in zip(results, [right, exact.amax(0)] * 2, strict=True):
            torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_the_operators_pass_pytorch_s_own_checks() -> None:
    q, k, v = (torch.randn(20, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    tasks = torch.tensor([[0, 20, 0, 20]])
    torch.library.opcheck(torch.ops.distca.attention_all.default, (q, k, v, tasks))
    heads = distca.Heads(4, 2, 8)
    plan = distca.plan(distca.Layout.from_documents([[20]]), heads)
    with loopback_group(plan) as (context,):
        options = {"context": context.name, "retained_bytes": 0, "max_logits": True}
        torch.library.opcheck(torch.ops.distca.core_attention_all.default, (q, k, v, plan.tensor), options)


def test_flash_attention_has_none_and_says_so() -> None:
    flash_on_cpu.register()
    heads = distca.Heads(4, 2, 32, dtype=torch.bfloat16)
    batch, plan = random_batch((30,), heads, 6), distca.plan(distca.Layout.from_documents([[30]]), heads)
    with loopback_group(plan, attention="flash") as (context,):
        with pytest.raises(distca.InvalidArgumentError, match='max_logits need .*attention="own"'):
            distca.core_attention(batch.q, batch.k, batch.v, plan, context=context, max_logits=True)
        distca.core_attention(batch.q, batch.k, batch.v, plan, context=context)
