"""Steps that are recorded once and replayed with other plans, on threads that stand for a GPU's streams.

The expected results are the bits of the same steps done one by one on the host.
"""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import distca
from distca.testing import _emulation
from support.batches import random_tasks
from support.groups import loopback_group, on_all_ranks, outcomes
from support.plan_reader import read_slice, with_tensor
from support.processes import HEADS as PROCESS_HEADS
from support.processes import Group, connect
from support.recorded import (
    HEADS,
    RANKS,
    ROWS,
    Tensors,
    assert_same,
    layout_of,
    on_the_host,
    one_step,
    set_rows,
    tensors_of,
    two_steps_in_parts,
)


def _plan(seed: int, heads: distca.Heads = HEADS) -> distca.Plan:
    layout = layout_of(seed)
    round_bytes = 1 if seed % 3 else None
    return distca.plan(layout, heads, tasks=random_tasks(layout, heads.kv, seed), round_bytes=round_bytes)


@pytest.mark.parametrize(("dtype", "hosts"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.float32, 2)])
def test_twenty_replays_with_other_plans_of_other_documents_give_the_bits_of_steps_on_the_host(dtype, hosts) -> None:
    heads = distca.Heads(4, 2, 16, 24, dtype)
    seeds = range(20)
    plans = [_plan(seed, heads) for seed in seeds]
    assert len({plan.digest for plan in plans}) == 20

    def work(rank: int, context: distca.Context) -> list[Tensors]:
        tensors, results = tensors_of(99, rank, heads), []
        with context.record(headroom=4.0, rounds=8) as recording:
            returned = one_step(plans[0], tensors, context)
        assert recording.num_steps == 2
        assert context.step == 0
        for seed in seeds:
            set_rows(tensors, tensors_of(seed, rank, heads))
            recording.replan(plans[seed].for_rank(rank))
            recording.replay()
            results.append([one.clone() for one in returned])
        assert context.step == 40
        return results

    with loopback_group(plans, streams=True, timeout=3.0, hosts=hosts) as contexts:
        for results, expected in zip(on_all_ranks(contexts, work), on_the_host(plans, seeds, heads), strict=True):
            assert_same(results, expected)


def test_a_replay_reads_the_sinks_anew() -> None:
    plans = [_plan(seed) for seed in range(2)]

    def work(rank: int, context: distca.Context) -> list[torch.Tensor]:
        q, k, v, _ = (t.detach() for t in tensors_of(3, rank))
        sinks, results = torch.zeros(HEADS.q), []
        with context.record(headroom=4.0, rounds=8) as recording:
            out, _lse = distca.core_attention(q, k, v, plans[0].for_rank(rank), context=context, sinks=sinks)
        for turn in range(2):
            sinks.fill_(turn + 1.0)
            recording.replan(plans[turn].for_rank(rank))
            recording.replay()
            results.append(out.clone())
        return results

    def on_host(rank: int, context: distca.Context) -> list[torch.Tensor]:
        q, k, v, _ = (t.detach() for t in tensors_of(3, rank))
        return [
            distca.core_attention(
                q, k, v, plan.for_rank(rank), context=context, sinks=torch.full((HEADS.q,), turn + 1.0)
            )[0]
            for turn, plan in enumerate(plans)
        ]

    with loopback_group(plans, streams=True, timeout=3.0) as contexts:
        mine = on_all_ranks(contexts, work)
    with loopback_group(plans) as contexts:
        right = on_all_ranks(contexts, on_host)
    for of_rank, expected in zip(mine, right, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(of_rank, expected, strict=True))


