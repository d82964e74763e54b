"""transport="torch" over gloo: the results of loopback bit for bit, on all ranks or some, and who uses it."""

from __future__ import annotations

import random
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distca
from distca.connect import init as connecting
from support.batches import LAYOUTS, random_batch, random_tasks
from support.groups import loopback_group, on_all_ranks, run_step
from support.plan_reader import read_slice
from support.processes import HEADS, fault_of, plan_for, tensors_for
from support.torch_ranks import join, over_torch, torch_group

STEPS = 30
LENGTHS = (1, 2, 17, 63, 64, 65, 130)


# ---- the same results


def bits(tensors: tuple[torch.Tensor, ...]) -> list[bytes]:
    return [one.contiguous().view(torch.uint8).numpy().tobytes() for one in tensors]


def random_step(seed: int, ranks: int) -> tuple[Any, distca.Plan]:
    """A batch and a plan of it, which depend on the seed alone. Half of the plans give ranges of heads to random
    servers.
    """
    rng = random.Random(f"{seed}/{ranks}")
    dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
    heads = distca.Heads(4, 2, rng.choice([8, 16]), rng.choice([None, 24]), dtype)
    lengths = [rng.choice(LENGTHS) for _ in range(rng.randrange(1, 6))]
    layout = LAYOUTS[rng.choice(list(LAYOUTS))](lengths, ranks, rng.randrange(1000))
    mask, window = rng.choice([("causal", None), ("causal", 40), ("full", None), ("full", 40)])
    tasks = random_tasks(layout, heads.kv, rng.randrange(1000)) if rng.random() < 0.5 else None
    retain = rng.choice([0, 5000, 2**40])  # test_retain.py tests what this must give
    plan = distca.plan(
        layout,
        heads,
        mask=mask,
        window=window,
        tolerance=0.0,
        min_rows=1,
        tasks=tasks,
        retain_bytes=retain,
        round_bytes=rng.choice([1, None]),
    )
    return random_batch(lengths, heads, seed), plan


def num_rounds(plan: distca.Plan) -> list[int]:
    return [read_slice(plan.for_rank(rank).tensor.tolist()).header.num_rounds for rank in range(plan.layout.num_ranks)]


def take_steps(rank: int, ranks: int, pipe: Connection, port: int) -> None:
    join(rank, ranks, port)
    steps = [random_step(seed, ranks) for seed in range(STEPS)]
    with over_torch(heap_bytes=2 * max(plan.stats.slot_bytes for _, plan in steps)) as context:
        assert context.transport == "torch"
        for batch, plan in steps:
            pipe.send(bits(run_step(batch, plan, context)))
        assert context.step == 2 * STEPS
    pipe.recv()


@pytest.mark.parametrize("ranks", [2, 3])
def test_30_steps_of_changing_plans_give_what_loopback_gives_bit_for_bit(ranks: int) -> None:
    steps = [random_step(seed, ranks) for seed in range(STEPS)]
    assert any(0 in (plan.layout.num_rows(rank) for rank in range(ranks)) for _, plan in steps)
    if ranks > 2:  # some rank is done with its gradients while others have a round left
        assert any(min(rounds) < max(rounds) for rounds in (num_rounds(plan) for _, plan in steps))
    with torch_group(take_steps, ranks) as group:
        found = [[group.receive(rank) for rank in range(ranks)] for _ in steps]
        group.tell("end")
    for seed, (batch, plan) in enumerate(steps):
        with loopback_group(plan) as contexts:
            expected = on_all_ranks(
                contexts, lambda rank, context, batch=batch, plan=plan: bits(run_step(batch, plan, context))
            )
        for rank in range(ranks):
            for name, one, other in zip(
                ("out", "lse", "dq", "dk", "dv"), found[seed][rank], expected[rank], strict=True
            ):
                assert one == other, f"{name} of rank {rank} in step {seed}"


def serve_or_call(rank: int, ranks: int, pipe: Connection, port: int) -> None:
    join(rank, ranks, port)
    batch, plan = served_step()
    with over_torch(heap_bytes=1 << 22) as context:
        for _ in range(2):
            if rank < 2:
                pipe.send(bits(run_step(batch, plan, context)))
                continue
            for phase in ("forward", "backward"):
                distca.serve(plan.for_rank(rank), phase)
    pipe.recv()


