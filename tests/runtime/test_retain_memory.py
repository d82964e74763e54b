"""The autograd graph of a layer holds what servers retain for it, also where the layer is recomputed or compiled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import distca
from support.batches import LENGTHS, Batch, random_batch, rows_of_rank, spill
from support.groups import loopback_group, on_all_ranks
from support.retaining import ALL, HEADS, plan_of


@contextmanager
def recorded_saves() -> Iterator[list[torch.Tensor]]:
    """Collects the uint8 tensors that autograd saves. They come back as unaligned copies."""
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
    """The out of two layers, the second of which has the first's out as queries, and the gradients of q, k and v."""
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
            if operator is torch.ops.distca.core_attention_all.default:
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
    assert counter.frame_count <= 2 * len(contexts)  # torch takes sizes as constants in the first graph only
