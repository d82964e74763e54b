"""Steps in parts: dispatch, attend and collect as calls of their own, two steps under way at once, and mistakes.

Expected are the results of the whole step, which other tests hold to PyTorch's.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distca
from support.batches import LENGTHS, Batch, data_parallel, random_batch, random_tasks, scattered, spill
from support.groups import loopback_group, on_all_ranks, outcomes
from support.processes import Group, connect, fault_of
from support.step_ways import Rows, both, overlapped_steps, steps_in_parts, whole_steps
from support.torch_ranks import join, over_torch, torch_group

HEADS = distca.Heads(4, 2, 16, 24)

Work = Callable[[int, distca.Context], Any]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_two_steps_in_parts_give_the_bits_of_two_whole_steps(ranks: int, dtype: torch.dtype) -> None:
    """With rounds of gradients, ranges of heads, sinks and a softcap; in any order of delivery."""
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
    """Each rank is far ahead of the others once: it would not get credit in time."""
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
    """As activation checkpointing does in backward: whole steps while one step stays under way."""
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


# ---- mistakes of one rank that are refused before anything moves


def _plan(ranks: int = 2) -> distca.Plan:
    return distca.plan(spill(LENGTHS, ranks), HEADS, tolerance=0.0, min_rows=1)


def test_a_third_step_is_refused_with_the_names_of_the_two_under_way_which_can_still_be_finished() -> None:
    plan, batch = _plan(), random_batch(LENGTHS, HEADS, 1)

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
    plan, batch = _plan(), random_batch(LENGTHS, HEADS, 1)

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
    plan, batch = _plan(ranks), random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        rows = [Rows(batch, plan, context) for _ in range(2)]
        whole_steps(rows) if rank == 1 else overlapped_steps(rows)

    with loopback_group(plan, reorder_seed=reorder_seed, timeout=20.0) as contexts:
        _all_get(contexts, work, distca.PlanMismatchError, "another call: it runs", "dispatch of forward (slot 1)")


def test_ranks_that_finish_steps_at_other_times_learn_of_each_other() -> None:
    plan, batch = _plan(), random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        rows = [Rows(batch, plan, context) for _ in range(2)]
        overlapped_steps(rows) if rank == 0 else steps_in_parts(rows)

    with loopback_group(plan, timeout=20.0) as contexts:
        _all_get(contexts, work, distca.PlanMismatchError, "dispatch of forward (slot 0)", "attend of forward (slot 1)")


def over_gloo(rank: int, ranks: int, pipe: Any, port: int) -> None:
    join(rank, ranks, port)
    plan, batch = _plan(ranks), random_batch(LENGTHS, HEADS, 1)
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
            # Forward and backward, each once after dispatch and once for the results.
            assert len(exchanges) >= 4 and all(span.seconds > 0 for span in exchanges)
        for rank in range(2):
            kind, message = group.receive(rank)
            assert kind == "PlanMismatchError" and "another call" in message, message
        group.tell("end")


def _assert_abandoned(results: list[Any], contexts: list[distca.Context], batch: Batch, plan: distca.Plan) -> None:
    """Rank 0 left a step: it is named to the others, and on rank 0 to whoever uses the context."""
    for rank in range(1, len(contexts)):
        assert isinstance(results[rank], distca.PeerLeftError), results[rank]
        assert "rank 0 left step 1 (forward) unfinished" in str(results[rank])
        with pytest.raises(distca.ContextPoisonedError, match=r"rank 0 left step 1 \(forward\) unfinished"):
            Rows(batch, plan, contexts[rank]).whole()
    with pytest.raises(distca.ContextPoisonedError, match=r"step 1 \(forward\) of context .* was dispatched on rank 0"):
        Rows(batch, plan, contexts[0]).whole()


@pytest.mark.parametrize("attended", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_that_goes_out_of_use_is_a_fault_that_names_it_on_all_ranks(ranks: int, attended: bool) -> None:
    plan, batch = _plan(ranks), random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        rows = Rows(batch, plan, context, layer="middle")
        step = rows.dispatch()
        if attended:
            distca.attend(step)
        if rank == 0:
            del step
            gc.collect()
            return
        if not attended:
            distca.attend(step)
        rows.collect(step)
        rows.whole()

    with loopback_group(plan, timeout=20.0) as contexts:
        results = outcomes(contexts, work)
        _assert_abandoned(results, contexts, batch, plan)
        with pytest.raises(distca.ContextPoisonedError, match=r"never collected \(layer middle\)"):
            Rows(batch, plan, contexts[0]).whole()


@pytest.mark.parametrize("attended", [False, True])
def test_an_input_that_is_changed_in_place_under_way_is_named(attended: bool) -> None:
    plan, batch = _plan(), random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        rows = Rows(batch, plan, context)
        step = rows.dispatch()
        if attended:
            distca.attend(step)
        if rank == 0:
            with torch.no_grad():
                rows.k.zero_()
            go_on, part = (distca.collect, "collect") if attended else (distca.attend, "attend")
            with pytest.raises(distca.InvalidArgumentError, match=f"{part}: k was changed in place"):
                go_on(step)
            return
        if not attended:
            distca.attend(step)
        rows.collect(step)
        rows.whole()

    with loopback_group(plan, timeout=20.0) as contexts:
        results = outcomes(contexts, work)
        _assert_abandoned(results, contexts, batch, plan)


def _broken(*_: Any) -> None:
    raise ValueError("in the middle")


def test_a_backward_that_breaks_off_in_the_middle_of_a_step_is_a_fault_that_names_it_at_once() -> None:
    plan, batch = _plan(), random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        rows = Rows(batch, plan, context)
        step = rows.dispatch()
        distca.attend(step)
        assert step._token is not None and step._token.grad_fn is not None
        if rank == 0:
            step._token.grad_fn.register_prehook(_broken)
        rows.collect(step)
        loss = rows.loss()
        if rank == 0:
            with pytest.raises(ValueError, match="in the middle"):
                loss.backward()
            return
        loss.backward()

    with loopback_group(plan, timeout=20.0) as contexts:
        results = outcomes(contexts, work)
        assert isinstance(results[1], distca.PeerLeftError), results[1]
        assert "rank 0 left step 2 (backward) unfinished" in str(results[1])
        with pytest.raises(distca.ContextPoisonedError, match=r"step 2 \(backward\) of context"):
            Rows(batch, plan, contexts[0]).whole()


def test_a_backward_that_breaks_off_on_all_ranks_between_overlapping_steps_is_named_by_the_next_step() -> None:
    plan, batch = _plan(), random_batch(LENGTHS, HEADS, 1)

    def work(rank: int, context: distca.Context) -> None:
        rows, steps = [Rows(batch, plan, context) for _ in range(2)], []
        before = [one.q for one in rows]
        for one in rows:
            one.q = one.q * 1.0
            steps.append(one.dispatch())
        for step in steps:
            distca.attend(step)
        for one, step in zip(rows, steps, strict=True):
            one.collect(step)
        rows[1].q.grad_fn.register_prehook(_broken)  # runs when one backward step is over and one is not
        loss = rows[0].loss() + rows[1].loss()
        with pytest.raises(ValueError, match="in the middle"):
            loss.backward()
        assert before[0].grad is None
        rows[0].dispatch()

    with loopback_group(plan, timeout=20.0) as contexts:
        results = outcomes(contexts, work)
        assert all(isinstance(one, distca.ContextPoisonedError | distca.PeerLeftError) for one in results), results
        assert any("(backward) of context" in str(one) and "broke off" in str(one) for one in results), results


# ---- the progress thread between processes


def with_a_progress_thread(rank: int, ranks: int, pipe: Any) -> None:
    plan, batch = _plan(ranks), random_batch(LENGTHS, HEADS, 1)
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

        def go_on() -> None:  # the death may come at any point of it
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
    with pytest.raises(distca.InvalidArgumentError, match="progress_thread is for 'shm'"):
        distca.init(transport="torch", max_tokens=8, heads=HEADS, progress_thread=True)


def test_whole_documents_at_home_need_no_peer_in_any_part() -> None:
    """Nothing travels, so each rank goes through its parts alone."""
    plan = distca.plan(data_parallel(LENGTHS, 2), HEADS, balance=False)
    batch = random_batch(LENGTHS, HEADS, 1)
    with loopback_group(plan, timeout=5.0) as contexts:
        for context in contexts:
            overlapped_steps([Rows(batch, plan, context) for _ in range(2)])
