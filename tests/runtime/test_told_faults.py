"""Peers are told of a fault, or of a call that a rank refuses, at once and with the cause.

awkward_ranks.cpp makes ranks that get news late or have no memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import distca
from distca.errors import typed_errors
from distca.testing import _emulation
from support.groups import fault_of_check, loopback_group, on_all_ranks, outcomes
from support.processes import plan_for, tensors_for
from support.programs import AWKWARD_RANKS

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("awkward_ranks.cpp")
SLOT_BYTES = 1 << 20
HEADS = distca.Heads(2, 1, 8)
PLAN = distca.plan(distca.Layout.packed([150, 30], ranks=3, tokens_per_rank=60), HEADS, tolerance=0.0, min_rows=1)
OTHER = distca.plan(distca.Layout.packed([150, 33], ranks=3, tokens_per_rank=61), HEADS, tolerance=0.0, min_rows=1)
LARGE = distca.plan(PLAN.layout, HEADS, tasks=[(0, 0, 150, 0, 1, 1), (1, 0, 30, 0, 1, 1)])


# ---- ranks that the library below makes


@pytest.fixture(scope="module")
def awkward() -> ctypes.CDLL:
    return ctypes.CDLL(str(AWKWARD_RANKS.path()))


@contextmanager
def two_ranks(make: Callable[..., None], *arguments: object) -> Iterator[list[distca.Context]]:
    make(b"awkward", ctypes.c_int64(SLOT_BYTES), *arguments)
    cost = distca.CostModel()
    contexts = [
        distca.Context(_emulation.find_context(f"awkward/{rank}"), plan_for(2, rank).heads, cost) for rank in range(2)
    ]
    try:
        yield contexts
    finally:
        for context in contexts:
            context.close()


@pytest.mark.parametrize("queued", [False, True])
def test_a_fault_that_a_peer_told_before_it_left_is_what_is_reported(awkward: ctypes.CDLL, queued: bool) -> None:
    """The fault arrives after this rank has looked for faults, and just before it looks for who has left."""

    def dispatch(rank: int, context: distca.Context) -> distca.Step:
        plan = plan_for(2, rank)
        return distca.dispatch(*tensors_for(plan)[:3], plan, context=context)

    with two_ranks(awkward.late_news_of_queued_steps if queued else awkward.late_news) as contexts:
        step, of_peer = on_all_ranks(contexts, dispatch)
        of_peer.abandon("enough")
        contexts[1].close()
        with pytest.raises(distca.PeerLeftError, match=r"rank 1 left step 1 \(forward\) unfinished: enough"):
            distca.attend(step)
            distca.collect(step)
            dispatch(0, contexts[0])


@pytest.mark.parametrize("queued", [False, True])
def test_a_call_that_a_peer_refused_before_it_left_is_what_is_reported(awkward: ctypes.CDLL, queued: bool) -> None:
    """The refusal is seen after this rank has compared its call, and just before it looks for who has left."""

    def step(rank: int, context: distca.Context, rows: int | None = None) -> None:
        plan = plan_for(2, rank)
        q, k, v, _ = tensors_for(plan)
        distca.core_attention(q[:rows], k[:rows], v[:rows], plan, context=context)

    with two_ranks(awkward.late_news_of_queued_steps if queued else awkward.late_news) as contexts:
        with pytest.raises(distca.InvalidArgumentError):
            step(1, contexts[1], rows=1)
        contexts[1].close()
        with pytest.raises(distca.PeerLeftError, match="rank 1 refused this call: plan is of another layout"):
            step(0, contexts[0])


@pytest.mark.parametrize("calls", [1, 3])
def test_what_a_peer_refused_is_reported_where_this_rank_was_further_on_when_it_needed_that_peer(calls: int) -> None:
    """The peer's neighbours, which would have noticed, come later. Queued steps compare with all ranks."""
    layout = distca.Layout.from_documents([[20]] * 4)
    # In the first plan rank 1 has nothing to do with others.
    apart, spread = (
        distca.plan(layout, HEADS, tasks=[(d, 0, 20, 0, 1, servers[d]) for d in range(4)])
        for servers in ((0, 1, 0, 3), (0, 3, 2, 3))
    )

    def step(plan: distca.Plan) -> None:
        q, k, v = torch.randn(3, 20, 2, 8, generator=torch.Generator().manual_seed(1))
        distca.core_attention(q, k[:, :1], v[:, :1], plan.for_rank(1), context=contexts[1])

    with loopback_group(apart, timeout=20.0) as contexts:
        contexts[3]._core.refuse("enough")
        contexts[3].close()
        for _ in range(calls):
            step(apart)
        with pytest.raises(distca.PeerLeftError, match="rank 3 refused a call that this rank has made: enough"):
            step(spread)


