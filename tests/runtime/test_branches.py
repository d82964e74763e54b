"""Documents that share their first rows: steps of plans with branches."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import distca
from support.batches import Batch, random_batch, random_ranges, random_tasks
from support.branches import Tree, attention_of_tree, own_rows, random_tree
from support.groups import compute, loopback_group, on_all_ranks, run_step, together
from support.oracle import NAMES, ErrorPool
from support.plan_reader import read_slice

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


def of_own_rows(batch: Batch, tree: Tree, results: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    mine = own_rows(batch, tree)
    return [one[mine] for one in results]


def whole_documents(batch: Batch, tree: Tree) -> Batch:
    """The batch with shared rows in their places, so that each document could be computed by itself."""
    whole = Batch(batch.lengths, batch.heads, *(t.clone() for t in (batch.q, batch.k, batch.v, batch.dout)))
    for document in tree.branches:
        at = batch.offsets[document]
        for owner, rows in tree.path(document):
            for to, source in ((whole.q, batch.q), (whole.k, batch.k), (whole.v, batch.v)):
                start = batch.offsets[owner]
                to[at : at + len(rows)] = source[start + rows.start : start + rows.stop]
            at += len(rows)
    return whole


def plans_of(tree: Tree, heads: distca.Heads, seed: int, **options: Any) -> list[distca.Plan]:
    """Plans of everything that a plan can be asked for, for 1 to 4 ranks."""
    layouts = [tree.layout(ranks, seed + ranks) for ranks in (1, 2, 3, 4)]
    ranges = options.pop("bidirectional", {})
    layouts = [layout.with_bidirectional(ranges) for layout in layouts]
    return [
        distca.plan(layouts[0], heads, **options),
        distca.plan(layouts[1], heads, tolerance=0.0, min_rows=1, retain_bytes=2**40, **options),
        distca.plan(layouts[2], heads, tasks=random_tasks(layouts[2], heads.kv, seed), round_bytes=1, **options),
        distca.plan(layouts[3], heads, tolerance=0.0, min_rows=1, servers=[1, 3], ranks_per_node=2, **options),
        distca.plan(layouts[3], heads, balance=False, overlap=True, **options),
    ]


@DTYPES
@pytest.mark.parametrize("window", [None, 1, 70])
def test_branches_are_as_exact_as_pytorch_and_have_the_bits_of_whole_documents(
    window: int | None, dtype: torch.dtype
) -> None:
    heads = distca.Heads(4, 2, 32, dtype=dtype)
    pool = ErrorPool(dtype)
    for seed in range(3, 9):
        tree = random_tree(seed)
        batch = random_batch(tree.lengths, heads, seed)
        ranges = random_ranges(tree.lengths, seed, [rows.start for rows in tree.own]) if seed == 5 else {}
        masks: dict[str, Any] = {"window": window, "bidirectional": ranges}
        alone = distca.Layout.from_documents([tree.lengths]).with_bidirectional(ranges)
        right = compute(whole_documents(batch, tree), distca.plan(alone, heads, window=window))
        theirs = attention_of_tree(batch, tree, dtype, fused=True, **masks)
        exact = attention_of_tree(batch, tree, torch.float64, **masks)
        for plan in plans_of(tree, heads, seed, **masks):
            ours = of_own_rows(batch, tree, compute(batch, plan, reorder_seed=seed))
            for name, a, b in zip(NAMES, ours, of_own_rows(batch, tree, right), strict=True):
                if name in ("out", "lse", "dq"):
                    assert torch.equal(a, b), name
            pool.add(ours, theirs, exact)
    pool.check()


@DTYPES
def test_a_branch_of_a_branch_sees_all_that_its_path_has_under_the_full_mask(dtype: torch.dtype) -> None:
    heads, pool = distca.Heads(4, 2, 32, dtype=dtype), ErrorPool(dtype)
    tree = Tree([100, 130, 190, 164], [range(0, 100), range(64, 130), range(129, 190), range(100, 164)],
                {1: 0, 2: 1, 3: 0})  # fmt: skip
    for seed in range(3):
        batch = random_batch(tree.lengths, heads, seed)
        theirs = attention_of_tree(batch, tree, dtype, fused=True, mask="full")
        exact = attention_of_tree(batch, tree, torch.float64, mask="full")
        for plan in plans_of(tree, heads, seed, mask="full"):
            pool.add(of_own_rows(batch, tree, compute(batch, plan)), theirs, exact)
    pool.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_many_branches_in_the_dtype_of_the_heads_are_near_those_in_fp32(dtype: torch.dtype) -> None:
    """A prompt of 65 rows with twelve answers on three ranks: each of its keys has up to thirteen contributions."""
    heads = distca.Heads(2, 1, 16, dtype=dtype)
    own = [range(0, 65), *(range(65, 65 + n) for n in range(10, 130, 10))]
    tree = Tree([rows.stop for rows in own], own, dict.fromkeys(range(1, 13), 0))
    batch, layout = random_batch(tree.lengths, heads, 1), tree.layout(3, 1)
    results = [
        of_own_rows(batch, tree, compute(batch, distca.plan(layout, heads, tolerance=0.0, reduce_dtype=dtype)))
        for dtype in (torch.float32, dtype)
    ]
    for name, wide, narrow in zip(NAMES, *results, strict=True):
        if name in ("out", "lse", "dq"):
            assert torch.equal(wide, narrow)
            continue
        unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
        assert not torch.equal(wide, narrow)
        assert (wide.float() - narrow.float()).abs().max() <= 8 * unit * wide.float().abs().max()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@DTYPES
def test_rows_of_one_branch_do_not_touch_another(dtype: torch.dtype, poison: float) -> None:
    heads = distca.Heads(2, 1, 16, dtype=dtype)
    tree = Tree(
        [70, 100, 140, 160], [range(0, 70), range(70, 100), range(50, 140), range(100, 160)], {1: 0, 2: 0, 3: 1}
    )
    batch = random_batch(tree.lengths, heads, 2)
    for plan in plans_of(tree, heads, 2):
        clean = compute(batch, plan)
        for document in (1, 2):  # a branch that has one in turn, and one that leaves a part of the prompt
            touched = {1: {1, 3}, 2: {2}}[document]
            poisoned = Batch(batch.lengths, heads, *(t.clone() for t in (batch.q, batch.k, batch.v, batch.dout)))
            begin, end = (batch.offsets[document] + n for n in (tree.own[document].start, tree.own[document].stop))
            for tensor in (poisoned.q, poisoned.k, poisoned.v, poisoned.dout):
                tensor[begin:end] = poison
            found = compute(poisoned, plan)
            for other in set(range(4)) - touched:
                rows = slice(*(batch.offsets[other] + n for n in (tree.own[other].start, tree.own[other].stop)))
                for name, a, b in zip(NAMES, clean, found, strict=True):
                    if name in ("out", "lse", "dq") or other not in (0, 1):
                        assert torch.equal(a[rows], b[rows]), (name, document, other)
            left = slice(batch.offsets[0] + 50, batch.offsets[0] + 70)  # rows of the prompt that document 2 has not
            for name, a, b in zip(NAMES, clean, found, strict=True):
                assert document == 1 or torch.equal(a[left], b[left]), name


def test_one_step_may_have_branches_and_the_next_one_none() -> None:
    """The same contexts run plans with and without branches in turn, whole and in two halves."""
    heads = distca.Heads(2, 1, 16)
    trees = [random_tree(seed, 5) for seed in (11, 12)]
    trees.insert(1, Tree([100, 50], [range(0, 100), range(0, 50)], {}))
    plans = [distca.plan(tree.layout(2, 4), heads, tolerance=0.0, min_rows=1) for tree in trees]
    batches = [random_batch(tree.lengths, heads, 4) for tree in trees]
    with loopback_group(plans) as contexts:
        for batch, plan, tree in list(zip(batches, plans, trees, strict=True)) * 2:
            results = on_all_ranks(contexts, lambda rank, context: run_step(batch, plan, context))  # noqa: B023
            ours = of_own_rows(batch, tree, together(batch.lengths, plan.layout, results))
            for name, a, b in zip(NAMES, ours, attention_of_tree(batch, tree, torch.float64), strict=True):
                torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("answers", [2, 40])
@pytest.mark.parametrize("prompt", [256, 250])
def test_a_prompt_takes_memory_and_travels_once_however_many_answers_it_has(prompt: int, answers: int) -> None:
    """At home, and at a server that computes all of them. What is left of the prompt's last block of 64 keys is
    assembled with own rows for each answer.
    """
    heads = distca.Heads(2, 1, 16, dtype=torch.bfloat16)
    segments = [(0, 0, prompt), *((d, prompt, prompt + 8) for d in range(1, answers + 1))]
    layout = distca.Layout([segments, []], branches=dict.fromkeys(range(1, answers + 1), 0))
    narrow, wide = (16 + 16) * 2, (16 + 16) * 4  # bytes of the key and value of a row, and of their gradients in fp32
    at_home = distca.plan(layout, heads, balance=False).stats.arena_bytes["backward"]
    cut = 64 * (prompt % 64 != 0)  # rows of a block that an answer has to itself
    assert [(a.scratch, a.server_in) for a in at_home] == [(wide * prompt, narrow * cut * answers), (0, 0)]
    tasks = [(0, 0, prompt, 0, 1, 0), *((d, prompt, prompt + 8, 0, 1, 1) for d in range(1, answers + 1))]
    stats = distca.plan(layout, heads, tasks=tasks).stats
    own = narrow * 8 * answers
    assert stats.arena_bytes["backward"][1].scratch == wide * prompt + own
    whole = prompt // 64 * 64
    queries = 2 * 16 * 2 * 8 * answers
    assert stats.bytes["forward_in"] == narrow * (whole + (prompt - whole) * answers) + own + queries
    # The prompt's gradients come home once, in fp32.
    assert stats.bytes["backward_out"] == wide * prompt + own + queries


def test_the_tables_of_a_plan_grow_with_its_branches_and_not_with_their_square() -> None:
    """Two ranks share a document and its blocks; or one has a prompt, and the other an answer from each of its rows."""
    heads = distca.Heads(2, 1, 16)

    def gradients_of(layout: distca.Layout, **options: Any) -> int:
        plan = distca.plan(layout, heads, **options)
        return max(len(read_slice(plan.for_rank(rank).tensor.tolist()).grads) for rank in range(2))

    for n in (256, 1024):
        blocks = distca.Layout.head_tail([4 * n], ranks=2).block_diffusion(4)
        assert gradients_of(blocks, round_bytes=1) <= 8 * n
        answers = [(1 + row, row + 1, row + 9) for row in range(n)]
        tree = distca.Layout([[(0, 0, n)], answers], branches={1 + row: 0 for row in range(n)})
        assert gradients_of(tree, balance=False) <= 4 * n


def test_a_server_that_computes_answers_to_a_prompt_gets_more_of_them() -> None:
    """Answers that a rank lets go of go where their prompt's keys are. If each went wherever there is room, 463 MB of
    this layout's rows would travel forward.
    """
    draw, segments, branches = random.Random(1), [], {}
    for rank in range(8):
        prompt, root = draw.randint(1000, 16000), 17 * rank
        segments.append([(root, 0, prompt)])
        for answer in range(root + 1, root + 17):
            segments[-1].append((answer, prompt, prompt + draw.randint(100, 1500)))
            branches[answer] = root
    plan = distca.plan(distca.Layout(segments, branches=branches), distca.Heads(32, 8, 128, dtype=torch.bfloat16))
    assert max(plan.stats.load) <= 1.051 * sum(plan.stats.load) / 8
    assert plan.stats.bytes["forward_in"] < 0.42e9


def test_backward_s_plan_must_have_the_branches_of_forward_s() -> None:
    heads = distca.Heads(2, 1, 16)
    segments = [[(0, 0, 8), (1, 0, 8), (2, 5, 9)]]
    plans = [
        distca.plan(distca.Layout(segments, branches={2: parent}), heads, label="a step").for_rank(0)
        for parent in (0, 1)
    ]
    q, k = torch.randn(20, 2, 16), torch.randn(20, 1, 16)
    with loopback_group(plans) as [context]:
        distca.core_attention(q, k, k, plans[0], plan_backward=plans[0], context=context)
        with pytest.raises(distca.InvalidArgumentError, match="of another layout"):
            distca.core_attention(q, k, k, plans[0], plan_backward=plans[1], context=context)


def test_random_trees_are_exact_with_whatever_a_plan_is_asked_for() -> None:
    for seed in range(40):
        draw = random.Random(seed)
        heads = draw.choice([distca.Heads(4, 2, 16, 24), distca.Heads(3, 3, 8)])
        tree = random_tree(seed, draw.randint(2, 6))
        mask, window = draw.choice([("causal", None), ("causal", None), ("causal", 50), ("full", None), ("full", 50)])
        plan = distca.plan(
            tree.layout(draw.randint(1, 5), seed),
            heads,
            mask=mask,
            window=window,
            tolerance=draw.choice([0.0, 0.05]),
            min_rows=draw.choice([1, 64]),
            split_heads=draw.random() < 0.7,
            retain_bytes=draw.choice([0, 20_000, 2**40]),
            ranks_per_node=draw.choice([None, 2]),
            round_bytes=draw.choice([1, 3000, 2**20]),
        )
        batch = random_batch(tree.lengths, heads, seed)
        ours = of_own_rows(batch, tree, compute(batch, plan))
        right = attention_of_tree(batch, tree, torch.float64, mask=mask, window=window)
        for name, a, b in zip(NAMES, ours, right, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4, msg=f"seed {seed}: {name}")


def test_keys_that_documents_share_come_once_and_are_not_retained() -> None:
    heads = distca.Heads(2, 1, 16)
    answers = [(answer, 400, 410) for answer in (1, 2, 3)]
    layout = distca.Layout([[(0, 0, 400), *answers], [(4, 0, 200)]], branches={1: 0, 2: 0, 3: 0})
    plain, retaining = (
        distca.plan(layout, heads, tasks=random_tasks(layout, heads.kv, 1), retain_bytes=most) for most in (0, 2**40)
    )
    saved = plain.stats.bytes["backward_in"] - retaining.stats.bytes["backward_in"]
    assert saved == retaining.stats.saved_bytes > 0
    assert plain.stats.bytes["forward_in"] == retaining.stats.bytes["forward_in"]
