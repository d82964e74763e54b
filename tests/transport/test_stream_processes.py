"""Processes whose devices write into each other's memory, on one GPU or on what stands for it without one.

Steps are queued, so a fault shows as NaN at once and as an error of the next call.
"""

from __future__ import annotations

import random
from multiprocessing.connection import Connection

import pytest
import torch

import distca
from distca.testing import _emulation
from support.batches import random_batch, rows_of_rank, scattered, spill
from support.gpus import missing_gpu
from support.groups import compute, ranks_apart, run_step, together
from support.oracle import NAMES, ErrorPool, oracle, torch_attention
from support.processes import Group, connect, fault_of, held, plan_for, tensors_for

CUDA = pytest.param("cuda:0", marks=pytest.mark.skipif(bool(missing_gpu()), reason=missing_gpu()))
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])
HEADS = distca.Heads(4, 2, 64, dtype=torch.bfloat16)
LENGTHS = (300, 7, 64, 129)
NUM_PLANS = {"cpu": 20, "cuda:0": 30}


def _plan(ranks: int, seed: int, tolerance: float = 0.0) -> distca.Plan:
    layout = (spill if seed % 2 == 0 else scattered)(LENGTHS, ranks, seed)
    return distca.plan(layout, HEADS, tolerance=tolerance, min_rows=1)


def steps_of_plans(rank: int, ranks: int, pipe: Connection, device: str) -> None:
    plans = [_plan(ranks, seed) for seed in range(6)]
    slot_bytes = max(plan.stats.slot_bytes for plan in plans)
    with connect(rank, pipe, device=device, heads=HEADS, slot_bytes=slot_bytes, timeout=120.0) as context:
        assert context._core is not None
        _emulation.fill_with_nan(context._core)
        with ranks_apart(context):
            results = [run_step(random_batch(LENGTHS, HEADS, seed), plan, context) for seed, plan in enumerate(plans)]
    # Tensors are sent as words, because numpy has no bfloat16 and torch's own way of sending would leave memory behind.
    pipe.send([[t.detach().float().numpy() for t in result] for result in results])


@DEVICES
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_are_as_exact_as_pytorch(ranks: int, device: str) -> None:
    with Group(steps_of_plans, ranks, device) as group:
        group.exchange_addresses()
        of_ranks = [group.receive(rank) for rank in range(ranks)]
    pool = ErrorPool(HEADS.dtype)
    for seed in range(6):
        plan, batch = _plan(ranks, seed), random_batch(LENGTHS, HEADS, seed)
        results = [[torch.from_numpy(t) for t in of_rank[seed]] for of_rank in of_ranks]
        results = [
            [t if name == "lse" else t.bfloat16() for name, t in zip(NAMES, one, strict=True)] for one in results
        ]
        ours = together(LENGTHS, plan.layout, results)
        if device == "cpu":
            for name, a, b in zip(NAMES, ours, compute(batch, plan), strict=True):
                assert torch.equal(a, b), f"{name} differs from loopback"
        pool.add(ours, torch_attention(batch), oracle(batch))
    pool.check()


def steps_of_random_plans(rank: int, ranks: int, pipe: Connection, device: str) -> None:
    number = NUM_PLANS[device]
    plans = [_plan(ranks, seed, random.Random(seed).choice((0.0, 0.1, 0.5))) for seed in range(number)]
    slot_bytes = max(plan.stats.slot_bytes for plan in plans)
    batch = random_batch(LENGTHS, HEADS, 1)
    context = connect(rank, pipe, device=device, heads=HEADS, slot_bytes=slot_bytes, timeout=120.0)
    with context, ranks_apart(context):
        for plan in plans:
            out = run_step(batch, plan, context)[0]
            # Padding rows come back as 0.
            expected = rows_of_rank(batch, plan.layout, rank, oracle(batch)[0]).nan_to_num()
            torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
    pipe.send("done")


@DEVICES
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_plans_one_after_another_do_not_hang(ranks: int, device: str) -> None:
    with Group(steps_of_random_plans, ranks, device) as group:
        group.exchange_addresses()
        for rank in range(ranks):
            assert group.receive(rank) == "done"


def step_until_a_fault(rank: int, ranks: int, pipe: Connection, device: str) -> None:
    if device != "cpu":
        torch.zeros(1, device=device)  # begins CUDA, which opens sockets of its own
    before = held()
    plan = plan_for(ranks, rank, heads=HEADS)

    def step(context: distca.Context) -> None:
        with ranks_apart(context):
            q, k, v, dout = (t.detach().to(context.device) for t in tensors_for(plan))
            q, k, v = (t.requires_grad_() for t in (q, k, v))
            distca.core_attention(q, k, v, plan, context=context)[0].backward(dout)

    options = {"device": device, "heads": HEADS, "slot_bytes": plan.stats.slot_bytes}
    with connect(rank, pipe, **options) as context:
        step(context)
    pipe.send([one for one in held() if one not in before])
    with connect(rank, pipe, **options) as context:
        pipe.send("joined")
        while not (fault := fault_of(lambda: step(context)))[0]:
            pass
        pipe.send(fault)
        pipe.send(fault_of(context.check))


@DEVICES
@pytest.mark.parametrize(("ranks", "victim"), [(2, 0), (3, 1), (4, 3)])
def test_a_process_that_is_killed_is_named_and_one_that_ends_leaves_nothing(
    ranks: int, victim: int, device: str
) -> None:
    with Group(step_until_a_fault, ranks, device) as group:
        group.exchange_addresses()
        for rank in range(ranks):
            assert group.receive(rank) == []
        group.exchange_addresses()
        for rank in range(ranks):
            assert group.receive(rank) == "joined"
        group.kill(victim)
        for rank in set(range(ranks)) - {victim}:
            kind, message = group.receive(rank)
            assert kind == "PeerDiedError" and f"rank {victim} died" in message, (kind, message)
            kind, message = group.receive(rank)
            assert kind == "ContextPoisonedError" and f"rank {victim} died" in message, (kind, message)