def served_step() -> tuple[Any, distca.Plan]:
    lengths = (130, 70, 3)
    layout = distca.Layout([[(0, 0, 130)], [(1, 0, 70), (2, 0, 3)], []])
    return random_batch(lengths, HEADS, 5), distca.plan(layout, HEADS, servers=[2])


def test_a_rank_without_rows_serves_the_others() -> None:
    batch, plan = served_step()

    def work(rank: int, context: distca.Context) -> list[bytes]:
        if rank < 2:
            return bits(run_step(batch, plan, context))
        for phase in ("forward", "backward"):
            distca.serve(plan.for_rank(rank), phase, context=context)
        return []

    with loopback_group(plan) as contexts:
        expected = on_all_ranks(contexts, work)
    with torch_group(serve_or_call, 3) as group:
        for rank in (0, 1, 0, 1):
            assert group.receive(rank) == expected[rank]
        group.tell("end")


# ---- groups of ranks


def choose(rank: int, ranks: int, pipe: Connection, port: int) -> None:
    join(rank, ranks, port)
    chosen = []
    gather = connecting.gather_text
    for far in (False, True):
        # This makes every rank seem to run on its own host: it changes the part of an address that names the host.
        connecting.gather_text = lambda text, group, timeout, far=far: [
            "/".join([parts[0], parts[1] + str(i) * far, *parts[2:]]) if len(parts := one.split("/")) > 2 else one
            for i, one in enumerate(gather(text, group, timeout))
        ]
        with distca.init(max_tokens=96, heads=HEADS, timeout=20.0) as context:
            plan = plan_for(ranks, rank)
            q, k, v, dout = tensors_for(plan)
            distca.core_attention(q, k, v, plan)[0].backward(dout)
            chosen.append(context.transport)
    pipe.send(chosen)
    pipe.recv()


def test_auto_takes_shared_memory_on_one_host_and_torch_between_hosts() -> None:
    with torch_group(choose, 2) as group:
        assert [group.receive(rank) for rank in range(2)] == [["shm", "torch"]] * 2
        group.tell("end")


def join_part(rank: int, ranks: int, pipe: Connection, port: int) -> None:
    """Ranks 0 and 2 have a group of their own, whose contexts come and go."""
    join(rank, ranks, port)
    pair = dist.new_group([0, 2])
    if rank != 1:
        for _ in range(3):
            with over_torch(group=pair, heap_bytes=1 << 20) as context:
                plan = plan_for(2, context.rank)
                q, k, v, dout = tensors_for(plan)
                distca.core_attention(q, k, v, plan)[0].backward(dout)
                assert (context.num_ranks, context.step) == (2, 2)
    pipe.send("done")
    pipe.recv()


def test_some_of_the_ranks_make_contexts_of_their_own_one_after_another() -> None:
    with torch_group(join_part, 3) as group:
        assert [group.receive(rank) for rank in range(3)] == ["done"] * 3
        group.tell("end")


def join_with(rank: int, ranks: int, pipe: Connection, port: int) -> None:
    join(rank, ranks, port)
    pipe.send(fault_of(lambda: over_torch(heap_bytes=1 << (20 + rank))))
    pipe.recv()


def test_ranks_with_heaps_of_different_sizes_are_all_told_the_sizes() -> None:
    with torch_group(join_with, 2) as group:
        for rank in range(2):
            kind, message = group.receive(rank)
            told = f"rank 0 has slot_bytes = {1 << 19}, rank 1 has {1 << 20}" in message
            assert (kind, told) == ("InvalidArgumentError", True), message
        group.tell("end")


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    with pytest.raises(
        distca.InvalidArgumentError, match="transport 'torch' .* call torch.distributed.init_process_gr"
    ):
        distca.init(transport="torch", max_tokens=1, heads=HEADS)


def leave_in_good_order() -> int:
    """Takes a step and ends. One rank closes its context, and the other leaves that to the interpreter."""
    plan = plan_for(dist.get_world_size(), dist.get_rank())
    context = over_torch(heap_bytes=1 << 20)
    q, k, v, dout = tensors_for(plan)
    distca.core_attention(q, k, v, plan)[0].backward(dout)
    if dist.get_rank() == 0:
        context.close()
    return context.step


def test_processes_end_in_good_order() -> None:
    assert distca.launch(leave_in_good_order, ranks=2, threads=1) == [2, 2]