@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_without_memory_raises_what_python_calls_it_and_its_peer_is_told(
    awkward: ctypes.CDLL, backward: bool
) -> None:
    def step(rank: int, context: distca.Context) -> None:
        plan = plan_for(2, rank)
        q, k, v, dout = tensors_for(plan)
        distca.core_attention(q, k, v, plan, context=context)[0].backward(dout)

    with two_ranks(awkward.without_memory, backward) as contexts:
        here, there = outcomes(contexts, step)
    assert isinstance(here, MemoryError), repr(here)
    assert isinstance(there, distca.PeerLeftError), repr(there)
    assert "rank 0 abandoned this context after an error of its own: std::bad_alloc" in str(there)


def test_a_lack_of_memory_is_a_memory_error_where_pytorch_raises_another() -> None:
    """PyTorch 2.15 does so."""
    with pytest.raises(MemoryError, match="std::bad_alloc"), typed_errors("layer 3"):
        raise RuntimeError("std::bad_alloc")


def dispatched(rank: int, context: distca.Context) -> distca.Step:
    plan = PLAN.for_rank(rank)
    return distca.dispatch(*tensors_for(plan)[:3], plan, context=context)


def test_a_rank_that_is_told_of_a_fault_passes_on_whose_it_is() -> None:
    """Rank 1 finds the report of rank 0 first. Rank 0 itself was only told what happened to rank 2."""
    with loopback_group(PLAN, timeout=20.0) as contexts:
        steps = on_all_ranks(contexts, dispatched)
        steps[2].abandon("enough")
        for rank in (0, 1):
            with pytest.raises(distca.PeerLeftError, match=r"rank 2 left step 1 \(forward\) unfinished: enough"):
                distca.attend(steps[rank])


def test_a_fault_elsewhere_that_is_still_on_its_way_when_another_comes_is_told_again() -> None:
    """Here it waits on the link behind the rows of a step, and the end of that step drops it there."""
    with loopback_group(PLAN, timeout=20.0, link=distca.Link(bytes_per_second=1000)) as contexts:
        steps = on_all_ranks(contexts, dispatched)
        contexts[0]._core.hear("PeerDiedError", "global rank 7 died")
        steps[0].abandon("enough")
        for context in contexts[1:]:
            fault = fault_of_check(context)
            assert isinstance(fault, distca.PeerDiedError) and "global rank 7 died" in str(fault)


# ---- calls that one rank refuses

Tensors = Sequence[torch.Tensor]


def whole(plan: distca.Plan, tensors: Tensors, context: distca.Context, **options: Any) -> None:
    distca.core_attention(*tensors[:3], plan, context=context, **options)


def in_parts(plan: distca.Plan, tensors: Tensors, context: distca.Context) -> None:
    step = distca.dispatch(*tensors[:3], plan, context=context)
    distca.attend(step)
    distca.collect(step)


def collected_too_early(plan: distca.Plan, tensors: Tensors, context: distca.Context) -> None:
    step = distca.dispatch(*tensors[:3], plan, context=context)
    try:
        distca.collect(step)
    finally:
        step._under_way.over()  # otherwise the step would go out of use here, which is another fault


def by_the_operator(plan: distca.Plan, tensors: Tensors, context: distca.Context) -> None:
    torch.ops.distca.core_attention(*tensors[:3], plan.tensor, context=context.name)


def of_out(plan: distca.Plan, tensors: Tensors, context: distca.Context) -> None:
    distca.core_attention(*tensors[:3], plan, context=context)[0].sum().backward()


def of_changed_keys(plan: distca.Plan, tensors: Tensors, context: distca.Context) -> None:
    out, _ = distca.core_attention(*tensors[:3], plan, context=context)
    with torch.no_grad():
        tensors[1].zero_()
    out.sum().backward()


def of_out_in_parts(plan: distca.Plan, tensors: Tensors, context: distca.Context) -> None:
    distca.core_attention(*tensors[:3], plan.for_parts(), context=context)[0].sum().backward()


