"""Wrong calls of the parts of a step are refused, and ranks that take parts in different orders learn of each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import distca
from support.batches import LENGTHS, random_batch
from support.groups import loopback_group, on_all_ranks, outcomes
from support.step_ways import HEADS, Rows, overlapped_steps, spilled_plan, steps_in_parts, whole_steps
from support.torch_ranks import join, over_torch, torch_group

_SHAPES = (HEADS.q, HEADS.dim), (HEADS.kv, HEADS.dim), (HEADS.kv, HEADS.value_dim)

Work = Callable[[int, distca.Context], Any]


# ---- mistakes of one rank that are refused before anything moves


def test_a_third_step_is_refused_with_the_names_of_the_two_under_way_which_can_still_be_finished() -> None:
    plan, batch = spilled_plan(), random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> list[torch.Tensor]:
        rows = [Rows(batch, plan, context) for _ in range(3)]
        steps = [one.dispatch() for one in rows[:2]]
        for refused in (rows[2].dispatch, rows[2].whole):
            with pytest.raises(distca.InvalidArgumentError, match=r"step 1 \(forward\) and step 2 \(forward\) are un"):
                refused()
        for one, step in zip(rows, steps, strict=False):
            distca.attend(step)
            one.collect(step)
        rows[2].whole()
        return [one.out.detach().nan_to_num() for one in rows]

    with loopback_group(plan) as contexts:
        for one, *others in on_all_ranks(contexts, work):
            assert all(torch.equal(one, other) for other in others)


def test_parts_out_of_order_are_refused_and_the_step_goes_on() -> None:
    plan, batch = spilled_plan(), random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        rows = Rows(batch, plan, context)
        step = rows.dispatch()
        with pytest.raises(distca.InvalidArgumentError, match=r"collect: step 1 \(forward\) is dispatched and not att"):
            distca.collect(step)
        distca.attend(step)
        with pytest.raises(distca.InvalidArgumentError, match=r"attend: step 1 \(forward\) is attended to already"):
            distca.attend(step)
        rows.collect(step)
        for part, again in (("attend", distca.attend), ("collect", distca.collect)):
            with pytest.raises(distca.InvalidArgumentError, match=f"{part}: step 1 has been collected"):
                again(step)
        rows.loss().backward()

    with loopback_group(plan) as contexts:
        on_all_ranks(contexts, work)


def test_a_step_of_a_closed_context_is_not_taken_for_one_of_a_new_context_of_its_name() -> None:
    plan = distca.plan(distca.Layout.from_documents([[20]]), HEADS)
    rows = [torch.ones(20, *shape) for shape in _SHAPES]
    with distca.init(max_tokens=20, heads=HEADS, transport="loopback", name="twice"):
        old = distca.dispatch(*rows, plan, context="twice")
    with distca.init(max_tokens=20, heads=HEADS, transport="loopback", name="twice"):
        new = distca.dispatch(*(2 * t for t in rows), plan, context="twice")
        assert new.number == old.number
        for part in (distca.attend, distca.collect):
            with pytest.raises(distca.InvalidArgumentError, match="the context of step 1 was closed"):
                part(old)
        distca.attend(new)
        assert torch.equal(distca.collect(new)[0], torch.full((20, HEADS.q, HEADS.value_dim), 2.0))


@pytest.mark.parametrize("overwritten", ["by another plan", "by zeros"])
@pytest.mark.parametrize("part", ["attend", "collect"])
def test_a_plan_that_is_overwritten_while_its_step_is_under_way_is_an_error(part: str, overwritten: str) -> None:
    plan, other = (distca.plan(distca.Layout.from_documents([lengths]), HEADS) for lengths in ([12, 8], [9, 11]))
    assert plan.tensor.shape == other.tensor.shape
    rows = [torch.ones(20, *shape) for shape in _SHAPES]
    with distca.init(max_tokens=20, heads=HEADS, transport="loopback", name="overwritten") as context:
        step = distca.dispatch(*rows, plan, context=context)
        if part == "collect":
            distca.attend(step)
        plan.tensor.copy_(other.tensor if overwritten == "by another plan" else torch.zeros_like(plan.tensor))
        with pytest.raises(distca.PlanFormatError, match="overwritten with another plan|does not start with a plan"):
            getattr(distca, part)(step)


@pytest.mark.parametrize("in_parts", [False, True])
def test_sinks_get_their_gradient_where_a_hook_runs_backward_of_the_same_call(in_parts: bool) -> None:
    plan = distca.plan(distca.Layout.from_documents([[20]]), HEADS)
    q, k, v = (torch.rand(20, *shape, requires_grad=True) for shape in _SHAPES)
    sinks, found, measured = torch.zeros(HEADS.q, requires_grad=True), [], []

    def measure(*_: Any) -> None:
        if not measured:
            measured.append(True)
            torch.autograd.grad(out, q, torch.ones_like(out), retain_graph=True)

    with distca.init(max_tokens=20, heads=HEADS, transport="loopback", name="nested") as context:
        for hooked in (False, True):
            if in_parts:
                step = distca.dispatch(q, k, v, plan, context=context, sinks=sinks)
                distca.attend(step)
                out = distca.collect(step)[0]
            else:
                out = distca.core_attention(q, k, v, plan, context=context, sinks=sinks)[0]
            if hooked:
                out.grad_fn.register_hook(measure)
            sinks.grad = None
            out.square().sum().backward()
            found.append(sinks.grad)
    alone, beside = found
    assert measured and alone is not None and torch.equal(alone, beside)


def test_a_step_in_parts_is_refused_in_compiled_code() -> None:
    plan = distca.plan(distca.Layout.from_documents([[8]]), HEADS)
    rows = torch.randn(8, 4, 16), torch.randn(8, 2, 16), torch.randn(8, 2, 24)
    torch._dynamo.reset()
    for fullgraph in (False, True):
        with loopback_group(plan) as [context], pytest.raises(RuntimeError, match="a compiler could move the parts"):
            torch.compile(
                lambda c=context: distca.dispatch(*rows, plan, context=c), fullgraph=fullgraph, backend="eager"
            )()


# ---- mistakes that all ranks learn of


def _all_get(contexts: list[distca.Context], work: Work, kind: type[Exception], *words: str) -> None:
    errors = outcomes(contexts, work)
    assert all(isinstance(error, kind) for error in errors), errors
    for word in words:
        assert any(word in str(error) for error in errors), (word, errors)


@pytest.mark.parametrize(("ranks", "reorder_seed"), [(2, None), (2, 1), (3, None)])
def test_a_rank_that_runs_whole_steps_and_others_in_parts_learn_of_each_other(
    ranks: int, reorder_seed: int | None
) -> None:
    plan, batch = spilled_plan(ranks), random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        rows = [Rows(batch, plan, context) for _ in range(2)]
        whole_steps(rows) if rank == 1 else overlapped_steps(rows)

    with loopback_group(plan, reorder_seed=reorder_seed, timeout=20.0) as contexts:
        _all_get(contexts, work, distca.PlanMismatchError, "another call: it runs", "dispatch of forward (slot 1)")


def test_ranks_that_finish_steps_at_other_times_learn_of_each_other() -> None:
    plan, batch = spilled_plan(), random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        rows = [Rows(batch, plan, context) for _ in range(2)]
        overlapped_steps(rows) if rank == 0 else steps_in_parts(rows)

    with loopback_group(plan, timeout=20.0) as contexts:
        _all_get(contexts, work, distca.PlanMismatchError, "dispatch of forward (slot 0)", "attend of forward (slot 1)")


def over_gloo(rank: int, ranks: int, pipe: Any, port: int) -> None:
    join(rank, ranks, port)
    plan, batch = spilled_plan(ranks), random_batch(LENGTHS, HEADS, 1)
    with over_torch(heap_bytes=4 * plan.stats.slot_bytes, heads=HEADS) as context:
        results = [way([Rows(batch, plan, context) for _ in range(2)]) for way in (whole_steps, overlapped_steps)]
        pipe.send(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))
        context.start_trace()
        whole_steps([Rows(batch, plan, context)])
        pipe.send([span for span in context.take_trace().spans if span.peer == -1 and span.is_wait])
        rows = [Rows(batch, plan, context) for _ in range(2)]
        try:
            whole_steps(rows) if rank == 1 else overlapped_steps(rows)
        except distca.DistcaError as error:
            pipe.send((type(error).__name__, str(error)))
    pipe.recv()


def test_over_a_collective_transport_bits_and_mistakes_are_the_same_and_an_exchange_is_a_wait() -> None:
    with torch_group(over_gloo, 2) as group:
        for rank in range(2):
            assert group.receive(rank)
        for rank in range(2):
            exchanges = [span for span in group.receive(rank) if span.name == "all ranks to exchange rows"]
            # Forward and backward each exchange once after dispatch and once for the results.
            assert len(exchanges) >= 4 and all(span.seconds > 0 for span in exchanges)
        for rank in range(2):
            kind, message = group.receive(rank)
            assert kind == "PlanMismatchError" and "another call" in message, message
        group.tell("end")
