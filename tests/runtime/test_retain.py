"""What servers retain from forward to backward, and that results have the same bits as when all is sent again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distca
from distca.testing import _emulation
from support.batches import LAYOUTS, LENGTHS, examples, random_batch, random_tasks, scattered, spill
from support.groups import compute, loopback_group, on_all_ranks, run_step, together
from support.halves import Model, assert_same, halves_for, one_after_the_other, ping_pong, plans_for, results, seeded
from support.oracle import NAMES
from support.retaining import ALL, HEADS, plan_of
from support.step_ways import Rows, both, overlapped_steps, steps_in_parts, whole_steps

MASKS = (("causal", None), ("causal", 70), ("full", None), ("full", 70))


def assert_equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    for name, a, b in zip(NAMES, ours, theirs, strict=True):
        assert torch.equal(a, b), name


# ---- what is retained


def test_what_is_kept_and_what_that_saves_can_be_counted_by_hand() -> None:
    """Rank 1 computes the last 36 of 100 rows, and rank 0 has the first 64: one block of keys travels."""
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
    """The bytes of keys that come to a server in forward and backward, by document, heads, and the first key wanted."""
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
            if backward > 0:  # it was not kept because those that save more left no room
                kept_before = sum(f for f, b in groups[:index] if b == 0)
                # The part of a block that others' rows do not fill.
                rest = 64 * (HEADS.dim + HEADS.value_dim) * HEADS.kv * 4
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
