"""Many steps on one context: changing plans, backwards that never come, two micro-batches in flight, in any order.

Arenas, returned tensors and the inputs' padding rows are filled with NaN before every step.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import distca
from support.batches import LAYOUTS, Batch, random_batch, random_tasks, rows_of_rank, spill
from support.groups import compute, loopback_group, on_all_ranks, together
from support.oracle import NAMES, ErrorPool, oracle, torch_attention

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
RANKS = 3


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    batch: Batch
    plan: distca.Plan


class Rank:
    """One rank's side of a script of forwards and backwards."""

    def __init__(self, rank: int, context: distca.Context, micro_batches: list[MicroBatch]) -> None:
        self.rank, self.context, self.micro_batches = rank, context, micro_batches
        self.in_flight: dict[int, tuple[torch.Tensor, ...]] = {}
        self.results: dict[int, list[torch.Tensor]] = {}

    def forward(self, index: int) -> None:
        micro = self.micro_batches[index]
        q, k, v = (
            rows_of_rank(micro.batch, micro.plan.layout, self.rank, t).requires_grad_()
            for t in (micro.batch.q, micro.batch.k, micro.batch.v)
        )
        out, lse = distca.core_attention(q, k, v, micro.plan.for_rank(self.rank), context=self.context)
        self.in_flight[index] = (out, q, k, v)
        self.results[index] = [out.detach(), lse]

    def backward(self, index: int) -> None:
        micro = self.micro_batches[index]
        out, q, k, v = self.in_flight.pop(index)
        out.backward(rows_of_rank(micro.batch, micro.plan.layout, self.rank, micro.batch.dout))
        assert q.grad is not None and k.grad is not None and v.grad is not None
        self.results[index] += [q.grad, k.grad, v.grad]

    def skip(self, index: int) -> None:
        del self.in_flight[index]


def _random_micro_batch(rng: random.Random, heads: distca.Heads) -> MicroBatch:
    lengths = [rng.choice((1, 2, 3, 17, 63, 64, 65, 90)) for _ in range(rng.randrange(1, 6))]
    layout = LAYOUTS[rng.choice(list(LAYOUTS))](lengths, RANKS, rng.randrange(1000))
    plan = distca.plan(
        layout,
        heads,
        tolerance=rng.choice((0.0, 0.05, 0.5)),
        min_rows=rng.choice((1, 16, 64)),
        balance=rng.random() < 0.9,
        tasks=random_tasks(layout, heads.kv, rng.randrange(1000)) if rng.random() < 0.3 else None,
        round_bytes=rng.choice((1, None)),
    )
    return MicroBatch(random_batch(lengths, heads, rng.randrange(10**6)), plan)


def _random_script(rng: random.Random, steps: int) -> list[tuple[str, int]]:
    """A list of (action, micro-batch). At most two micro-batches are in flight, and a backward may be skipped."""
    script: list[tuple[str, int]] = []
    in_flight: list[int] = []
    forwards = 0
    while sum(action != "skip" for action, _ in script) < steps:
        if len(in_flight) < 2 and rng.random() < 0.6:
            script.append(("forward", forwards))
            in_flight.append(forwards)
            forwards += 1
        elif in_flight:
            index = in_flight.pop(rng.randrange(len(in_flight)))
            script.append(("skip" if rng.random() < 0.15 else "backward", index))
    return script


@DTYPES
def test_200_random_steps_of_changing_plans_are_each_right(dtype: torch.dtype) -> None:
    _random_steps(dtype, 200, reorder_seed=7)


def test_100_random_steps_that_are_queued_on_streams_are_each_right() -> None:
    _random_steps(torch.float32, 100, streams=True)


