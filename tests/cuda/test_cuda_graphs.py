"""Steps as part of a CUDA graph, which is launched again with other plans.

The expected results are the bits of the same steps done one by one on the same GPU; test_cuda_kernels.py compares those
with PyTorch's. Without a GPU the same code runs on an emulated one (test_emulated_graphs.py).
"""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest
import torch

import distca
from support.batches import random_tasks
from support.gpus import missing_gpu
from support.groups import loopback_group, on_all_ranks, ranks_apart
from support.processes import Group, connect

pytestmark = pytest.mark.skipif(bool(missing_gpu()), reason=missing_gpu())

HEADS = distca.Heads(4, 2, 64, dtype=torch.bfloat16)
ROWS, NUM_PLANS = 192, 20
Tensors = list[torch.Tensor]


def _plans(ranks: int) -> list[distca.Plan]:
    """A layout of documents that fill ROWS rows of each rank."""
    plans = []
    for seed in range(NUM_PLANS):
        lengths = [ROWS * ranks - 61 - seed, 60, seed + 1]
        layout = distca.Layout.packed(lengths, ranks=ranks, tokens_per_rank=ROWS)
        plans.append(distca.plan(layout, HEADS, tasks=random_tasks(layout, HEADS.kv, seed)))
    return plans


def _tensors(seed: int, rank: int) -> Tensors:
    """q, k, v that need gradients, and the gradient of out."""
    generator = torch.Generator(device="cuda").manual_seed(1000 * seed + rank)
    shapes = [(heads, HEADS.dim) for heads in (HEADS.q, HEADS.kv, HEADS.kv, HEADS.q)]
    made = [torch.randn(ROWS, *s, generator=generator, device="cuda", dtype=HEADS.dtype) for s in shapes]
    return [one.requires_grad_(i < 3) for i, one in enumerate(made)]


def _step(plan: distca.Plan, tensors: Tensors, context: distca.Context) -> Tensors:
    """Two layers, forward and backward: returns the second layer's out, and the gradients."""
    q, k, v, dout = tensors
    first, _ = distca.core_attention(q, k, v, plan.for_rank(context.rank), context=context, deterministic=True)
    out, _ = distca.core_attention(first + q, k, v, plan.for_rank(context.rank), context=context, deterministic=True)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def _compare(rank: int, plans: list[distca.Plan], context: distca.Context) -> None:
    """Compares launches of one graph, each with another plan, with steps that are not recorded."""
    inputs = [_tensors(seed, rank) for seed in range(len(plans))]
    right = [_step(plan, tensors, context) for plan, tensors in zip(plans, inputs, strict=True)]
    torch.cuda.current_stream().synchronize()
    tensors, graph = (
        [one.detach().clone().requires_grad_(i < 3) for i, one in enumerate(inputs[0])],
        torch.cuda.CUDAGraph(),
    )
    with (
        torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"),
        context.record(headroom=4.0, rounds=8) as recording,
    ):
        returned = _step(plans[0], tensors, context)
    assert recording.num_steps == 4
    for turn, plan in enumerate(plans):
        for tensor, value in zip(tensors, inputs[turn], strict=True):
            tensor.data.copy_(value)
        recording.replan(plan.for_rank(rank))
        graph.replay()
        for name, mine, expected in zip(("out", "dq", "dk", "dv"), returned, right[turn], strict=True):
            assert torch.equal(mine, expected), f"launch {turn}: {name}"
        if turn % 5 == 0:  # a step that is not recorded runs between the launches
            assert torch.equal(_step(plan, inputs[turn], context)[0], right[turn][0])
    context.check()


def test_launches_of_a_graph_with_other_plans_give_the_bits_of_steps_that_are_not_recorded() -> None:
    # One rank alone: on an H100 the graphs of two ranks of one process waited for each other until the timeout. Ranks
    # with processes of their own do not.
    plans = _plans(1)
    with loopback_group(plans, device="cuda", attention="own") as contexts:
        on_all_ranks(contexts, lambda rank, context: _compare(rank, plans, context))


def launch_in_a_process(rank: int, ranks: int, pipe: Connection) -> None:
    plans = _plans(ranks)
    slot_bytes = max(plan.stats.slot_bytes for plan in plans)
    context = connect(rank, pipe, device="cuda:0", heads=HEADS, slot_bytes=slot_bytes, timeout=120.0)
    with context, ranks_apart(context):  # a graph is not captured on the default stream
        _compare(rank, plans, context)
    pipe.send("the same")


def test_processes_launch_graphs_of_their_own() -> None:
    with Group(launch_in_a_process, 2) as group:
        group.exchange_addresses()
        assert [group.receive(rank) for rank in range(2)] == ["the same"] * 2


def test_a_replan_without_a_launch_since_the_one_before_is_refused() -> None:
    [plan, other] = _plans(1)[:2]
    with loopback_group([plan, other], device="cuda", attention="own", timeout=0.5) as [context]:
        tensors = _tensors(0, 0)
        _step(plan, tensors, context)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), context.record(headroom=4.0) as recording:
            _step(plan, tensors, context)
        with pytest.raises(distca.InvalidArgumentError, match="launch that instead"):
            recording.replay()
        recording.replan(plan)
        with pytest.raises(distca.InvalidArgumentError, match="launch the graph once after each replan"):
            recording.replan(other)
        graph.replay()
        recording.replan(other)
        graph.replay()


def test_another_mask_is_refused() -> None:
    layout = distca.Layout.packed([ROWS], ranks=1, tokens_per_rank=ROWS)
    plan = distca.plan(layout, HEADS)
    with loopback_group(plan, device="cuda", attention="own") as [context]:
        tensors = _tensors(0, 0)
        with context.record() as recording:
            _step(plan, tensors, context)
        with pytest.raises(distca.CapacityError, match="other mask, scores or heads in one forward"):
            recording.check(distca.plan(layout, HEADS, window=50))
        recording.replan(plan)
        recording.replay()
