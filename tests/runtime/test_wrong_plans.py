"""Plans that do not fit a context are refused before anything moves, and the context works on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import distca
from support.batches import random_batch, rows_of_rank, spill
from support.groups import loopback_group, on_all_ranks, run_step
from support.refusals import HEADS, LAYOUT, LENGTHS, Group, plan_of_two

WRONG_PLANS: dict[str, tuple[Callable[[], distca.Plan], list[str]]] = {
    "another layout": (lambda: plan_of_two(spill((90, 3, 40), 2)), ["another layout", "67 rows", "84"]),
    "more ranks": (lambda: plan_of_two(spill(LENGTHS, 3)), ["3 ranks", "has 2"]),
    "another rank's slice": (lambda: plan_of_two().for_rank(1), ["slice of rank 1", "this is rank 0", "for_rank(0)"]),
    "another dtype": (
        lambda: plan_of_two(heads=distca.Heads(4, 2, 16, 24, torch.bfloat16)), ["bfloat16", "float32"]
    ),
    "another head count": (lambda: plan_of_two(heads=distca.Heads(8, 2, 16, 24)), ["8 query heads", "4 query heads"]),
    "other key heads": (
        lambda: plan_of_two(heads=distca.Heads(4, 4, 16, 24)), ["4 key/value heads", "2 key/value heads"]
    ),
    "another dim": (lambda: plan_of_two(heads=distca.Heads(4, 2, 32, 24)), ["dim 32", "dim 16"]),
    "another value dim": (lambda: plan_of_two(heads=distca.Heads(4, 2, 16, 32)), ["values 32", "values 24"]),
    "another cost model": (lambda: plan_of_two(cost=distca.CostModel(1, 1)), ["another cost model"]),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_PLANS)
@pytest.mark.parametrize("argument", ["plan", "plan_backward"])
def test_a_plan_for_something_else_is_refused_before_anything_moves(group: Group, wrong: str, argument: str) -> None:
    make, said = WRONG_PLANS[wrong]
    with pytest.raises(distca.InvalidArgumentError) as caught:
        if argument == "plan":
            group.attend(group.inputs(), make())
        else:
            group.attend(group.inputs(), group.plan, plan_backward=make())
    for words in said:
        assert words in str(caught.value)
    group.check_still_works()


@pytest.mark.parametrize(
    "thing", [None, 3, "plan", torch.zeros(128, dtype=torch.int64)], ids=["None", "3", "str", "tensor"]
)
def test_what_is_not_a_plan_is_refused(group: Group, thing: object) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=rf"plan is a {type(thing).__name__}; a distca\.Plan"):
        group.attend(group.inputs(), thing)  # type: ignore[arg-type]
    if thing is not None:
        with pytest.raises(distca.InvalidArgumentError, match=rf"plan_backward is a {type(thing).__name__}"):
            group.attend(group.inputs(), group.plan, plan_backward=thing)
    group.check_still_works()


def test_a_plan_that_needs_more_than_the_context_has_is_refused_with_the_bytes_needed() -> None:
    plan = plan_of_two()
    needed = plan.stats.slot_bytes
    batch = random_batch(LENGTHS, HEADS, 1)
    with loopback_group(plan, heap_bytes=2 * (needed - 64)) as contexts:
        small = plan_of_two(balance=False, layout=distca.Layout.from_documents([[84], [83]]))
        q, k, v = (rows_of_rank(batch, LAYOUT, 0, t) for t in (batch.q, batch.k, batch.v))
        with pytest.raises(distca.CapacityError, match=rf"{needed} bytes.*heap_bytes >= {2 * needed}"):
            distca.core_attention(q, k, v, plan, context=contexts[0])
        distca.core_attention(q, k, v, small, context=contexts[0])
    with loopback_group(plan, heap_bytes=2 * needed) as contexts:
        on_all_ranks(contexts, lambda rank, context: run_step(batch, plan, context))


def test_planning_reads_the_context_that_it_is_given_and_no_other() -> None:
    needed, cost = plan_of_two().stats.slot_bytes, distca.CostModel(1, 40)
    with (
        loopback_group(plan_of_two(), heap_bytes=2 * (needed - 64), cost=cost) as contexts,
        distca.init(max_tokens=1, heads=HEADS, heap_bytes=128, cost=cost),
    ):
        alone = plan_of_two()
        assert (alone.rank, alone.stats.slot_bytes) == (0, needed)
        for context in contexts:
            for named in (context, context.name):
                plan = plan_of_two(context=named)
                assert plan.rank == context.rank and plan.stats.slot_bytes <= needed - 64
                assert plan.digest == plan_of_two(cost=cost, capacity=needed - 64).digest != alone.digest
        last = plan_of_two(context=contexts[-1], rank=0, capacity=needed, cost=distca.CostModel())
        assert torch.equal(last.tensor, plan_of_two(capacity=needed).tensor)
        with pytest.raises(distca.InvalidArgumentError, match="is of 2 ranks, context .default. of 1; give a layout"):
            plan_of_two(context="default")
    with pytest.raises(distca.InvalidArgumentError, match="there is no context 'default'; distca.init makes one"):
        plan_of_two(context="default")
    with pytest.raises(distca.InvalidArgumentError, match="context is a int; a distca.Context, or the name of one"):
        plan_of_two(context=3)