def test_a_replay_has_the_scale_and_softcap_of_its_call_whether_or_not_its_plan_says_them() -> None:
    layout = layout_of(3)
    said = [distca.Scores(scale=0.75, softcap=2.0)] * len(layout.document_lengths)
    plans = [distca.plan(layout, HEADS), distca.plan(layout, HEADS, scores=said)]
    asked = {"scale": 0.75, "softcap": 2.0}
    tasks = [random_tasks(layout, HEADS.kv, seed) for seed in range(2)]
    plans += [
        distca.plan(layout, HEADS, tasks=tasks[0]),
        distca.plan(layout, HEADS, scores=said, tasks=tasks[1]),
    ]

    def step(plan: distca.Plan, tensors: Tensors, context: distca.Context) -> Tensors:
        out, lse = distca.core_attention(*tensors[:3], plan.for_rank(context.rank), context=context, **asked)
        return [out.detach(), lse, *torch.autograd.grad(out, tensors[:3], tensors[3])]

    def work(rank: int, context: distca.Context) -> list[Tensors]:
        tensors, results = tensors_of(5, rank), []
        for recorded in plans[:2]:
            with context.record(headroom=8.0, rounds=8) as recording:
                returned = step(recorded, tensors, context)
            for plan in plans:
                recording.replan(plan.for_rank(rank))
                recording.replay()
                results.append([one.clone() for one in returned])
        return results

    def on_host(rank: int, context: distca.Context) -> list[Tensors]:
        return [step(plan, tensors_of(5, rank), context) for plan in plans] * 2

    with loopback_group(plans, streams=True, timeout=3.0) as contexts:
        results = on_all_ranks(contexts, work)
    with loopback_group(plans) as contexts:
        for mine, right in zip(results, on_all_ranks(contexts, on_host), strict=True):
            assert_same(mine, right)


