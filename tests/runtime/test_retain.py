"""Servers that keep keys and values from forward to backward: the same bits as when everything is sent again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import distca
from distca.testing import _emulation
from support.batches import (
    LAYOUTS,
    LENGTHS,
    Batch,
    examples,
    random_batch,
    random_tasks,
    rows_of_rank,
    scattered,
    spill,
)
from support.groups import compute, loopback_group, on_all_ranks, outcomes, run_step, together
from support.halves import Model, assert_same, halves_for, one_after_the_other, ping_pong, plans_for, results, seeded
from support.oracle import NAMES
from support.step_ways import Rows, both, overlapped_steps, steps_in_parts, whole_steps

HEADS = distca.Heads(4, 2, 16, 24)
ALL = 2**40
MASKS = (("causal", None), ("causal", 70), ("full", None))


def plan_of(layout: distca.Layout, heads: distca.Heads = HEADS, retain_bytes: Any = ALL, **options: Any) -> distca.Plan:
    return distca.plan(layout, heads, **{"tolerance": 0.0, "min_rows": 1, "retain_bytes": retain_bytes} | options)


def assert_equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for name, a, b in zip(NAMES, ours, theirs, strict=True):
        assert torch.equal(a, b), name


# ---- what is retained


def test_what_is_kept_and_what_that_saves_can_be_counted_by_hand() -> None:
    """Rank 1 computes the last 36 rows of 100, and rank 0 has the first 64 of them: one block of keys travels."""
    heads = distca.Heads(2, 1, 8, 16)
    layout = distca.Layout([[(0, 0, 64)], [(0, 64, 100)]])
    make = partial(distca.plan, layout, heads, balance=False)
    keys = 64 * (8 + 16) * 4
    for budget, kept in ((0, 0), (keys - 1, 0), (keys, keys), (ALL, keys), ([ALL, 0], 0), ([0, keys], keys)):
        plan = make(retain_bytes=budget)
        assert plan.stats.retained_bytes == [0, kept]
        assert plan.stats.saved_bytes == kept
        assert plan.stats.bytes["forward_in"] == keys and plan.stats.bytes["backward_in"] == keys - kept
        assert plan.stats.arena_bytes["backward"][1].server_in == keys - kept
        assert [plan.for_rank(rank).retained_bytes for rank in range(2)] == [0, kept]
        assert plan.retains == (budget != 0)


def groups_of_server(plan: distca.Plan, rank: int) -> dict[tuple[int, int, int, int], tuple[int, int]]:
    """Bytes of keys that come to a server in forward, and in backward, by document, heads, and first key wanted."""
    found: dict[tuple[int, int, int, int], tuple[int, int]] = {}
    wanted: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for task in plan.tasks:
        if task.server == rank:
            key = task.document, task.kv_head_begin, task.kv_head_end
            wanted.setdefault(key, []).append((task.kv_begin, task.kv_end))
    for key, ranges in wanted.items():
        merged: list[list[int]] = []
        for begin, end in sorted(ranges):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        for begin, end in merged:
            sizes = [
                sum(
                    t.bytes
                    for t in plan.transfers
                    if t.message == message and t.target == rank and t.tensor in ("k", "v")
                    if (t.document, t.kv_head_begin, t.kv_head_end) == key and begin <= t.begin and t.end <= end
                )
                for message in ("forward_in", "backward_in")
            ]
            found[(*key, begin)] = sizes[0], sizes[1]
    return found


@examples(60)
@given(
    st.sampled_from(list(LAYOUTS)),
    st.integers(0, 10**6),
    st.sampled_from(MASKS),
    st.sampled_from((5000, 20_000, 50_000, 100_000)),
    st.booleans(),
)
def test_keys_that_save_most_bytes_are_kept_as_long_as_they_fit(
    layout: str, seed: int, mask: tuple[str, int | None], budget: int, cut: bool
) -> None:
    where = LAYOUTS[layout](LENGTHS, 3, seed)
    tasks = random_tasks(where, HEADS.kv, seed) if cut else None
    options = {"mask": mask[0], "window": mask[1], "tasks": tasks}
    free, plan = plan_of(where, retain_bytes=0, **options), plan_of(where, retain_bytes=budget, **options)
    assert plan.tasks == free.tasks and plan.digest != free.digest
    saved = 0
    for rank in range(3):
        left = budget - plan.stats.retained_bytes[rank]
        assert left >= 0
        groups = sorted(groups_of_server(plan, rank).values(), reverse=True)
        assert all(backward in (0, forward) for forward, backward in groups), "a group is kept whole or not at all"
        saved += sum(forward - backward for forward, backward in groups)
        for index, (forward, backward) in enumerate(groups):
            if backward > 0:  # so there was no room for it beside those that save more
                kept_before = sum(f for f, b in groups[:index] if b == 0)
                rest = 64 * (HEADS.dim + HEADS.value_dim) * HEADS.kv * 4  # of a block that others' rows do not fill
                assert kept_before + forward + (index + 1) * 4 * rest > budget
    assert plan.stats.saved_bytes == saved
    assert plan.stats.bytes == free.stats.bytes | {"backward_in": free.stats.bytes["backward_in"] - saved}
    assert plan.stats.bytes_lower_bound <= sum(plan.stats.bytes.values())


def test_a_slot_that_is_too_small_for_resending_may_do_for_retaining() -> None:
    layout = distca.Layout([[(0, 0, 1000)], [(0, 1000, 1100)]])
    needs = {
        retain: distca.plan(layout, HEADS, balance=False, retain_bytes=retain).stats.arena_bytes["backward"][1].total
        for retain in (0, ALL)
    }
    assert needs[ALL] < needs[0] / 2


@pytest.mark.parametrize("retain", [-1, 2**46 + 1, [1, 2], [0, 0, -1], 1.5, "all", [1.5, 0, 0]], ids=str)
def test_budgets_that_are_no_bytes_are_refused(retain: Any) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=r"retain_bytes = .*from 0 to 2\*\*46.* each of 3 ranks"):
        plan_of(spill(LENGTHS, 3), retain_bytes=retain)


# ---- the same bits


@examples(40)
@given(
    st.sampled_from(list(LAYOUTS)),
    st.integers(1, 4),
    st.integers(0, 10**6),
    st.sampled_from(MASKS),
    st.sampled_from((5000, 50_000, ALL, [ALL, 0, 20_000, ALL])),
    st.booleans(),
    st.sampled_from((HEADS, distca.Heads(4, 4, 8, dtype=torch.bfloat16), distca.Heads(2, 1, 24, 8, torch.float16))),
    st.sampled_from((False, False, True)),
)
def test_results_have_the_bits_of_those_with_all_keys_sent_again(
    layout: str,
    ranks: int,
    seed: int,
    mask: tuple[str, int | None],
    budget: Any,
    cut: bool,
    heads: distca.Heads,
    queued: bool,
) -> None:
    where = LAYOUTS[layout](LENGTHS, ranks, seed)
    budget = budget[:ranks] if isinstance(budget, list) else budget
    tasks = random_tasks(where, heads.kv, seed) if cut else None
    options = {"mask": mask[0], "window": mask[1], "tasks": tasks}
    batch = random_batch(LENGTHS, heads, seed % 1000)
    sent_again = compute(batch, plan_of(where, heads, 0, **options))
    delivery: dict[str, Any] = {"reorder_seed": seed % 7 or None, "progress_thread": seed % 3 == 0}
    delivery = {"fused": seed % 2 == 0} | ({"streams": True} if queued else delivery)
    assert_equal(compute(batch, plan_of(where, heads, budget, **options), **delivery), sent_again)


def test_a_dedicated_server_with_a_graph_retains_and_one_that_only_serves_does_not() -> None:
    base = scattered(LENGTHS, 2, 5)
    layout = distca.Layout([base.segments(0), base.segments(1), [], []])
    batch = random_batch(LENGTHS, HEADS, 35)
    make = partial(plan_of, layout, servers=[2, 3])
    plan = make(retain_bytes=[0, 0, ALL, 0])
    assert plan.stats.retained_bytes[2] > 0

    def work(rank: int, context: distca.Context) -> tuple[torch.Tensor, ...]:
        if rank < 3:
            return run_step(batch, plan, context)
        for phase in ("forward", "backward"):
            distca.serve(plan.for_rank(rank), phase, context=context)
        return ()

    with loopback_group(plan, reorder_seed=3) as contexts:
        ours = together(LENGTHS, layout, on_all_ranks(contexts, work)[:3])
    assert_equal(ours, compute(batch, make(retain_bytes=0)))


def test_a_step_sends_as_many_bytes_as_the_statistics_say() -> None:
    layout, batch = spill(LENGTHS, 3), random_batch(LENGTHS, HEADS, 1)
    for retain in (0, 30_000, ALL):
        plan = plan_of(layout, retain_bytes=retain)
        with loopback_group(plan, link=distca.Link(bytes_per_second=1e12)) as contexts:
            for context in contexts:
                context.start_trace()
            on_all_ranks(contexts, lambda rank, context, plan=plan: run_step(batch, plan, context))
            sent = sum(size for context in contexts for _, size, _, _ in _emulation.take_transfers(context._core))
        assert sent == sum(plan.stats.bytes.values())


# ---- steps in parts, ping-pong


def test_two_steps_in_parts_that_retain_have_the_bits_of_whole_steps_that_do_not() -> None:
    layouts = [scattered(LENGTHS, 3, 4), spill((5, 300, 20, 111), 3)]
    tasks = random_tasks(layouts[0], HEADS.kv, 7)

    def plans(retain: int) -> list[distca.Plan]:
        return [
            plan_of(layouts[0], retain_bytes=retain, tasks=tasks),
            plan_of(layouts[1], retain_bytes=retain, window=70),
        ]

    def made(retain: int) -> Callable[[distca.Context], list[Rows]]:
        options: list[dict[str, Any]] = [{"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "softcap": 3.0}, {"scale": 0.3}]
        batches = [random_batch(n, HEADS, seed) for seed, n in enumerate((LENGTHS, (5, 300, 20, 111)))]
        return both(list(zip(batches, plans(retain), options, strict=True)))

    with loopback_group(plans(0)) as contexts:
        expected = on_all_ranks(contexts, lambda rank, context: whole_steps(made(0)(context)))
    for way in (whole_steps, overlapped_steps, steps_in_parts):
        for seed in (None, 2):
            with loopback_group(plans(0), reorder_seed=seed) as contexts:
                found = on_all_ranks(contexts, lambda rank, context, way=way: way(made(ALL)(context)))
            for mine, theirs in zip(found, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), (way.__name__, seed)


@pytest.mark.parametrize("recompute", [None, {}], ids=["", "recomputed"])
def test_halves_in_ping_pong_that_retain_have_the_bits_of_halves_that_do_not(recompute: dict[str, Any] | None) -> None:
    resending = plans_for(3)
    retaining = [plan_of(plan.layout, plan.heads, tolerance=0.01, min_rows=128) for plan in resending]
    assert all(sum(plan.stats.retained_bytes) > 0 for plan in retaining)

    def work(rank: int, context: distca.Context) -> None:
        model = seeded(Model)
        expected = results(one_after_the_other, model, halves_for(resending, context, recompute=recompute))
        assert_same(results(ping_pong, model, halves_for(retaining, context, recompute=recompute)), expected)

    with loopback_group([*resending, *retaining]) as contexts:
        on_all_ranks(contexts, work)


# ---- what holds the memory


@contextmanager
def recorded_saves() -> Iterator[list[torch.Tensor]]:
    """The uint8 tensors that autograd saves; they come back as unaligned copies."""
    saved: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.dtype == torch.uint8:
            saved.append(t)
            odd = torch.empty(t.numel() + 1, dtype=torch.uint8)[1:]
            return odd.copy_(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield saved


def two_layers(batch: Batch, plans: Sequence[distca.Plan], context: distca.Context, **how: Any) -> list[torch.Tensor]:
    """out of two layers, where the second has the first's out as queries, and the gradients of q, k, v."""
    rank, layout = context.rank, plans[0].layout
    q, k, v, dout = (rows_of_rank(batch, layout, rank, t).nan_to_num() for t in (batch.q, batch.k, batch.v, batch.dout))
    rows = [t.requires_grad_() for t in (q, k, v)]

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: int) -> torch.Tensor:
        return distca.core_attention(q, k, v, plans[index].for_rank(rank), context=context)[0][..., : k.shape[2]]

    out, k, v = rows
    for index in range(2):
        out = checkpoint(layer, out, k, v, index, **how) if how else layer(out, k, v, index)
    out.backward(dout[..., : out.shape[2]])
    return [out.detach(), *(t.grad for t in rows)]  # type: ignore[misc]


