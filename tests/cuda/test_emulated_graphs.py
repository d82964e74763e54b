"""Recordings on the emulated GPU: steps that are replayed, or launched as a captured graph, each time with other plans.

The expected results are the bits of the same steps done one by one on the host.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import distca
from distca.testing import _emulation
from emulation.emulated_gpu import OPTIONS, EmulatedGpu
from support.batches import random_tasks
from support.groups import loopback_group, on_all_ranks, outcomes
from support.recorded import (
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

HEADS = distca.Heads(4, 2, 24, 16)
OWN = distca.Heads(2, 1, 16, 24, torch.bfloat16)


def _plans(number: int, ranks: int = 3, heads: distca.Heads = HEADS) -> list[distca.Plan]:
    layouts = [layout_of(seed, ranks) for seed in range(number)]
    return [distca.plan(one, heads, tasks=random_tasks(one, heads.kv, seed)) for seed, one in enumerate(layouts)]


def _record(
    gpu: EmulatedGpu,
    context: distca.Context,
    all_ranks: threading.Barrier,
    steps: Callable[[], object],
    captured: bool = True,
) -> tuple[distca.Recording, Callable[[], None]]:
    """A recording of the steps, and the function that does them again: it launches the captured graph, or replays.

    The ranks of one process wait for each other before and after. Recording may wait for the device, and therefore for
    a rank that is ahead and itself waits for this one.
    """
    all_ranks.wait()
    with gpu.graph() if captured else nullcontext() as launch, context.record(headroom=4.0, rounds=8) as recording:
        steps()
    all_ranks.wait()
    return recording, launch or recording.replay


def _work(
    gpu: EmulatedGpu, plans: Sequence[distca.Plan], heads: distca.Heads, captured: bool
) -> Callable[[int, distca.Context], list[Tensors]]:
    """What a rank does: it takes each plan's step from a recording, and now and then a step that is not recorded."""
    all_ranks = threading.Barrier(plans[0].layout.num_ranks, timeout=60.0)

    def work(rank: int, context: distca.Context) -> list[Tensors]:
        tensors, returned, results = tensors_of(99, rank, heads), [], []
        recording, again = _record(
            gpu, context, all_ranks, lambda: returned.extend(one_step(plans[0], tensors, context)), captured
        )
        recording.replan(plans[0].for_rank(rank))
        for seed, plan in enumerate(plans):
            set_rows(tensors, tensors_of(seed, rank, heads))
            again()
            # The next calls come while that may still be under way.
            other = one_step(plan, tensors_of(seed, rank, heads), context) if seed % 5 == 3 else None
            if seed + 1 < len(plans):
                recording.replan(plans[seed + 1].for_rank(rank))
            gpu.synchronize()
            results.append([one.clone() for one in returned])
            if other is not None:
                assert_same([other], results[-1:])
        return results

    return work


