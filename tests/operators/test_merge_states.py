"""Attention over parts of the keys is merged into attention over all of them, with its gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import distca
from support.batches import Batch, random_batch
from support.groups import loopback_group, on_all_ranks
from support.oracle import NAMES, oracle


def _states(parts: int, dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parts of rows of which the last sees nothing at all, and the one before nothing in the first part."""
    generator = torch.Generator().manual_seed(parts)
    outs = [torch.randn(6, 2, 8, generator=generator).to(dtype) for _ in range(parts)]
    lses = [torch.randn(6, 2, generator=generator) for _ in range(parts)]
    for number, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        hidden = slice(5 if number else 4, 6)
        out[hidden], lse[hidden] = 0.0, -math.inf
    return outs, lses


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_weigh_as_their_log_sum_exps_say(parts: int) -> None:
    outs, lses = _states(parts)
    out, lse = distca.merge_states(outs, lses)
    weights = torch.stack(lses).double().exp()
    expected = (weights[..., None] * torch.stack(outs)).sum(0) / weights.sum(0)[..., None]
    rows = slice(5 if parts > 1 else 4)
    torch.testing.assert_close(out[rows].double(), expected[rows], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), weights.sum(0).log(), rtol=1e-6, atol=1e-6)
    assert not out[5].any() and (lse[5] == -math.inf).all()


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_gradients_are_those_of_finite_differences_and_zero_where_nothing_is_seen(parts: int) -> None:
    outs, lses = ([t.requires_grad_() for t in of] for of in _states(parts))
    out, lse = distca.merge_states(outs, lses)
    (out.pow(2).sum() + lse[:4].pow(3).sum()).backward()
    for number, (o, s) in enumerate(zip(outs, lses, strict=True)):
        assert o.grad is not None and s.grad is not None
        assert o.grad.isfinite().all() and s.grad.isfinite().all()
        hidden = slice(5 if number else 4, 6)
        assert not o.grad[hidden].any() and not s.grad[hidden].any()

    def of_rows(*states: torch.Tensor) -> torch.Tensor:
        weights = torch.stack(states[parts:]).exp()
        merged = (weights[..., None] * torch.stack(states[:parts])).sum(0) / weights.sum(0)[..., None]
        return merged.pow(2).sum() + weights.sum(0).log().pow(3).sum()

    exact = [t.detach()[:4].double().requires_grad_() for t in (*outs, *lses)]
    of_rows(*exact).backward()
    for mine, right in zip((*outs, *lses), exact, strict=True):
        torch.testing.assert_close(mine.grad[:4].double(), right.grad, rtol=1e-4, atol=1e-5)


def test_what_a_part_leaves_in_rows_that_it_hides_has_no_effect_and_what_is_nan_stays_nan() -> None:
    outs, lses = _states(2)
    expected = distca.merge_states(outs, lses)
    outs[0][4:], outs[1][5:] = math.nan, math.inf
    assert all(torch.equal(a, b) for a, b in zip(distca.merge_states(outs, lses), expected, strict=True))
    lses[0][0], outs[1][1] = math.nan, math.nan
    out, lse = distca.merge_states(outs, lses)
    assert out[:2].isnan().all() and lse[0].isnan().all()
    assert torch.equal(out[2:], expected[0][2:]) and torch.equal(lse[1:], expected[1][1:])


def test_the_dtype_of_the_parts_is_kept_and_compiled_code_gives_the_same() -> None:
    outs, lses = _states(3, torch.bfloat16)
    out, lse = distca.merge_states(outs, lses)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    compiled = torch.compile(distca.merge_states, fullgraph=True, backend="aot_eager")(outs, lses)
    assert torch.equal(compiled[0], out) and torch.equal(compiled[1], lse)


def _all_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every row to all keys, by plain operators."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->ihj", q, k) * q.shape[2] ** -0.5
    return torch.einsum("ihj,jhd->ihd", scores.softmax(2), v), scores.logsumexp(2)


def test_the_later_rows_of_a_document_see_its_first_keys_by_another_attention() -> None:
    """The others they see causally, over ranks, of which one has rows of padding."""
    heads, length, first = distca.Heads(4, 2, 16), 160, 60
    batch = random_batch((length,), heads, 3)
    plan = distca.plan(
        distca.Layout([[(0, 0, 30), (distca.PADDING, 0, 5)], [(0, 30, 100)]]), heads, tolerance=0.0, min_rows=1
    )

    def work(rank: int, context: distca.Context) -> list[torch.Tensor]:
        rows, padding = (slice(first, first + 30), 5) if rank == 0 else (slice(first + 30, length), 0)
        leaves = [t[rows].clone().requires_grad_() for t in (batch.q, batch.k, batch.v)]
        keys = [t[:first].clone().requires_grad_() for t in (batch.k, batch.v)]
        padded = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, padding)) for t in leaves]
        outs, lses = zip(
            distca.core_attention(*padded, plan.for_rank(rank), context=context),
            [torch.nn.functional.pad(t, [0] * (2 * t.dim() - 1) + [padding], value=fill)
             for t, fill in zip(_all_of(leaves[0], *keys), (0.0, -math.inf), strict=True)],
            strict=True,
        )  # fmt: skip
        out, lse = distca.merge_states(outs, lses)
        out.backward(torch.nn.functional.pad(batch.dout[rows], (0, 0, 0, 0, 0, padding), value=1.0))
        end = rows.stop - rows.start
        return [out[:end].detach(), lse[:end].detach(), *(t.grad for t in leaves), *(t.grad for t in keys)]

    with loopback_group(plan) as contexts:
        ranks = on_all_ranks(contexts, work)
    dout = batch.dout.clone()
    dout[:first] = 0.0
    exact = oracle(Batch(**{**vars(batch), "dout": dout}))
    ours = [torch.cat(parts) for parts in zip(*(of_rank[:5] for of_rank in ranks), strict=True)]
    for name, mine, right in zip(NAMES, ours, exact, strict=True):
        torch.testing.assert_close(mine.double(), right[first:], rtol=1e-5, atol=1e-5, msg=name)
    for mine, right in zip((a + b for a, b in zip(ranks[0][5:], ranks[1][5:], strict=True)), exact[3:], strict=True):
        torch.testing.assert_close(mine.double(), right[:first], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("outs", "lses", "said"),
    [
        ([], [], "0 outs and 0 lses"),
        ([torch.zeros(3, 2, 8)], [], "1 outs and 0 lses"),
        ([torch.zeros(3, 2, 8)], [torch.zeros(2, 3)], r"lse torch.float32 \[2, 3\]"),
        ([torch.zeros(3, 2, 8)], [torch.zeros(3, 2).double()], "lse torch.float64"),
        ([torch.zeros(3, 2, 8), torch.zeros(3, 1, 8)], [torch.zeros(3, 2), torch.zeros(3, 1)], r"an out is .*3, 1, 8"),
        ([torch.zeros(3, 2, 8), torch.zeros(3, 2, 8).bfloat16()], 2 * [torch.zeros(3, 2)], "an out is torch.bfloat16"),
        ([None], [torch.zeros(3, 2)], "a part is a NoneType"),
    ],
    ids=["no parts", "a part without lse", "heads first", "float64", "other heads", "another dtype", "no tensor"],
)
def test_parts_that_do_not_go_together_are_refused(outs: Any, lses: Any, said: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=said):
        distca.merge_states(outs, lses)