def plans_of_layers(retain: int) -> list[distca.Plan]:
    layout = spill(LENGTHS, 3)
    return [plan_of(layout, retain_bytes=retain), plan_of(layout, retain_bytes=retain, window=70, tolerance=0.3)]


def run_two_layers(retain: int, **how: Any) -> list[list[torch.Tensor]]:
    plans, batch = plans_of_layers(retain), random_batch(LENGTHS, HEADS, 3)
    with loopback_group(plans, reorder_seed=1) as contexts:
        return on_all_ranks(contexts, lambda rank, context: two_layers(batch, plans, context, **how))


def test_layers_keep_what_they_need_until_their_own_backward_has_run() -> None:
    plans, batch = plans_of_layers(ALL), random_batch(LENGTHS, HEADS, 3)
    expected = run_two_layers(0)

    def work(rank: int, context: distca.Context) -> list[torch.Tensor]:
        with recorded_saves() as saved:
            found = two_layers(batch, plans, context)
        assert [t.numel() for t in saved] == [plan.stats.retained_bytes[rank] for plan in plans]
        return found

    with loopback_group(plans) as contexts:
        found = on_all_ranks(contexts, work)
    assert all(sum(plan.stats.retained_bytes) > 0 for plan in plans)
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(
    "how",
    [
        {"use_reentrant": False},
        {"use_reentrant": True},
        {"use_reentrant": False, "context_fn": distca.save_core_attention},
    ],
    ids=["recomputed", "reentrant", "attention is saved"],
)
def test_checkpointed_layers_retain_when_they_run_again(how: dict[str, Any]) -> None:
    for mine, theirs in zip(run_two_layers(ALL, **how), run_two_layers(0), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_call_without_gradients_keeps_nothing() -> None:
    plan, resending = (plan_of(spill(LENGTHS, 2), retain_bytes=retain) for retain in (ALL, 0))
    batch = random_batch(LENGTHS, HEADS, 1)
    kept: list[tuple[int, bool]] = []

    class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operator(*args, **(kwargs or {}))
            if operator is torch.ops.distca.core_attention_retain.default:
                kept.append((result[2].numel(), torch.is_grad_enabled()))
            return result

    def work(rank: int, context: distca.Context) -> None:
        q, k, v = (rows_of_rank(batch, plan.layout, rank, t) for t in (batch.q, batch.k, batch.v))
        attend = partial(distca.core_attention, plan=plan.for_rank(rank), context=context)
        with Recorded():
            attend(q, k, v)
            with torch.no_grad():
                attend(q.requires_grad_(), k, v)
            attend(q, k, v, plan_backward=resending.for_rank(rank))[0].nan_to_num().sum().backward()

    with loopback_group([plan, resending]) as contexts:
        on_all_ranks(contexts, work)
    assert len(kept) == 6 and all(size == 0 for size, _ in kept)


def test_compiled_layers_retain_and_new_plans_recompile_once() -> None:
    heads = distca.Heads(4, 2, 16)
    layouts = [spill((100, 31, n, 60), 2) for n in (5, 200, 333, 500)]

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: distca.Plan, context: str) -> torch.Tensor:
        return distca.core_attention(q, k, v, plan, context=context)[0] * 2

    def step(plan: distca.Plan, call: Any, rank: int, context: distca.Context) -> list[torch.Tensor]:
        batch = random_batch(tuple(plan.layout.document_lengths), heads, 5)
        q, k, v, dout = (rows_of_rank(batch, plan.layout, rank, t) for t in (batch.q, batch.k, batch.v, batch.dout))
        rows = [t.requires_grad_() for t in (q, k, v)]
        out = call(*rows, plan.for_rank(rank), context.name)
        out.backward(dout)
        return [out.detach(), *(t.grad for t in rows)]  # type: ignore[misc]

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    plans = [[plan_of(layout, heads, retain) for retain in (0, ALL)] for layout in layouts]
    assert len({tuple(retaining.stats.retained_bytes) for _, retaining in plans}) == len(plans)
    with loopback_group([plan for both in plans for plan in both]) as contexts:
        for resending, retaining in plans:
            expected = on_all_ranks(contexts, partial(step, resending, layer))
            found = on_all_ranks(contexts, partial(step, retaining, compiled))
            for mine, theirs in zip(found, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert counter.frame_count <= 2 * len(contexts)  # sizes are constants once, and then no more


# ---- mistakes


def step_on_all_ranks(plan: distca.Plan, call: Callable[..., Any], **options: Any) -> list[str]:
    """What each rank is told after `call(q, k, v, plan, context)` and, if that returned, the backward of its out."""
    batch = random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        q, k, v = (rows_of_rank(batch, plan.layout, rank, t).requires_grad_() for t in (batch.q, batch.k, batch.v))
        call(q, k, v, plan.for_rank(rank), context)[0].nan_to_num().sum().backward()

    with loopback_group(plan, **options) as contexts:
        return [str(error) for error in outcomes(contexts, work)]


def test_the_raw_operator_refuses_a_plan_that_retains_before_anything_moves() -> None:
    plan = plan_of(spill(LENGTHS, 2))
    for told in step_on_all_ranks(
        plan, lambda *a: torch.ops.distca.core_attention(*a[:3], a[3].tensor, context=a[4].name)
    ):
        assert "distca InvalidArgumentError: the plan has retain_bytes" in told and "call distca.core_attention" in told


def test_a_backward_without_what_forward_has_kept_says_what_to_call() -> None:
    plan = plan_of(spill(LENGTHS, 2))

    def nothing_kept(q: Any, k: Any, v: Any, plan: distca.Plan, context: distca.Context) -> Any:
        return torch.ops.distca.core_attention_retain(q, k, v, plan.tensor, retained_bytes=0, context=context.name)

    def not_handed_on(q: Any, k: Any, v: Any, plan: distca.Plan, context: distca.Context) -> Any:
        out, lse = (t.detach() for t in distca.core_attention(q, k, v, plan, context=context))
        torch.ops.distca.core_attention_backward(out, q, k, v, out, lse, plan.tensor, context=context.name)

    kept = plan.stats.retained_bytes
    for call, has in ((nothing_kept, "0"), (not_handed_on, "none")):
        for rank, told in enumerate(step_on_all_ranks(plan, call)):
            if kept[rank] > 0 or has == "none":
                assert f"needs the {kept[rank]} bytes that its forward step kept on this rank, and has {has}" in told
                assert "call distca.core_attention (or distca.dispatch) with inputs that need a gradient" in told


@pytest.mark.parametrize("of_plan", [0, ALL])
def test_keys_kept_for_another_plan_than_that_of_forward_are_refused(of_plan: int) -> None:
    layout = spill(LENGTHS, 2)
    forward, backward = plan_of(layout, retain_bytes=of_plan), plan_of(layout, balance=False)

    def call(q: Any, k: Any, v: Any, plan: distca.Plan, context: distca.Context) -> Any:
        return distca.core_attention(q, k, v, plan, plan_backward=backward.for_rank(plan.rank), context=context)

    for told in step_on_all_ranks(forward, call, heap_bytes=1 << 22):
        assert "plan_backward retains keys, but of another plan" in told and "without retain_bytes" in told


def test_a_rank_that_only_serves_is_told_to_retain_nothing() -> None:
    layout = distca.Layout([*(spill(LENGTHS, 2).segments(rank) for rank in range(2)), []])
    plan = plan_of(layout, servers=[1, 2], rank=2)
    for serve in (distca.serve, lambda plan, phase: distca.serve_ping_pong([(plan, plan)], phase)):
        with pytest.raises(
            distca.InvalidArgumentError, match=r"for rank 2, .*retain_bytes=\[\.\.\.\], 0 for this rank"
        ):
            serve(plan, "forward")