@pytest.mark.parametrize("captured", [False, True], ids=["replays", "launches of a graph"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_twenty_plans_give_the_bits_of_steps_on_the_host(gpu: EmulatedGpu, ranks: int, captured: bool) -> None:
    plans = _plans(20, ranks)
    assert len({plan.digest for plan in plans}) == 20
    with loopback_group(plans, **OPTIONS) as contexts:
        results = on_all_ranks(contexts, _work(gpu, plans, HEADS, captured))
    for mine, right in zip(results, on_the_host(plans, range(20), HEADS), strict=True):
        assert_same(mine, right)


def test_graphs_end_though_nothing_in_them_happens_at_once_and_in_any_order_of_their_edges(gpu: EmulatedGpu) -> None:
    plans = _plans(20)
    with gpu.nodes_one_by_one(), loopback_group(plans, **OPTIONS) as contexts:
        results = on_all_ranks(contexts, _work(gpu, plans, HEADS, captured=True))
    for mine, right in zip(results, on_the_host(plans, range(20), HEADS), strict=True):
        assert_same(mine, right)


@pytest.mark.parametrize("own_gpu", [9, 8], ids=["9.0", "8.0"], indirect=True)
@pytest.mark.parametrize("captured", [False, True], ids=["replays", "launches of a graph"])
def test_own_attention_is_recorded(own_gpu: EmulatedGpu, captured: bool) -> None:
    plans = _plans(4, 2, OWN)
    with loopback_group(plans, **OPTIONS) as contexts:
        results = on_all_ranks(contexts, _work(own_gpu, plans, OWN, captured))
    with loopback_group(plans, **OPTIONS) as contexts:
        expected = on_all_ranks(
            contexts,
            lambda rank, context: [
                one_step(plan, tensors_of(seed, rank, OWN), context) for seed, plan in enumerate(plans)
            ],
        )
    for mine, right in zip(results, expected, strict=True):
        assert_same(mine, right)


def test_attention_that_aten_computes_is_refused_in_a_recording_and_the_context_goes_on(gpu: EmulatedGpu) -> None:
    plan = distca.plan(distca.Layout.packed([ROWS], ranks=1, tokens_per_rank=ROWS), HEADS)
    with gpu.attention_by_aten(), loopback_group(plan, **OPTIONS) as [context]:
        for _ in range(2):  # the second time a context that was poisoned would say so
            with pytest.raises(distca.InvalidArgumentError, match="which cannot be recorded"), context.record():
                one_step(plan, tensors_of(0, 0, HEADS), context)
        context.check()


def test_a_recording_for_which_there_is_no_memory_leaves_steps_to_be_done(gpu: EmulatedGpu) -> None:
    plan = distca.plan(distca.Layout.packed([ROWS], ranks=1, tokens_per_rank=ROWS), HEADS)
    with loopback_group(plan, **OPTIONS) as [context]:
        tensors = tensors_of(0, 0, HEADS)
        right = one_step(plan, tensors, context)
        with gpu.without_page_locked_memory(), pytest.raises(distca.DeviceError, match="page-locked"), context.record():
            pass
        assert_same([one_step(plan, tensors, context)], [right])
        assert context.step == 4
        with context.record() as recording:
            returned = one_step(plan, tensors, context)
        recording.replan(plan)
        recording.replay()
        gpu.synchronize()
        assert_same([returned], [right])


@pytest.mark.parametrize("mask", [{"window": 50}, {"mask": "full"}, {"mask": "full", "window": 50}], ids=str)
def test_another_mask_is_refused(own_gpu: EmulatedGpu, mask: dict[str, Any]) -> None:
    """The kernels' parameters are fixed in a recording, the scores of all groups among them."""
    layout = distca.Layout.packed([ROWS], ranks=1, tokens_per_rank=ROWS)
    plan, other = distca.plan(layout, OWN), distca.plan(layout, OWN, **mask)
    with loopback_group([plan, other], **OPTIONS) as [context]:
        tensors = tensors_of(0, 0, OWN)
        with context.record() as recording:
            one_step(plan, tensors, context)
        with pytest.raises(distca.CapacityError, match="other mask, scores or heads in one forward"):
            recording.check(other)
        recording.replan(plan)
        recording.replay()
        own_gpu.synchronize()


def test_a_graph_keeps_its_memory_when_other_steps_need_more(own_gpu: EmulatedGpu) -> None:
    [plan] = _plans(1, 1, OWN)
    with loopback_group(plan, **OPTIONS) as [context]:
        tensors = tensors_of(0, 0, OWN)
        right = one_step(plan, tensors, context)
        with own_gpu.graph() as launch, context.record(headroom=1.0) as recording:
            returned = one_step(plan, tensors, context)
        with context.record(headroom=200.0) as larger:
            other = one_step(plan, tensors, context)
        for steps, again in ((larger, larger.replay), (recording, launch)):
            steps.replan(plan)
            again()
        own_gpu.synchronize()
        assert_same([returned, other], [right, right])


def test_two_steps_in_parts_at_once_are_launched_as_a_graph(gpu: EmulatedGpu) -> None:
    plans = _plans(5)
    all_ranks = threading.Barrier(3, timeout=60.0)

    def work(rank: int, context: distca.Context) -> list[Tensors]:
        tensors = [[t.detach() for t in tensors_of(seed, rank, HEADS)] for seed in (0, 1)]
        returned: list[Tensors] = []
        recording, launch = _record(
            gpu,
            context,
            all_ranks,
            lambda: returned.extend(two_steps_in_parts(tensors, plans[4].for_rank(rank), context)),
        )
        results = []
        for turn in range(2):
            mine = [plans[2 * turn + i].for_rank(rank) for i in range(2)]
            recording.replan([*mine, *mine])
            launch()
            gpu.synchronize()
            results += [[t.clone() for t in step] for step in returned]
        return results

    with loopback_group(plans, **OPTIONS) as contexts:
        results = on_all_ranks(contexts, work)
    for mine, right in zip(results, on_the_host(plans[:4], [0, 1, 0, 1], HEADS), strict=True):
        assert_same(mine, right)


def test_a_replan_without_a_launch_since_the_one_before_is_refused(gpu: EmulatedGpu) -> None:
    plans = _plans(2, 1)
    with loopback_group(plans, **(OPTIONS | {"timeout": 0.3})) as [context]:
        tensors, returned = tensors_of(1, 0, HEADS), []
        recording, launch = _record(
            gpu, context, threading.Barrier(1), lambda: returned.extend(one_step(plans[0], tensors, context))
        )
        with pytest.raises(distca.InvalidArgumentError, match="launch that instead"):
            recording.replay()
        recording.replan(plans[0])
        with pytest.raises(distca.InvalidArgumentError, match="launch the graph once after each replan"):
            recording.replan(plans[1])
        launch()
        recording.replan(plans[1])
        launch()
        gpu.synchronize()
        [[right]] = on_the_host(plans[1:], [1], HEADS)
        assert_same([returned], [right])


def test_a_second_launch_after_a_replan_is_told_at_the_next_one(gpu: EmulatedGpu) -> None:
    [plan] = _plans(1, 1)
    with loopback_group(plan, **OPTIONS) as [context]:
        tensors, kept = tensors_of(1, 0, HEADS), []
        recording, launch = _record(
            gpu, context, threading.Barrier(1), lambda: kept.extend(one_step(plan, tensors, context))
        )
        for _ in range(3):
            recording.replan(plan)
            launch()
        launch()
        gpu.synchronize()
        for _ in range(2):
            with pytest.raises(distca.InvalidArgumentError, match="launched more often than it was replanned"):
                recording.replan(plan)


def test_a_peer_that_dies_between_launches_ends_them(gpu: EmulatedGpu) -> None:
    [plan] = _plans(1)
    all_ranks = threading.Barrier(3, timeout=60.0)

    def work(rank: int, context: distca.Context) -> None:
        tensors, returned = tensors_of(0, rank, HEADS), []
        recording, launch = _record(gpu, context, all_ranks, lambda: returned.extend(one_step(plan, tensors, context)))
        for _ in range(2):
            recording.replan(plan.for_rank(rank))
            launch()
        gpu.synchronize()  # when `work` returns, the recording's memory is freed
        if rank == 1:
            _emulation.mark_died(context._core)
            return
        while True:  # ends when a replan raises the error
            recording.replan(plan.for_rank(rank))
            launch()
            gpu.synchronize()
            assert all(not one.isnan().any() for one in returned) or returned[0].isnan().all()

    with loopback_group(plan, **OPTIONS) as contexts:
        results = outcomes(contexts, work)
    for rank in (0, 2):
        assert isinstance(results[rank], distca.PeerDiedError) and "rank 1 died" in str(results[rank]), results


def test_what_is_captured_and_not_recorded_is_refused_and_the_context_goes_on(gpu: EmulatedGpu) -> None:
    plan = distca.plan(distca.Layout.packed([ROWS], ranks=1, tokens_per_rank=ROWS), HEADS)
    with loopback_group(plan, **OPTIONS) as [context]:
        tensors = tensors_of(0, 0, HEADS)
        right = one_step(plan, tensors, context)

        def refused(call: Callable[[], object]) -> None:
            gc.collect()  # memory of the tests before, which must not be freed while a graph is captured
            with gpu.graph(), pytest.raises(distca.InvalidArgumentError, match="a CUDA graph is captured"):
                call()

        refused(lambda: one_step(plan, tensors, context))
        begun = distca.dispatch(*(t.detach() for t in tensors[:3]), plan, context=context)
        refused(lambda: distca.attend(begun))
        distca.attend(begun)
        refused(lambda: distca.collect(begun))
        out, lse = distca.collect(begun)
        with context.record() as recording:
            recorded = one_step(plan, tensors, context)
        refused(lambda: recording.replan(plan))
        recording.replan(plan)
        refused(recording.replay)
        recording.replay()
        with pytest.raises(distca.InvalidArgumentError, match="the capture begins before it"), context.record():
            refused(lambda: one_step(plan, tensors, context))
            with gpu.graph():
                one_step(plan, tensors, context)
        gpu.synchronize()
        assert torch.equal(out, right[0]) and torch.equal(lse, right[1])
        assert_same([recorded, one_step(plan, tensors, context)], [right, right])
