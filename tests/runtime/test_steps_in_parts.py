"""Steps in parts (dispatch, attend, collect), one or two under way at once, have the results of whole steps."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import distca
from support.batches import LENGTHS, data_parallel, random_batch, random_tasks, scattered, spill
from support.groups import loopback_group, on_all_ranks
from support.processes import Group, connect, fault_of
from support.step_ways import HEADS, Rows, both, overlapped_steps, spilled_plan, steps_in_parts, whole_steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_two_steps_in_parts_give_the_bits_of_two_whole_steps(ranks: int, dtype: torch.dtype) -> None:
    """The steps have rounds of gradients, ranges of heads, sinks and a softcap, with any order of delivery."""
    heads = distca.Heads(4, 2, 16, 24, dtype=dtype)
    lengths = [LENGTHS, (5, 300, 20, 111)]
    layouts = [scattered(lengths[0], ranks, 4), spill(lengths[1], ranks)]
    tasks = random_tasks(layouts[0], heads.kv, 7)
    plans = [
        distca.plan(layouts[0], heads, tasks=tasks),
        distca.plan(layouts[1], heads, tolerance=0.0, min_rows=1, window=70),
    ]
    options: list[dict[str, Any]] = [{"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "softcap": 3.0}, {"scale": 0.3}]
    made = both(
        [
            (random_batch(n, heads, seed), plan, of)
            for seed, (n, plan, of) in enumerate(zip(lengths, plans, options, strict=True))
        ]
    )
    with loopback_group(plans) as contexts:
        expected = on_all_ranks(contexts, lambda rank, context: whole_steps(made(context)))
    for way in (overlapped_steps, steps_in_parts):
        for seed, thread in ((None, False), (None, True), (1, False), (2, False), (3, True)):
            with loopback_group(plans, reorder_seed=seed, progress_thread=thread) as contexts:
                found = on_all_ranks(contexts, lambda rank, context, way=way: way(made(context)))
                assert [context.step for context in contexts] == [4] * ranks
            for mine, theirs in zip(found, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), (way.__name__, seed, thread)


def test_rows_leave_before_a_peer_comes_to_the_step_that_got_rows_in_the_slot_before() -> None:
    """Each rank is once so far ahead of the others that it would not get credit in time."""
    plan = distca.plan(spill(LENGTHS, 3), HEADS, tolerance=0.0)
    batch = random_batch(LENGTHS, HEADS, 1)
    senders = {transfer.source for transfer in plan.transfers if transfer.message == "forward_in"}
    assert senders
    with loopback_group(plan, timeout=0.5) as contexts:
        expected = on_all_ranks(contexts, lambda rank, context: whole_steps([Rows(batch, plan, context)]))
        for ahead in senders:
            rows = [Rows(batch, plan, context) for context in contexts]
            early = rows[ahead].dispatch()

            def work(
                rank: int,
                context: distca.Context,
                rows: list[Rows] = rows,
                early: tuple[int, distca.Step] = (ahead, early),
            ) -> list[torch.Tensor]:
                step = early[1] if rank == early[0] else rows[rank].dispatch()
                distca.attend(step)
                rows[rank].collect(step)
                rows[rank].loss().backward()
                return rows[rank].results()

            found = on_all_ranks(contexts, work)
            for mine, theirs in zip(found, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_step_between_the_parts_of_another_takes_the_other_slot_again_and_again() -> None:
    """Activation checkpointing does this in backward: it runs whole steps while one step stays under way."""
    plans = [distca.plan(spill(LENGTHS, 2), HEADS), distca.plan(spill((200, 3), 2), HEADS, tolerance=0.0)]
    batches = [random_batch(LENGTHS, HEADS, 1), random_batch((200, 3), HEADS, 2)]

    def work(context: distca.Context, overlap: bool) -> list[torch.Tensor]:
        long, *short = (Rows(batches[i], plans[i], context) for i in (0, 1, 1, 1))
        step = long.dispatch() if overlap else None
        for one in short:
            one.whole()
        if step is not None:
            distca.attend(step)
            short[0].whole()
            long.collect(step)
        else:
            long.whole()
        return [one.out.detach() for one in (long, *short)]

    for seed in (None, 1, 2):
        with loopback_group(plans, reorder_seed=seed) as contexts:
            found = on_all_ranks(contexts, lambda rank, context: work(context, True))
            expected = on_all_ranks(contexts, lambda rank, context: work(context, False))
        for mine, theirs in zip(found, expected, strict=True):
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(mine, theirs, strict=True))


def test_dedicated_servers_take_part_in_steps_in_parts_with_zero_rows() -> None:
    base = spill(LENGTHS, 2)
    layout = distca.Layout([base.segments(0), base.segments(1), []])
    plan = distca.plan(layout, HEADS, servers=[1, 2])
    made = both([(random_batch(LENGTHS, HEADS, seed), plan, {}) for seed in range(2)])
    with loopback_group(plan) as contexts:
        expected = on_all_ranks(contexts, lambda rank, context: whole_steps(made(context)))
        found = on_all_ranks(contexts, lambda rank, context: overlapped_steps(made(context)))
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_whole_documents_at_home_need_no_peer_in_any_part() -> None:
    """Nothing travels, so each rank can go through its parts alone."""
    plan = distca.plan(data_parallel(LENGTHS, 2), HEADS, balance=False)
    batch = random_batch(LENGTHS, HEADS, 1)
    with loopback_group(plan, timeout=5.0) as contexts:
        for context in contexts:
            overlapped_steps([Rows(batch, plan, context) for _ in range(2)])


# ---- the progress thread between processes


def with_a_progress_thread(rank: int, ranks: int, pipe: Any) -> None:
    plan, batch = spilled_plan(ranks), random_batch(LENGTHS, HEADS, 1)
    options = {"slot_bytes": plan.stats.slot_bytes, "heads": HEADS}
    with connect(rank, pipe, progress_thread=True, **options) as context:
        results = [way([Rows(batch, plan, context) for _ in range(2)]) for way in (whole_steps, overlapped_steps)]
        pipe.send(all(torch.equal(a, b) for a, b in zip(*results, strict=True)))
        child = os.fork()
        if child == 0:
            step = fault_of(Rows(batch, plan, context).dispatch)
            context.close()
            os._exit(0 if "before this process was forked" in step[1] else 1)
        pipe.send(os.waitpid(child, 0)[1])

        def go_on() -> None:  # the death may come at any point of this function
            one, other = (Rows(batch, plan, context) for _ in range(2))
            step = one.dispatch()
            if rank == 0:
                pipe.recv()
            distca.attend(step)
            one.collect(step)
            other.whole()

        pipe.send(fault_of(go_on))


def test_with_a_progress_thread_bits_deaths_and_forks_are_as_without() -> None:
    with Group(with_a_progress_thread, 3) as group:
        group.exchange_addresses()
        for rank in range(3):
            assert group.receive(rank), "other bits"
            assert group.receive(rank) == 0, "a forked child hangs or uses its parent's context"
        group.kill(0)
        for rank in (1, 2):
            kind, message = group.receive(rank)
            assert kind == "PeerDiedError" and "rank 0 died" in message, message


def test_a_progress_thread_is_refused_where_rows_are_exchanged_all_at_once() -> None:
    with pytest.raises(distca.InvalidArgumentError, match="progress_thread works with 'shm' only"):
        distca.init(transport="torch", max_tokens=8, heads=HEADS, progress_thread=True)
