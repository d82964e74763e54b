"""Layouts of block diffusion: documents, and the same rows once more, noised (Layout.block_diffusion)."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import distca
from support.batches import scattered
from support.groups import loopback_group, on_all_ranks

HEADS = distca.Heads(4, 2, 16, 24)


def kinds_of_rows(clean: distca.Layout, rank: int) -> list[tuple[int, int, bool]]:
    """Of each row of a rank: its document, its position there, and whether it is noised. Padding has document -1."""
    rows = [(document, row) for document, begin, end in clean.segments(rank) for row in range(begin, end)]
    return [(document, row, noised) for noised in (False, True) for document, row in rows]


def sees(x: tuple[int, int, bool], y: tuple[int, int, bool], rows: int) -> bool:
    """Whether a row sees another one: block-diagonal, offset block-causal, and block-causal (BD3-LM, section 3.1)."""
    block, other = x[1] // rows, y[1] // rows
    if x[0] != y[0] or x[0] < 0:
        return False
    if x[2] and y[2]:
        return block == other
    if x[2]:
        return other < block
    return not y[2] and other <= block


@pytest.mark.parametrize("rows", [1, 3, 16, 64, 500])
@pytest.mark.parametrize("ranks", [1, 3])
def test_attention_and_gradients_are_those_of_the_mask_of_block_diffusion(ranks: int, rows: int) -> None:
    lengths = [70, 1, 129, 64, 3]
    clean = scattered(lengths, ranks, rows)
    clean = distca.Layout([[*clean.segments(rank), (distca.PADDING, 0, rank + 1)] for rank in range(ranks)])
    layout = clean.block_diffusion(rows)
    plan = distca.plan(layout, HEADS, tolerance=0.0, min_rows=1)
    kinds = [kind for rank in range(ranks) for kind in kinds_of_rows(clean, rank)]
    mask = torch.tensor([[sees(x, y, rows) for y in kinds] for x in kinds])
    there = mask.any(1)
    generator = torch.Generator().manual_seed(rows)
    q, k, v, dout = (
        torch.randn(len(kinds), n, dim, generator=generator) for n, dim in ((4, 16), (2, 16), (2, 24), (4, 24))
    )

    def work(rank: int, context: distca.Context) -> list[torch.Tensor]:
        begin = sum(layout.num_rows(r) for r in range(rank))
        mine = slice(begin, begin + layout.num_rows(rank))
        leaves = [t[mine].clone().requires_grad_() for t in (q, k, v)]
        out, _ = distca.core_attention(*leaves, plan.for_rank(rank), context=context)
        out.backward(dout[mine])
        return [out.detach(), *(t.grad for t in leaves)]

    with loopback_group(plan) as contexts:
        found = [torch.cat(parts) for parts in zip(*on_all_ranks(contexts, work), strict=True)]
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    wide = [t[there].transpose(0, 1) for t in leaves]
    wide[1:] = [t.repeat_interleave(2, 0) for t in wide[1:]]
    right = F.scaled_dot_product_attention(*wide, attn_mask=mask[there][:, there]).transpose(0, 1)
    right.backward(dout[there].double())
    for a, b in zip(found, [right, *(t.grad[there] for t in leaves)], strict=True):
        torch.testing.assert_close(a[there].double(), b.detach(), rtol=1e-4, atol=1e-5)
        assert (a[~there] == 0).all()


def test_positions_of_noised_rows_are_those_of_their_document() -> None:
    clean = scattered([10, 7, 30], 3, 1)
    for rank in range(3):
        positions = clean.position_ids(rank)
        assert clean.block_diffusion(4).position_ids(rank).tolist() == torch.cat([positions, positions]).tolist()


def test_random_documents_have_the_pairs_of_the_mask() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        lengths, rows = [draw.randint(1, 90) for _ in range(draw.randint(1, 5))], draw.randint(1, 40)
        clean = scattered(lengths, 2, seed)
        kinds = [kind for rank in range(2) for kind in kinds_of_rows(clean, rank)]
        pairs = sum(sees(x, y, rows) for x in kinds for y in kinds)
        plan = distca.plan(clean.block_diffusion(rows), distca.Heads(1, 1, 8), cost=distca.CostModel(1, 0))
        assert sum(plan.stats.load_before) == pairs


def test_what_it_cannot_be_made_of_is_an_error() -> None:
    layout = distca.Layout.from_documents([[8]])
    for rows in (0, -1, 2.5, True, None):
        with pytest.raises(distca.InvalidArgumentError, match="blocks of"):
            layout.block_diffusion(rows)  # type: ignore[arg-type]
    with pytest.raises(distca.InvalidArgumentError, match="have rows that see later ones already"):
        layout.with_bidirectional({0: [(0, 2)]}).block_diffusion(2)
    with pytest.raises(distca.InvalidArgumentError, match="share rows already"):
        layout.block_diffusion(2).block_diffusion(2)


def test_halves_and_joined_layouts_keep_the_longest_document_of_the_whole_layout() -> None:
    """Some models scale their rotary embeddings by it."""
    layout = distca.Layout.from_documents([[100, 20, 30, 40]])
    for half in distca.halves(layout):
        assert half.layout.block_diffusion(8).longest_document == 100
    assert distca.Layout.join([(layout, [0])], num_ranks=1).block_diffusion(8).longest_document == 100


def test_plan_ahead_makes_it_of_what_ranks_tell() -> None:
    steps = distca.PlanAhead(
        [[5, 3]],
        heads=HEADS,
        layout=lambda lengths: distca.Layout.from_documents([lengths]),
        transform=lambda layout: layout.block_diffusion(2),
        rank=0,
    )
    with steps:
        [(_, plan)] = steps
    assert plan.layout.segments(0) == distca.Layout.from_documents([[5, 3]]).block_diffusion(2).segments(0)


def test_a_transform_that_is_none_is_an_error_that_names_it() -> None:
    def ahead(transform: object) -> distca.PlanAhead:
        return distca.PlanAhead(
            [[5, 3]], heads=HEADS, layout=lambda n: distca.Layout.from_documents([n]), transform=transform, rank=0
        )

    with pytest.raises(distca.InvalidArgumentError, match="transform is 5; a function"):
        ahead(5)
    with (
        ahead(lambda layout: None) as steps,
        pytest.raises(distca.InvalidArgumentError, match="transform returned a NoneType"),
    ):
        next(iter(steps))
