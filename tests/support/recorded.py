"""Steps that are recorded, and the same steps on the host."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

import distca
from support.batches import random_ranges
from support.branches import branched
from support.groups import loopback_group, on_all_ranks

RANKS, ROWS = 3, 64


HEADS = distca.Heads(4, 2, 16, 24)


Tensors = list[torch.Tensor]


def layout_of(seed: int, ranks: int = RANKS) -> distca.Layout:
    """A plan of documents that fill ROWS rows of each rank. If the seed is even, a few rows are padding; if it is a
    multiple of three, some rows see those after them; after a multiple of four, documents share rows.
    """
    draw = random.Random(seed)
    padding = 4 * (1 - seed % 2)
    left, lengths = ranks * (ROWS - padding), []
    while left:
        lengths.append(draw.randint(1, min(left, draw.choice([5, 40, 150]))))
        left -= lengths[-1]
    layout = distca.Layout.packed(lengths, ranks=ranks, tokens_per_rank=ROWS - padding)
    ranges = {} if seed % 3 else random_ranges(layout.document_lengths, seed)
    if seed % 4 == 1:
        return branched(layout, seed)
    if padding == 0:
        return layout.with_bidirectional(ranges)
    segments = [list(layout.segments(rank)) for rank in range(ranks)]
    for of_rank in segments:
        of_rank.insert(draw.randrange(len(of_rank) + 1), (distca.PADDING, 0, padding))
    return distca.Layout(segments).with_bidirectional(ranges)


def tensors_of(seed: int, rank: int, heads: distca.Heads = HEADS, rows: int = ROWS) -> Tensors:
    """The q, k and v, which need gradients, and the gradient of out."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    shapes = [(heads.q, heads.dim), (heads.kv, heads.dim), (heads.kv, heads.value_dim), (heads.q, heads.value_dim)]
    made = [torch.randn(rows, *shape, generator=generator).to(heads.dtype) for shape in shapes]
    return [one.requires_grad_(i < 3) for i, one in enumerate(made)]


def one_step(plan: distca.Plan, tensors: Tensors, context: distca.Context) -> Tensors:
    """Runs forward and backward and returns out, lse, dq, dk and dv."""
    q, k, v, dout = tensors
    out, lse = distca.core_attention(q, k, v, plan.for_rank(context.rank), context=context)
    return [out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout)]


def two_steps_in_parts(tensors: Sequence[Tensors], plan: distca.Plan, context: distca.Context) -> list[Tensors]:
    """Runs forward and backward of two steps that are under way at once. Returns out, lse, dq, dk and dv of each."""
    ops, name = torch.ops.distca, context.name
    steps = [ops.dispatch(*t[:3], plan.tensor, context=name) for t in tensors]
    for step in steps:
        ops.attend(step, context=name)
    forward = [ops.collect(step, context=name) for step in steps]
    steps = [
        ops.dispatch_backward(t[3], *t[:3], *result, plan.tensor, context=name)
        for t, result in zip(tensors, forward, strict=True)
    ]
    for step in steps:
        ops.attend(step, context=name)
    backward = [ops.collect_backward(step, context=name) for step in steps]
    return [[*f, *b] for f, b in zip(forward, backward, strict=True)]


def set_rows(tensors: Tensors, values: Tensors) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.data.copy_(value)


def on_the_host(plans: Sequence[distca.Plan], seeds: Sequence[int], heads: distca.Heads = HEADS) -> list[list[Tensors]]:
    """The results by rank and step."""
    with loopback_group(plans) as contexts:
        return on_all_ranks(
            contexts,
            lambda rank, context: [
                one_step(plan, tensors_of(seed, rank, heads), context) for plan, seed in zip(plans, seeds, strict=True)
            ],
        )


def assert_same(results: Sequence[Tensors], expected: Sequence[Tensors]) -> None:
    assert len(results) == len(expected) > 0
    for i, (mine, right) in enumerate(zip(results, expected, strict=True)):
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), mine, right, strict=True):
            assert torch.equal(a, b), f"step {i}: {name}"
            assert not a.isnan().any(), f"step {i}: {name}"