def test_a_recording_keeps_the_memory_of_tensors_that_are_given_other_memory() -> None:
    rows = 20_000  # of which the memory goes back to the operating system when it is freed
    plan = distca.plan(distca.Layout.from_documents([[50] * (rows // 50)]), HEADS)
    with loopback_group(plan, streams=True, timeout=20.0) as [context]:
        tensors = tensors_of(0, 0, HEADS, rows)
        with context.record() as recording:
            returned = one_step(plan, tensors, context)
        recording.replan(plan)
        recording.replay()
        right = [one.clone() for one in returned]
        kept = [one[:] for one in returned[:2]]
        for one in (*tensors, *returned[2:]):
            one.data = torch.zeros(1)
        recording.replan(plan)
        recording.replay()
        assert all(torch.equal(a, b) for a, b in zip(kept, right, strict=False))


def test_layers_have_plans_of_their_own_and_replays_of_two_recordings_take_turns_with_steps_that_are_not_recorded() -> (
    None
):
    plans = [_plan(seed) for seed in range(8)]

    def work(rank: int, context: distca.Context) -> list[Tensors]:
        a, b, c = (tensors_of(seed, rank) for seed in (0, 1, 2))
        with context.record(headroom=4.0, rounds=8) as layers:
            first, second = one_step(plans[6], a, context), one_step(plans[7], b, context)
        with context.record(headroom=4.0, rounds=8) as single:
            third = one_step(plans[7], c, context)
        results = []
        for turn in range(2):
            mine = [plans[3 * turn + i].for_rank(rank) for i in range(3)]
            layers.replan([mine[0], mine[0], mine[1], mine[1]])
            layers.replay()
            results += [one_step(plans[7], c, context)]
            single.replan(mine[2])
            single.replay()
            results += [[one.clone() for one in step] for step in (first, second, third)]
        return results

    order = [7, 0, 1, 2, 7, 3, 4, 5]
    with loopback_group(plans, streams=True, timeout=3.0) as contexts:
        results = on_all_ranks(contexts, work)
    expected = on_the_host([plans[i] for i in order], [2, 0, 1, 2] * 2)
    for mine, right in zip(results, expected, strict=True):
        assert_same(mine, right)


def test_steps_in_parts_of_which_two_are_under_way_at_once_are_replayed() -> None:
    plans = [_plan(seed) for seed in range(5)]

    def work(rank: int, context: distca.Context) -> list[Tensors]:
        tensors = [[t.detach() for t in tensors_of(seed, rank)] for seed in (0, 1)]
        with context.record(headroom=4.0, rounds=8) as recording:
            returned = two_steps_in_parts(tensors, plans[4].for_rank(rank), context)
        results = []
        for turn in range(2):
            mine = [plans[2 * turn + i].for_rank(rank) for i in range(2)]
            recording.replan([*mine, *mine])
            recording.replay()
            results += [[t.clone() for t in step] for step in returned]
        return results

    with loopback_group(plans, streams=True, timeout=3.0) as contexts:
        results = on_all_ranks(contexts, work)
    for mine, right in zip(results, on_the_host(plans[:4], [0, 1, 0, 1]), strict=True):
        assert_same(mine, right)


def test_a_recording_goes_through_its_rounds_with_plans_that_have_fewer_and_refuses_one_that_has_more() -> None:
    heads = distca.Heads(2, 1, 8)
    layout = distca.Layout.packed([1500, 100], ranks=8, tokens_per_rank=200)
    many = distca.plan(layout, heads, tolerance=0.0, min_rows=1)
    none = distca.plan(distca.Layout.packed([200] * 8, ranks=8, tokens_per_rank=200), heads)
    rounds = [max(read_slice(p.for_rank(r).tensor.tolist()).header.num_rounds for r in range(8)) for p in (many, none)]
    assert rounds[0] > 2 > rounds[1]
    plans = [many, none, many]

    def work(rank: int, context: distca.Context) -> list[Tensors]:
        tensors, results = tensors_of(0, rank, heads, 200), []
        with context.record(headroom=4.0, rounds=8) as recording:
            returned = one_step(many, tensors, context)
        for plan in plans:
            recording.replan(plan.for_rank(rank))
            recording.replay()
            results.append([one.clone() for one in returned])
        with context.record(headroom=100.0, rounds=1) as recording:
            one_step(none, tensors, context)
        if read_slice(many.for_rank(rank).tensor.tolist()).header.num_rounds > 1:
            with pytest.raises(distca.CapacityError, match="rounds, the recording has 1; record with a plan"):
                recording.check(many.for_rank(rank))
        return results

    with loopback_group(plans) as contexts:
        expected = on_all_ranks(
            contexts,
            lambda rank, context: [one_step(plan, tensors_of(0, rank, heads, 200), context) for plan in plans],
        )
    with loopback_group(plans, streams=True, timeout=3.0) as contexts:
        for mine, right in zip(on_all_ranks(contexts, work), expected, strict=True):
            assert_same(mine, right)


# ---- processes


def _process_plans(ranks: int) -> list[distca.Plan]:
    return [
        distca.plan(
            layout_of(seed, ranks),
            PROCESS_HEADS,
            tolerance=0.0,
            min_rows=1,
        )
        for seed in range(20)
    ]


def replay_in_a_process(rank: int, ranks: int, pipe: Connection) -> None:
    plans = _process_plans(ranks)
    with connect(rank, pipe, device="cpu") as context:
        tensors = tensors_of(0, rank, PROCESS_HEADS)
        with context.record(headroom=4.0, rounds=8) as recording:
            returned = one_step(plans[0], tensors, context)
        results = []
        for plan in plans:
            recording.replan(plan.for_rank(rank))
            recording.replay()
            results.append([one.detach().numpy().copy() for one in returned])
        pipe.send(results)


def test_processes_that_write_into_each_others_memory_replay_twenty_plans() -> None:
    plans = _process_plans(2)
    with loopback_group(plans) as contexts:
        expected = on_all_ranks(
            contexts,
            lambda rank, context: [one_step(plan, tensors_of(0, rank, PROCESS_HEADS), context) for plan in plans],
        )
    with Group(replay_in_a_process, 2) as group:
        group.exchange_addresses()
        for rank in range(2):
            results = [[torch.from_numpy(one) for one in step] for step in group.receive(rank)]
            assert_same(results, expected[rank])


# ---- what is refused


def test_a_plan_that_does_not_fit_is_refused_with_the_table_and_the_numbers_and_changes_nothing() -> None:
    small = distca.plan(distca.Layout.packed([ROWS] * RANKS, ranks=RANKS, tokens_per_rank=ROWS), HEADS)
    plans = [small, _plan(3)]

    def work(rank: int, context: distca.Context) -> list[Tensors]:
        tensors = tensors_of(0, rank)
        with context.record(headroom=1.0, rounds=8) as recording:
            returned = one_step(small, tensors, context)
        words = (
            r"replan, step 0 of the recording: plan needs \d+ [a-z ]+ in one [a-z ]+, the recording has room for \d+"
        )
        for refused in (recording.check, recording.replan):
            with pytest.raises(distca.CapacityError, match=words):
                refused(plans[1].for_rank(rank))
        recording.check(small.for_rank(rank))
        assert context.step == 0
        recording.replan(small.for_rank(rank))
        recording.replay()
        first = [one.clone() for one in returned]
        return [first, one_step(plans[1], tensors, context)]

    with loopback_group(plans, streams=True, timeout=3.0) as contexts:
        results = on_all_ranks(contexts, work)
    for mine, right in zip(results, on_the_host(plans, [0, 0]), strict=True):
        assert_same(mine, right)


def test_a_backward_step_is_replanned_with_the_layout_of_its_forward_step() -> None:
    plans, other = [_plan(1), distca.plan(layout_of(1), HEADS)], _plan(2)

    def work(rank: int, context: distca.Context) -> list[Tensors]:
        tensors = tensors_of(0, rank)
        with context.record(headroom=8.0, rounds=8) as recording:
            returned = one_step(plans[0], tensors, context)
        for refused in (recording.check, recording.replan):
            with pytest.raises(distca.InvalidArgumentError, match="the plan of backward is of another layout"):
                refused([plans[0].for_rank(rank), other.for_rank(rank)])
        recording.replan([plan.for_rank(rank) for plan in plans])
        recording.replay()
        return [[one.clone() for one in returned]]

    with loopback_group([*plans, other], streams=True, timeout=3.0) as contexts:
        results = on_all_ranks(contexts, work)
    for mine, right in zip(results, on_the_host(plans[:1], [0]), strict=True):
        assert torch.equal(mine[0][0], right[0][0])


@pytest.mark.parametrize("recorded_with", [None, 0.25])
@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_plan_of_another_scale_or_softcap_than_that_of_the_recorded_call_is_refused(
    name: str, recorded_with: float | None
) -> None:
    layout = distca.Layout.packed([ROWS], ranks=1, tokens_per_rank=ROWS)
    asked = {"scale": 0.25, "softcap": 0.25}

    def saying(value: float | None) -> distca.Plan:
        return distca.plan(layout, HEADS, scores=[distca.Scores(**({**asked, name: value} if value else {}))])

    plan, other = saying(recorded_with), saying(0.5)
    with loopback_group([plan, other], streams=True, timeout=3.0) as [context]:
        q, k, v, _ = (t.detach() for t in tensors_of(0, 0))
        with context.record() as recording:
            distca.core_attention(q, k, v, plan, context=context, **asked)
        for refused in (recording.check, recording.replan):
            with pytest.raises(distca.InvalidArgumentError, match=f"{name} = 0.25; the plan says 0.5 for document 0"):
                refused(other)
        recording.replan(plan)
        recording.replay()


def test_what_a_replay_would_not_do_again_is_refused_and_the_context_goes_on() -> None:
    heads = distca.Heads(4, 2, 16, 24, torch.bfloat16)
    layout = distca.Layout.packed([ROWS], ranks=1, tokens_per_rank=ROWS)
    plans = [distca.plan(layout, HEADS), distca.plan(layout, heads)]

    def in_parts(*arguments: Any, **options: Any) -> Any:
        step = distca.dispatch(*arguments, **options)
        distca.attend(step)
        return distca.collect(step)

    with loopback_group(plans, streams=True, timeout=3.0) as [context]:
        q, k, v, dout = tensors_of(0, 0)
        narrow = q.bfloat16()
        sinks = torch.zeros(HEADS.q, requires_grad=True)
        for call in (distca.core_attention, in_parts):
            with (
                pytest.raises(distca.InvalidArgumentError, match="autocast casts k, which a replay would not do again"),
                torch.autocast("cpu", torch.bfloat16),
                context.record(),
            ):
                call(narrow, k, v, plans[1], context=context)
            with (
                pytest.raises(
                    distca.InvalidArgumentError, match="gradient of sinks, which a replay would not do again"
                ),
                context.record(),
            ):
                call(q, k, v, plans[0], context=context, sinks=sinks)[0].backward(dout)
            with torch.autocast("cpu", torch.bfloat16), context.record() as recording:
                call(*(t.bfloat16() for t in (q, k, v)), plans[1], context=context)
            recording.replan(plans[1])
            recording.replay()
            with context.record() as recording:
                call(q, k, v, plans[0], context=context, sinks=sinks.detach())[0].backward(dout)
            recording.replan(plans[0])
            recording.replay()
        one_step(plans[0], [q, k, v, dout], context)


def test_ranks_whose_recordings_break_off_for_different_reasons_go_on() -> None:
    plan = _plan(1)
    broken_off = threading.Barrier(RANKS, timeout=60.0)

    def work(rank: int, context: distca.Context) -> list[Tensors]:
        tensors = tensors_of(0, rank)
        reason = distca.InvalidArgumentError if rank == 0 else KeyError
        with pytest.raises(reason), context.record():
            if rank == 0:  # a call that the rank refuses, and tells the others of
                distca.core_attention(*(t[1:] for t in tensors[:3]), plan.for_rank(rank), context=context)
            raise KeyError("another rank could not record")
        broken_off.wait()
        return [one_step(plan, tensors, context)]

    with loopback_group(plan, streams=True, timeout=3.0) as contexts:
        results = on_all_ranks(contexts, work)
    for mine, right in zip(results, on_the_host([plan], [0]), strict=True):
        assert_same(mine, right)


@pytest.mark.parametrize("changes_inputs", [False, True])
def test_a_step_that_was_dispatched_in_a_recording_and_then_dropped_is_no_fault(changes_inputs: bool) -> None:
    plan = _plan(1)
    broken_off = threading.Barrier(RANKS, timeout=60.0)

    def dispatch_and_drop(rank: int, context: distca.Context) -> None:
        q, k, v, _ = (t.detach() for t in tensors_of(0, rank))
        step = distca.dispatch(q, k, v, plan.for_rank(rank), context=context)
        if changes_inputs:
            q.add_(1.0)
        distca.attend(step)

    def work(rank: int, context: distca.Context) -> list[Tensors]:
        changed = "q was changed in place" if changes_inputs else "dispatched and not collected"
        with pytest.raises(distca.InvalidArgumentError, match=changed), context.record():
            dispatch_and_drop(rank, context)
        broken_off.wait()
        return [one_step(plan, tensors_of(0, rank), context)]

    with loopback_group(plan, streams=True, timeout=3.0) as contexts:
        results = on_all_ranks(contexts, work)
    for mine, right in zip(results, on_the_host([plan], [0]), strict=True):
        assert_same(mine, right)


def test_an_error_in_a_recording_whose_context_was_closed_is_raised_as_it_is() -> None:
    plan = distca.plan(distca.Layout.packed([ROWS], ranks=1, tokens_per_rank=ROWS), HEADS)
    with loopback_group(plan, streams=True) as [context], pytest.raises(KeyError), context.record():
        context.close()
        raise KeyError("of the caller")


def test_backward_that_is_not_recorded_goes_with_that_of_ranks_that_have_recorded_other_steps_before() -> None:
    plan = _plan(1)

    def work(rank: int, context: distca.Context) -> list[Tensors]:
        tensors = tensors_of(0, rank)
        q, k, v, dout = tensors
        for _ in range(rank):  # with too little room, as it were
            with context.record():
                one_step(plan, tensors, context)
        with context.record() as recording:
            out, lse = distca.core_attention(q, k, v, plan.for_rank(rank), context=context)
        recording.replan(plan.for_rank(rank))
        recording.replay()
        return [[out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)]]

    with loopback_group(plan, streams=True, timeout=3.0) as contexts:
        results = on_all_ranks(contexts, work)
    for mine, right in zip(results, on_the_host([plan], [0]), strict=True):
        assert_same(mine, right)


def test_calls_out_of_order_are_refused_and_the_context_goes_on() -> None:
    layout = distca.Layout.packed([ROWS], ranks=1, tokens_per_rank=ROWS)
    plan = distca.plan(layout, HEADS)
    longer = distca.plan(distca.Layout.packed([ROWS + 1], ranks=1, tokens_per_rank=ROWS + 1), HEADS)
    with loopback_group([plan, longer], streams=True, timeout=3.0) as [context]:
        tensors = tensors_of(0, 0)
        right = one_step(plan, tensors, context)
        recording = context.record()

        def refused(words: str):
            return pytest.raises(distca.InvalidArgumentError, match=words)

        with refused("nothing is recorded"):
            recording.replay()
        with pytest.raises(KeyError), recording:
            one_step(plan, tensors, context)
            raise KeyError("of the caller")
        with refused("nothing is recorded"):
            recording.replan(plan)
        with refused("no step was recorded"), context.record():
            pass
        with recording:
            returned = one_step(plan, tensors, context)
            with refused("is open already"), context.record():
                pass
        with refused("made once"), recording:
            pass
        with refused("call replan before each replay"):
            recording.replay()
        with refused("make its plans without retain_bytes"):
            recording.replan(distca.plan(layout, HEADS, retain_bytes=1 << 20))
        with refused("3 plans for 2 recorded steps"):
            recording.replan([plan] * 3)
        with refused("it has 65 rows on rank 0, the tensors have 64"):
            recording.replan(longer)
        for wrong, words in ((None, "plan is None; a distca.Plan"), ([plan.tensor], "plan is a Tensor; a distca.Plan")):
            with refused(words):
                recording.replan(wrong)
        table = plan.tensor
        for moved in (table.to("meta"), table.to(torch.int32), table.repeat_interleave(2)[::2], table[:1].expand(99)):
            with refused("a contiguous int64 CPU tensor"):
                recording.check(with_tensor(plan, moved))
        recording.replan(plan)
        for call in (lambda: one_step(plan, tensors, context), lambda: recording.replan(plan)):
            with refused("replay it first"):
                call()
        recording.replay()
        assert_same([returned, one_step(plan, tensors, context)], [right, right])
        with refused("call replan before each replay"):
            recording.replay()
        q, k, v, _ = (t.detach() for t in tensors)
        with refused("dispatched and not collected"), context.record():
            torch.ops.distca.dispatch(q, k, v, plan.tensor, context=context.name)
        step = torch.ops.distca.dispatch(q, k, v, plan.tensor, context=context.name)
        for call in (lambda: context.record().__enter__(), lambda: recording.replan(plan)):
            with refused("a step is under way"):
                call()
        torch.ops.distca.attend(step, context=context.name)
        torch.ops.distca.collect(step, context=context.name)
        for headroom in (0.5, 1e6):
            with refused("1 to 1000 is allowed"), context.record(headroom=headroom):
                pass
        with refused("dout was copied, because it has gaps"), context.record():
            distca.core_attention(*tensors[:3], plan, context=context)[0].sum().backward()
        recording.replan(plan)
        recording.replay()
        assert_same([returned], [right])
    with refused("is closed"):
        recording.replay()


def test_steps_that_the_host_does_are_not_recorded() -> None:
    plan = distca.plan(distca.Layout.packed([ROWS], ranks=1, tokens_per_rank=ROWS), HEADS)
    with loopback_group(plan) as [context]:
        with pytest.raises(distca.InvalidArgumentError, match="'loopback' are done by the host"), context.record():
            pass
        one_step(plan, tensors_of(0, 0), context)


@pytest.mark.parametrize("odd_one", range(RANKS))
def test_of_ranks_that_replan_with_different_plans_one_says_so_and_nobody_returns_wrong_rows(odd_one: int) -> None:
    plans = [_plan(1), distca.plan(layout_of(1), HEADS)]
    right = on_the_host(plans[:1], [0])

    def work(rank: int, context: distca.Context) -> Tensors:
        tensors = tensors_of(0, rank)
        with context.record(headroom=8.0, rounds=8) as recording:
            returned = one_step(plans[0], tensors, context)
        mine = plans[rank == odd_one].for_rank(rank)
        recording.replan([plans[0].for_rank(rank), mine])
        recording.replay()
        return returned

    with loopback_group(plans, streams=True, timeout=3.0) as contexts:
        results = outcomes(contexts, work)
    assert any(isinstance(result, distca.PlanMismatchError) for result in results), results
    for rank, result in enumerate(results):
        if isinstance(result, BaseException):
            assert isinstance(result, distca.PlanMismatchError), result
            assert "a replay up to backward" in str(result) or "another plan" in str(result), result
            continue
        for a, b in zip(result, right[rank][0], strict=True):
            assert torch.equal(a, b) or a.isnan().all()


def test_a_peer_that_dies_between_replays_ends_them() -> None:
    plan = _plan(1)

    def work(rank: int, context: distca.Context) -> None:
        tensors = tensors_of(0, rank)
        with context.record() as recording:
            returned = one_step(plan, tensors, context)
        for _ in range(2):
            recording.replan(plan.for_rank(rank))
            recording.replay()
        if rank == 1:
            _emulation.mark_died(context._core)
            return
        while True:  # ends when a replan or a replay raises the error
            recording.replan(plan.for_rank(rank))
            recording.replay()
            assert all(not one.isnan().any() for one in returned) or returned[0].isnan().all()

    with loopback_group(plan, streams=True, timeout=3.0) as contexts:
        results = outcomes(contexts, work)
    for rank in (0, 2):
        assert isinstance(results[rank], distca.PeerDiedError) and "rank 1 died" in str(results[rank]), results