def of_changed_keys_in_parts(plan: distca.Plan, tensors: Tensors, context: distca.Context) -> None:
    of_changed_keys(plan.for_parts(), tensors, context)


#: For each refusal: what the other ranks do, what the refusing rank does, its plan, its tensors, and what it raises.
REFUSED: dict[str, tuple[Callable[..., None], Callable[..., None], distca.Plan, Callable[[Tensors], Tensors], str]] = {
    "a tensor": (whole, whole, PLAN, lambda ts: [ts[0][..., ::2], *ts[1:]], "contiguous"),
    "a dtype": (whole, whole, PLAN, lambda ts: [t.bfloat16() for t in ts], "bfloat16"),
    "what is no tensor": (whole, whole, PLAN, lambda ts: [None, *ts[1:]], ""),  # type: ignore[list-item]
    "a plan of another layout": (whole, whole, OTHER, lambda ts: ts, "another layout"),
    "what is no plan": (whole, lambda _, *a: whole(None, *a), PLAN, lambda ts: ts, "plan is a NoneType"),
    "an argument": (whole, lambda *a: whole(*a, scale=float("nan")), PLAN, lambda ts: ts, "scale = "),
    "a plan that does not fit": (whole, whole, LARGE, lambda ts: ts, "give distca.init heap_bytes"),
    "the operator's tensor": (whole, by_the_operator, PLAN, lambda ts: [ts[0], ts[1][1:], ts[2]], "k "),
    "a dispatch": (in_parts, in_parts, OTHER, lambda ts: ts, "another layout"),
    "a part out of order": (in_parts, collected_too_early, PLAN, lambda ts: ts, "attend comes next"),
    "a backward": (of_out, of_changed_keys, PLAN, lambda ts: ts, "inplace operation"),
    "a backward in parts": (of_out_in_parts, of_changed_keys_in_parts, PLAN, lambda ts: ts, "inplace operation"),
    "serving": (whole, lambda p, _, c: distca.serve(p, "forward", context=c), PLAN, lambda ts: ts, "call core_att"),
}  # fmt: skip


def _fault(result: object, context: distca.Context) -> BaseException:
    """The fault of a rank; if its step was only queued, the next check raises it."""
    return result if isinstance(result, BaseException) else fault_of_check(context)


@pytest.mark.parametrize("queued", [False, True], ids=["host", "queued"])
@pytest.mark.parametrize("refusal", REFUSED)
def test_a_call_that_one_rank_refuses_is_an_error_of_all_at_once_with_its_reason(refusal: str, queued: bool) -> None:
    theirs, mine, plan, change, reason = REFUSED[refusal]

    def work(rank: int, context: distca.Context) -> None:
        tensors = tensors_for(PLAN.for_rank(rank))
        if rank == 1:
            mine(plan.for_rank(1), change(tensors), context)
        else:
            theirs(PLAN.for_rank(rank), tensors, context)

    with loopback_group(PLAN, timeout=60.0, streams=queued) as contexts:
        results = outcomes(contexts, work)
        assert isinstance(results[1], Exception) and reason in str(results[1]), results[1]
        for rank in (0, 2):
            fault = _fault(results[rank], contexts[rank])
            assert isinstance(fault, distca.PeerLeftError), fault
            assert "rank 1 refused" in str(fault) and reason in str(fault), fault
        # The rank found the fault itself or was told of it.
        later = distca.ContextPoisonedError, distca.PeerLeftError
        with pytest.raises(later, match="rank 1 refused a call that other ranks made"):
            contexts[1].check() if queued else whole(PLAN.for_rank(1), tensors_for(PLAN.for_rank(1)), contexts[1])


@pytest.mark.parametrize("queued", [False, True], ids=["host", "queued"])
@pytest.mark.parametrize("first", [0, 1])
def test_whoever_comes_first_to_a_call_that_one_refuses_all_learn_of_it(first: int, queued: bool) -> None:
    def work(rank: int, context: distca.Context) -> None:
        while rank != first and contexts[first]._core.num_calls == 0:
            pass
        tensors = tensors_for(PLAN.for_rank(rank))
        whole(PLAN.for_rank(rank), [t.bfloat16() for t in tensors] if rank == 1 else tensors, context)

    with loopback_group(PLAN, timeout=60.0, streams=queued) as contexts:
        results = outcomes(contexts, work)
        assert isinstance(results[1], distca.InvalidArgumentError), results[1]
        for rank in (0, 2):
            fault = _fault(results[rank], contexts[rank])
            assert isinstance(fault, distca.PeerLeftError) and "rank 1 refused" in str(fault), fault


