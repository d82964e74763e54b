"""Operations of distca's operators, as PyTorch's FlopCounterMode counts them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import distca
from support.batches import random_batch
from support.groups import loopback_group, on_all_ranks
from support.oracle import visible

HEADS = distca.Heads(4, 2, 16, 24)


def pairs_of(lengths: list[int], mask: str = "causal", window: int | None = None) -> int:
    return sum(int(visible(length, mask, window, ()).sum()) for length in lengths)


def counted(call: FlopCounterMode) -> dict[str, int]:
    return {
        str(op).removeprefix("distca."): n for op, n in call.get_flop_counts()["Global"].items() if "distca" in str(op)
    }


@pytest.mark.parametrize(("mask", "window"), [("causal", None), ("causal", 30), ("full", None), ("full", 30)])
@pytest.mark.parametrize("in_parts", [False, True])
def test_what_all_ranks_compute_is_the_visible_pairs(mask: str, window: int | None, in_parts: bool) -> None:
    lengths = [100, 7, 64]
    layout = distca.Layout([[(0, 0, 60)], [(0, 60, 100), (1, 0, 7)], [(2, 0, 64)]])
    plan = distca.plan(layout, HEADS, mask=mask, window=window, tolerance=0.0, min_rows=1)
    batch = random_batch(lengths, HEADS, 1)

    def work(rank: int, context: distca.Context) -> dict[str, int]:
        rows = torch.cat([torch.arange(begin, end) + batch.offsets[d] for d, begin, end in layout.segments(rank)])
        q, k, v = (t[rows].requires_grad_() for t in (batch.q, batch.k, batch.v))
        mine = plan.for_rank(rank)
        with FlopCounterMode(display=False) as counter:
            if in_parts:
                step = distca.dispatch(q, k, v, mine, context=context)
                distca.attend(step)
                out, _ = distca.collect(step)
            else:
                out, _ = distca.core_attention(q, k, v, mine, context=context)
            out.backward(batch.dout[rows])
        return counted(counter)

    with loopback_group(plan) as contexts:
        found = on_all_ranks(contexts, work, threads=1)
    pairs = 4 * pairs_of(lengths, mask, window)
    names = ("dispatch", "dispatch_backward") if in_parts else ("core_attention", "core_attention_backward")
    assert [set(of_rank) for of_rank in found] == [set(names)] * 3
    assert sum(of_rank[names[0]] for of_rank in found) == pairs * 2 * (16 + 24)
    assert sum(of_rank[names[1]] for of_rank in found) == pairs * 2 * (3 * 16 + 2 * 24)
    assert [of_rank[names[0]] for of_rank in found] == [load * 2 * (16 + 24) for load in plan.stats.load]


def test_rows_that_see_each_other_and_rows_of_others_count() -> None:
    layout = distca.Layout([[(0, 0, 10), (1, 10, 14)]], branches={1: 0}).with_bidirectional({0: [(2, 6)]})
    plan, heads = distca.plan(layout, HEADS), HEADS
    q, k, v = (torch.randn(14, n, dim) for n, dim in ((heads.q, 16), (heads.kv, 16), (heads.kv, 24)))
    with loopback_group(plan) as [context], FlopCounterMode(display=False) as counter:
        distca.core_attention(q, k, v, plan.for_rank(0), context=context, max_logits=True)
    pairs = 55 + (3 + 2 + 1) + 11 + 12 + 13 + 14
    assert counted(counter) == {"core_attention_all": 4 * pairs * 2 * (16 + 24)}


def test_local_attention_counts_as_much_as_pytorch_s_does_under_the_full_mask() -> None:
    q, k, v = (torch.randn(50, 4, 16, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as ours:
        distca.attention(q, k, v, mask="full")[0].sum().backward()
    with FlopCounterMode(display=False) as theirs:
        F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v))).sum().backward()
    assert ours.get_total_flops() > 0
    if theirs.get_total_flops() > 0:  # PyTorch has no formula of its CPU kernel in every version
        assert ours.get_total_flops() == theirs.get_total_flops()
    assert counted(ours) == {"attention": 4 * 2500 * 4 * 16, "attention_backward": 4 * 2500 * 10 * 16}


def test_local_attention_counts_what_its_tasks_see() -> None:
    tasks = torch.tensor([[0, 5, 0, 5], [5, 9, 5, 12]])  # the second one has queries for the last four of its keys
    q, k, v = torch.randn(9, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 24)
    of_rows = {
        ("causal", None): 15 + 4 + 5 + 6 + 7,
        ("causal", 2): 1 + 2 * 4 + 2 * 4,
        ("full", None): 5 * 5 + 4 * 7,
        ("full", 2): 2 + 3 + 3 + 3 + 2 + 3 + 3 + 3 + 2,
    }
    for (mask, window), pairs in of_rows.items():
        with FlopCounterMode(display=False) as counter:
            distca.attention(q, k, v, tasks, mask=mask, window=window)
        assert counted(counter) == {"attention": 4 * pairs * 2 * (16 + 24)}


def test_meta_tensors_count_and_a_plan_that_is_fake_does_not() -> None:
    plan = distca.plan(distca.Layout.from_documents([[30]]), HEADS, rank=0)
    shapes = [(30, 4, 16), (30, 2, 16), (30, 2, 24)]
    with FlopCounterMode(display=False) as counter:
        torch.ops.distca.core_attention(*(torch.empty(shape, device="meta") for shape in shapes), plan.tensor)
    assert counted(counter) == {"core_attention": 4 * 465 * 2 * (16 + 24)}
    with FakeTensorMode() as mode, FlopCounterMode(display=False) as counter:
        fake = mode.from_tensor(plan.tensor)
        torch.ops.distca.core_attention(*(torch.empty(shape) for shape in shapes), fake)
    assert counted(counter) in ({}, {"core_attention": 0})