def _random_steps(dtype: torch.dtype, steps: int, **options: Any) -> None:
    seed = 7
    rng = random.Random(seed)
    heads = distca.Heads(4, 2, 16, 24, dtype)
    script = _random_script(rng, steps)
    assert any(action == "skip" for action, _ in script)
    micro_batches = [_random_micro_batch(rng, heads) for action, _ in script if action == "forward"]

    def run(rank: int, context: distca.Context) -> Rank:
        side = Rank(rank, context, micro_batches)
        actions: dict[str, Callable[[int], None]] = {
            "forward": side.forward, "backward": side.backward, "skip": side.skip
        }  # fmt: skip
        for action, index in script:
            actions[action](index)
        assert context.step == steps
        return side

    with loopback_group([micro.plan for micro in micro_batches], **options) as contexts:
        ranks = on_all_ranks(contexts, run)

    rounding = {torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    pool = ErrorPool(dtype)
    for index, micro in enumerate(micro_batches):
        reference = oracle(micro.batch)
        results = [side.results[index] for side in ranks]
        ours = together(micro.batch.lengths, micro.plan.layout, results)
        for name, a, b in zip(NAMES, ours, reference, strict=False):
            torch.testing.assert_close(
                a.double(), b, rtol=rounding, atol=rounding * max(1.0, b.abs().max().item()),
                msg=lambda text, name=name, index=index: f"seed {seed}, micro-batch {index}, {name}: {text}",
            )  # fmt: skip
        if len(ours) == len(NAMES):
            pool.add(ours, torch_attention(micro.batch), reference)
    pool.check()


@DTYPES
def test_two_micro_batches_in_flight_give_what_each_gives_alone(dtype: torch.dtype) -> None:
    heads = distca.Heads(2, 1, 16, None, dtype)
    micro_batches = [
        MicroBatch(random_batch(lengths, heads, seed), distca.plan(spill(lengths, RANKS), heads, tolerance=0.0))
        for seed, lengths in enumerate([(200, 1, 30), (5, 77, 140)])
    ]
    alone = [compute(micro.batch, micro.plan) for micro in micro_batches]
    for order in ((0, 1), (1, 0)):
        with loopback_group([micro.plan for micro in micro_batches], reorder_seed=1) as contexts:

            def run(rank: int, context: distca.Context, order: tuple[int, int] = order) -> Rank:
                side = Rank(rank, context, micro_batches)
                side.forward(0)
                side.forward(1)
                side.backward(order[0])
                side.backward(order[1])
                return side

            ranks = on_all_ranks(contexts, run)
        for index, micro in enumerate(micro_batches):
            ours = together(micro.batch.lengths, micro.plan.layout, [side.results[index] for side in ranks])
            for name, a, b in zip(NAMES, ours, alone[index], strict=True):
                assert torch.equal(a, b), f"{name} of micro-batch {index}, backwards in the order {order}"


def test_two_groups_at_work_at_once_do_not_touch_each_other() -> None:
    """Every rank has two contexts, as with two models or two tensor-parallel groups; steps alternate between them."""
    shapes = [distca.Heads(4, 2, 16), distca.Heads(2, 2, 8, 24, torch.bfloat16)]
    lengths = (150, 3, 64)
    micro_batches = [
        MicroBatch(random_batch(lengths, heads, 3), distca.plan(spill(lengths, RANKS), heads, tolerance=0.0))
        for heads in shapes
    ]
    alone = [compute(micro.batch, micro.plan) for micro in micro_batches]
    with loopback_group(micro_batches[0].plan) as first, loopback_group(micro_batches[1].plan) as second:

        def run(rank: int, context: distca.Context) -> list[Rank]:
            sides = [Rank(rank, context, micro_batches), Rank(rank, second[rank], micro_batches)]
            for _ in range(3):
                for index in (0, 1):
                    sides[index].forward(index)
                for index in (0, 1):
                    sides[index].backward(index)
            return sides

        ranks = on_all_ranks(first, run)
    for index in (0, 1):
        ours = together(lengths, micro_batches[index].plan.layout, [sides[index].results[index] for sides in ranks])
        for name, a, b in zip(NAMES, ours, alone[index], strict=True):
            assert torch.equal(a, b), f"{name} of group {index}"


def test_backward_may_run_another_plan_of_the_same_layout() -> None:
    heads = distca.Heads(4, 2, 16)
    batch = random_batch((170, 9, 64), heads, 5)
    layout = spill(batch.lengths, RANKS)
    forward, backward = distca.plan(layout, heads, balance=False), distca.plan(layout, heads, tolerance=0.0, min_rows=1)
    assert forward.digest != backward.digest

    def run(rank: int, context: distca.Context) -> tuple[torch.Tensor, ...]:
        q, k, v = (rows_of_rank(batch, layout, rank, t).requires_grad_() for t in (batch.q, batch.k, batch.v))
        out, lse = distca.core_attention(
            q, k, v, forward.for_rank(rank), plan_backward=backward.for_rank(rank), context=context
        )
        out.backward(rows_of_rank(batch, layout, rank, batch.dout))
        return out.detach(), lse, q.grad, k.grad, v.grad

    with loopback_group([forward, backward]) as contexts:
        ours = together(batch.lengths, layout, on_all_ranks(contexts, run))
    # Key gradients are added in the order of the backward plan, so they equal its own to the last bit.
    for name, a, b in zip(NAMES, ours, compute(batch, backward), strict=True):
        assert torch.equal(a, b), name