def test_a_replan_that_one_rank_refuses_is_an_error_of_all_at_once() -> None:
    small = distca.plan(distca.Layout.packed([60] * 3, ranks=3, tokens_per_rank=60), HEADS)

    def work(rank: int, context: distca.Context) -> None:
        tensors = tensors_for(small.for_rank(rank))
        with context.record(headroom=1.0) as recording:
            whole(small.for_rank(rank), tensors, context)
        recording.replan((OTHER if rank == 1 else small).for_rank(rank))
        recording.replay()
        context.check()

    with loopback_group([small, PLAN, OTHER], timeout=60.0, streams=True) as contexts:
        results = outcomes(contexts, work)
        assert isinstance(results[1], distca.InvalidArgumentError) and "another layout" in str(results[1]), results[1]
        for rank in (0, 2):
            fault = _fault(results[rank], contexts[rank])
            assert isinstance(fault, distca.PeerLeftError) and "another layout" in str(fault), fault


def test_a_call_that_all_ranks_refuse_changes_nothing_whoever_tries_again_first() -> None:
    def work(rank: int, context: distca.Context) -> torch.Tensor:
        tensors = tensors_for(PLAN.for_rank(rank))
        for other in (OTHER.for_rank(rank), None, LARGE.for_rank(rank)):
            with pytest.raises(distca.DistcaError):
                whole(other, tensors, context)  # type: ignore[arg-type]
        return distca.core_attention(*tensors[:3], PLAN.for_rank(rank), context=context)[0].detach()

    for queued in (False, True):
        with loopback_group(PLAN, timeout=60.0, streams=queued) as contexts:
            assert all(out.isfinite().all() for out in on_all_ranks(contexts, work))
            assert [context.step for context in contexts] == [1] * 3


# ---- tensors with odd strides, which are not refused


def odd(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers with an odd stride in every dimension that has one element or none."""
    strides = [7 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    if tensor.numel() == 0:
        strides = [0] * tensor.dim()
    return tensor.as_strided(tensor.shape, strides)


@pytest.mark.parametrize("parts", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("rows", [0, 1])
def test_strides_that_say_nothing_are_taken_and_so_is_an_expanded_gradient(rows: int, parts: bool) -> None:
    heads = distca.Heads(1, 1, 8)
    plan = distca.plan(
        distca.Layout([[(0, rows, 40)], [(0, 0, rows)] if rows else []]), heads, tolerance=0.0, min_rows=1
    )

    def work(rank: int, context: distca.Context, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
        leaves = [change(t.detach()).requires_grad_() for t in tensors_for(plan.for_rank(rank))[:3]]
        own = plan.for_rank(rank).for_parts() if parts else plan.for_rank(rank)
        out, _ = distca.core_attention(*leaves, own, context=context)
        if change is odd:
            out.sum().backward()
        else:
            out.backward(torch.ones_like(out))
        return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]

    with loopback_group(plan, timeout=20.0) as contexts:
        usual = on_all_ranks(contexts, lambda rank, context: work(rank, context, torch.clone))
        others = on_all_ranks(contexts, lambda rank, context: work(rank, context, odd))
    for a, b in zip(usual, others, strict=True):
        assert len(a) == len(b) == 4 and all(map(torch.equal, a, b))


def test_a_check_from_another_thread_disturbs_no_step_and_tells_its_fault_afterwards() -> None:
    plan = distca.plan(distca.Layout.from_documents([[40], []]), distca.Heads(2, 1, 8), servers=[1], rank=0)
    rows = [torch.ones(40, n, 8) for n in (2, 1, 1)]
    with loopback_group(plan, timeout=0.5) as contexts, ThreadPoolExecutor(1) as thread:
        step = thread.submit(distca.core_attention, *rows, plan, context=contexts[0])
        checks = 0
        with suppress(distca.ContextPoisonedError):  # the step may just have failed
            while not step.done():
                contexts[0].check()
                checks += 1
        assert checks > 0 and isinstance(step.exception(), distca.PeerTimeoutError)
        with pytest.raises(distca.ContextPoisonedError, match="waited 0.5 s for rank 1"):
            contexts[0].check()
