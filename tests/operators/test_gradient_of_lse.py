"""A loss of lse has exact gradients: in one process and over ranks, in every form of a step, compiled, and recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import distca
from support import flash_on_cpu
from support.batches import LENGTHS, NAN, Batch, random_batch, random_tasks, rows_of_rank, scattered
from support.groups import loopback_group, on_all_ranks, outcomes, together
from support.local_tasks import whole_documents
from support.oracle import NAMES, ErrorPool
from support.recorded import tensors_of
from support.score_features import eager_attention, random_sinks

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _dlse_of(batch: Batch, seed: int = 0) -> torch.Tensor:
    """A gradient of lse, [rows, heads]."""
    return 3 * torch.randn(sum(batch.lengths), batch.heads.q, generator=torch.Generator().manual_seed(seed + 50))


# ---- in one process


def _local(
    batch: Batch, dlse: torch.Tensor, softcap: float = 0.0, sinks: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, ...]:
    """The out, lse, dq, dk, dv and, if there are sinks, their gradient."""
    leaves = [t.clone().requires_grad_() for t in (batch.q, batch.k, batch.v, *([] if sinks is None else [sinks]))]
    out, lse = distca.attention(*leaves[:3], whole_documents(batch.lengths), *leaves[3:], softcap=softcap, **options)
    torch.autograd.backward([out, lse], [batch.dout, dlse])
    return out.detach(), lse.detach(), *(t.grad for t in leaves)


@DTYPES
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), (0.0, True), (4.0, True)])
def test_gradients_are_as_exact_as_pytorch(dtype: torch.dtype, softcap: float, with_sinks: bool) -> None:
    heads = distca.Heads(8, 2, 24, 40, dtype)
    pool = ErrorPool(dtype)
    for seed in (1, 2):
        batch = random_batch(LENGTHS, heads, seed)
        dlse, sinks = _dlse_of(batch, seed), random_sinks(heads.q, seed) if with_sinks else None
        ours = _local(batch, dlse, softcap, sinks)
        exact = eager_attention(batch, torch.float64, softcap, sinks, dlse=dlse)
        pool.add(ours[:5], eager_attention(batch, dtype, softcap, sinks, dlse=dlse)[:5], exact[:5])
        if with_sinks:
            rounding = 2e-6 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(ours[5].double(), exact[5], rtol=rounding, atol=20 * rounding)
    pool.check(1.5 if dtype == torch.float32 else 1.1)  # score_features.py says why


@pytest.mark.parametrize(
    "form",
    [
        lambda dlse: dlse.T.contiguous().T,
        lambda dlse: dlse.repeat_interleave(3, dim=1)[:, ::3],
        lambda dlse: dlse.flip(0).contiguous().flip(0),
        lambda dlse: torch._neg_view(-dlse),
    ],
    ids=["by heads", "with gaps", "flipped twice", "negative view"],
)
def test_a_gradient_of_any_strides_gives_the_same_bits(form: Callable[[torch.Tensor], torch.Tensor]) -> None:
    batch = random_batch((70, 1, 33), distca.Heads(4, 2, 16), 3)
    dlse = _dlse_of(batch)
    assert torch.equal(form(dlse), dlse)
    for a, b in zip(_local(batch, form(dlse)), _local(batch, dlse), strict=True):
        assert torch.equal(a, b)


def test_the_gradient_of_a_sum_is_one_value_for_all_rows() -> None:
    batch = random_batch((70, 1, 33), distca.Heads(4, 2, 16), 3)
    leaves = [t.clone().requires_grad_() for t in (batch.q, batch.k, batch.v)]
    out, lse = distca.attention(*leaves, whole_documents(batch.lengths))
    (lse.sum() + (out * batch.dout).sum()).backward()
    expected = _local(batch, torch.ones_like(lse))
    assert all(torch.equal(a.grad, b) for a, b in zip(leaves, expected[2:], strict=True))


def test_a_loss_of_lse_alone_moves_queries_and_keys_and_no_value() -> None:
    batch, sinks = random_batch((70, 33), distca.Heads(4, 2, 16), 4), random_sinks(4, 4)
    dlse = _dlse_of(batch)
    q, k, v, s = (t.clone().requires_grad_() for t in (batch.q, batch.k, batch.v, sinks))
    _, lse = distca.attention(q, k, v, whole_documents(batch.lengths), s)
    lse.backward(dlse)
    alone = Batch(**{**vars(batch), "dout": torch.zeros_like(batch.dout)})
    exact = eager_attention(alone, torch.float64, 0.0, sinks, dlse=dlse)
    for mine, right in zip((q.grad, k.grad, v.grad, s.grad), exact[2:], strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-5)
    assert not v.grad.any()


def test_a_row_of_no_task_takes_no_gradient_whatever_it_is() -> None:
    """Where results are merged by lse, rows that see nothing there have gradients that are NaN."""
    q, k, v = (torch.randn(20, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.zeros(4, requires_grad=True)
    _, lse = distca.attention(q, k, v, torch.tensor([[0, 8, 0, 8]]), sinks)
    dlse = torch.ones_like(lse)
    dlse[8:] = NAN
    lse.backward(dlse)
    for t in (q, k, v, sinks):
        assert t.grad is not None and t.grad.isfinite().all() and not t.grad[8:].any()
    assert q.grad is not None and q.grad[1:8].any()


def test_attention_over_two_halves_of_the_keys_that_are_merged_by_lse_is_attention_over_all_of_them() -> None:
    """What lse is for. The query is the last row of each half, and so sees all of it."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(n, heads, 16, generator=generator) for n, heads in ((1, 4), (64, 2), (64, 2)))

    def gradients(attend: Attention) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out, lse = attend(*leaves)
        (out.pow(2).sum() + lse.pow(2).sum()).backward()
        return [out, lse, *(t.grad for t in leaves)]

    def merged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outs, lses = zip(*(distca.attention(q, k[s], v[s]) for s in (slice(0, 24), slice(24, None))), strict=True)
        lse = torch.logaddexp(*lses)
        return sum(out * (one - lse).exp()[..., None] for out, one in zip(outs, lses, strict=True)), lse

    for a, b in zip(gradients(merged), gradients(distca.attention), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# ---- over ranks


def _whole(q: Any, k: Any, v: Any, plan: distca.Plan, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return distca.core_attention(q, k, v, plan, **options)


def _in_parts(q: Any, k: Any, v: Any, plan: distca.Plan, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return distca.core_attention(q, k, v, plan.for_parts(), **options)


def _checkpointed(q: Any, k: Any, v: Any, plan: distca.Plan, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return checkpoint(lambda *qkv: _whole(*qkv, plan, **options), q, k, v, use_reentrant=False)


def _saved(q: Any, k: Any, v: Any, plan: distca.Plan, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    attend = lambda *qkv: _whole(*qkv, plan, **options)  # noqa: E731
    return checkpoint(attend, q, k, v, use_reentrant=False, context_fn=distca.save_core_attention)


def _with_another_plan(q: Any, k: Any, v: Any, plan: distca.Plan, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    other = distca.plan(plan.layout, plan.heads, mask=plan.mask, window=plan.window, balance=False)
    return _whole(q, k, v, plan, plan_backward=other.for_rank(plan.rank), **options)


def _by_the_operator(q: Any, k: Any, v: Any, plan: distca.Plan, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator as graphs differentiate it. torch.compile itself is not for several threads of a process."""
    return torch.ops.distca.core_attention(
        q, k, v, plan.tensor, sinks=options["sinks"], context=options["context"].name, softcap=options["softcap"]
    )


FORMS: dict[str, Attention] = {
    "whole": _whole,
    "in parts": _in_parts,
    "checkpointed": _checkpointed,
    "checkpointed but for attention": _saved,
    "another plan backward": _with_another_plan,
    "the operator": _by_the_operator,
}


def _over_ranks(
    batch: Batch, plan: distca.Plan, dlse: torch.Tensor, sinks: torch.Tensor, form: Attention = _whole, **options: Any
) -> tuple[torch.Tensor, ...]:
    """The out, lse, dq, dk and dv in document order, and the sum of the ranks' gradients of their sinks. Gradients of
    rows of padding are NaN.
    """

    def work(rank: int, context: distca.Context) -> Any:
        q, k, v, dout, of_lse = (
            rows_of_rank(batch, plan.layout, rank, t) for t in (batch.q, batch.k, batch.v, batch.dout, dlse)
        )
        leaves = [t.requires_grad_() for t in (q, k, v, sinks.clone())]
        out, lse = form(*leaves[:3], plan.for_rank(rank), sinks=leaves[3], context=context, softcap=5.0)
        torch.autograd.backward([out, lse], [dout, of_lse])
        return (out.detach(), lse.detach(), *(t.grad for t in leaves[:3])), leaves[3].grad

    with loopback_group(plan, **options) as contexts:
        results = on_all_ranks(contexts, work)
        for context in contexts:
            context.check()
    whole = together(batch.lengths, plan.layout, [tensors for tensors, _ in results])
    return *whole, sum(gradient for _, gradient in results)


@pytest.fixture(scope="module")
def heads() -> distca.Heads:
    return distca.Heads(4, 2, 16, 24)


@pytest.fixture(scope="module")
def batch(heads: distca.Heads) -> Batch:
    return random_batch(LENGTHS, heads, 7)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("streams", [False, True], ids=["host", "queued"])
def test_every_form_of_a_step_gives_the_bits_of_attention_in_one_process(
    batch: Batch, heads: distca.Heads, form: str, streams: bool
) -> None:
    sinks, dlse, layout = random_sinks(heads.q, 7), _dlse_of(batch), scattered(LENGTHS, 3, 7)
    plan = distca.plan(layout, heads, tasks=random_tasks(layout, heads.kv, 7))
    ours = _over_ranks(batch, plan, dlse, sinks, FORMS[form], streams=streams)
    right = _local(batch, dlse, 5.0, sinks)
    for name, mine, one in zip((*NAMES, "sinks"), ours, right, strict=True):
        if name in ("dk", "dv", "sinks"):  # the order of their sums is the plan's
            torch.testing.assert_close(mine, one, rtol=1e-5, atol=1e-5, msg=name)
        else:
            assert torch.equal(mine, one), name


@pytest.mark.parametrize("retain", [False, True], ids=["", "retained"])
@pytest.mark.parametrize(("mask", "window"), [("causal", None), ("causal", 40), ("full", None), ("full", 40)], ids=str)
def test_every_mask_has_exact_gradients(
    batch: Batch, heads: distca.Heads, mask: str, window: int | None, retain: bool
) -> None:
    sinks, dlse, layout = random_sinks(heads.q, 7), _dlse_of(batch), scattered(LENGTHS, 3, 7)
    options: dict[str, Any] = {"retain_bytes": 2**20} if retain else {}
    plan = distca.plan(layout, heads, mask=mask, window=window, tolerance=0.0, min_rows=1, **options)
    ours = _over_ranks(batch, plan, dlse, sinks)
    exact = eager_attention(batch, torch.float64, 5.0, sinks, dlse=dlse, mask=mask, window=window)
    for name, mine, right in zip((*NAMES, "sinks"), ours, exact, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=2e-5, msg=lambda t, name=name: f"{name}: {t}")


def test_ranks_need_not_agree_on_whether_lse_has_a_gradient(batch: Batch, heads: distca.Heads) -> None:
    layout = distca.Layout.packed(LENGTHS, ranks=3, tokens_per_rank=-(-sum(LENGTHS) // 3))
    plan, dlse = distca.plan(layout, heads, tolerance=0.0, min_rows=1), _dlse_of(batch)

    def work(rank: int, context: distca.Context) -> Any:
        tensors = (rows_of_rank(batch, layout, rank, t) for t in (batch.q, batch.k, batch.v, batch.dout, dlse))
        q, k, v, dout, of_lse = (t.nan_to_num() for t in tensors)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out, lse = distca.core_attention(*leaves, plan.for_rank(rank), context=context)
        given = {0: ([out], [dout]), 1: ([lse], [of_lse]), 2: ([out, lse], [dout, of_lse])}[rank]
        torch.autograd.backward(*given)
        return out.detach(), lse.detach(), *(t.grad for t in leaves)

    with loopback_group(plan) as contexts:
        ours = together(LENGTHS, layout, on_all_ranks(contexts, work))
    dout_of_ranks, dlse_of_ranks = (
        together(LENGTHS, layout, [(x if rank != absent else torch.zeros_like(x),) for rank, x in enumerate(of)])[0]
        for absent, of in (
            (1, [rows_of_rank(batch, layout, rank, batch.dout).nan_to_num() for rank in range(3)]),
            (0, [rows_of_rank(batch, layout, rank, dlse).nan_to_num() for rank in range(3)]),
        )
    )
    asked = Batch(**{**vars(batch), "dout": dout_of_ranks})
    exact = eager_attention(asked, torch.float64, 0.0, None, dlse=dlse_of_ranks)
    for name, mine, right in zip(NAMES, ours, exact, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=2e-5, msg=lambda t, name=name: f"{name}: {t}")


def test_a_replay_reads_the_gradient_of_lse_anew(heads: distca.Heads) -> None:
    layout = distca.Layout.packed([100, 28], ranks=2, tokens_per_rank=64)
    plan = distca.plan(layout, heads, tolerance=0.0, min_rows=1)

    def work(rank: int, context: distca.Context, recorded: bool) -> list[torch.Tensor]:
        q, k, v, dout = tensors_of(3, rank, heads)
        dlse, results = torch.zeros(64, heads.q), []

        def step() -> tuple[torch.Tensor, ...]:
            out, lse = distca.core_attention(q, k, v, plan.for_rank(rank), context=context)
            return torch.autograd.grad([out, lse], [q, k, v], [dout, dlse])

        if recorded:
            with context.record(headroom=4.0, rounds=8) as recording:
                grads = step()
        for turn in range(3):
            dlse.copy_(torch.randn(64, heads.q, generator=torch.Generator().manual_seed(10 * turn + rank)))
            if recorded:
                recording.replan(plan.for_rank(rank))
                recording.replay()
            else:
                grads = step()
            results += [one.clone() for one in grads]
        return results

    with loopback_group(plan, streams=True, timeout=5.0) as contexts:
        mine = on_all_ranks(contexts, lambda rank, context: work(rank, context, recorded=True))
    with loopback_group(plan) as contexts:
        right = on_all_ranks(contexts, lambda rank, context: work(rank, context, recorded=False))
    for of_rank, expected in zip(mine, right, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(of_rank, expected, strict=True))


# ---- compiled


@pytest.fixture
def alone(heads: distca.Heads) -> Iterator[distca.Plan]:
    with distca.init(max_tokens=104, heads=heads):
        yield distca.plan(distca.Layout.from_documents([[70, 1, 33]]), heads)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("uses_lse", [False, True], ids=["returned", "used"])
def test_compiled_code_may_return_lse(alone: distca.Plan, backend: str, uses_lse: bool) -> None:
    batch, sinks = random_batch((70, 1, 33), alone.heads, 5), random_sinks(4, 5)

    def layer(q: Any, k: Any, v: Any, sinks: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = distca.core_attention(q, k, v, alone, sinks=sinks)
        return 2 * out, lse

    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        leaves = [t.clone().requires_grad_() for t in (batch.q, batch.k, batch.v, sinks)]
        out, lse = function(*leaves)
        ((out * batch.dout).sum() + (lse.pow(2).sum() if uses_lse else 0)).backward()
        results.append([out, lse, *(t.grad for t in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---- mistakes, and attention that takes no gradient of lse


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda dlse: dlse.bfloat16(), "dlse has shape .*; a float32 tensor"),
        (lambda dlse: dlse[1:], "dlse has shape .*, and lse"),
        (lambda dlse: dlse.T, "dlse has shape .*, and lse"),
        (lambda dlse: dlse[..., None], "dlse has shape .*; a float32 tensor"),
        (lambda dlse: dlse.to("meta"), "another input is on meta"),
    ],
    ids=["dtype", "rows", "transposed", "dims", "meta"],
)
def test_a_gradient_of_another_shape_is_refused(alone: distca.Plan, change: Any, said: str) -> None:
    batch = random_batch((70, 1, 33), alone.heads, 5)
    rows = batch.q, batch.k, batch.v
    out, lse = distca.core_attention(*rows, alone)
    dlse = change(torch.zeros_like(lse))
    operators = torch.ops.distca
    tasks = whole_documents(batch.lengths)
    for operator, table in ((operators.core_attention_backward, alone.tensor), (operators.attention_backward, tasks)):
        with pytest.raises(Exception, match=said):
            operator(batch.dout, *rows, out, lse, table, dlse=dlse)
    if not dlse.is_meta:
        with pytest.raises(Exception, match=said):
            operators.sink_gradient(batch.dout, out, lse, torch.zeros(4), dlse)


def _by_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return distca.attention(q, k, v, attention="flash")


def test_pytorch_s_flash_attention_takes_no_gradient_of_lse_but_zeros() -> None:
    flash_on_cpu.register()
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(40, n, 32, generator=generator).bfloat16().requires_grad_() for n in (4, 2, 2)]
    dout = torch.ones(40, 4, 32, dtype=torch.bfloat16)
    for attend in (_by_flash, lambda *qkv: torch.ops.distca.attention_by_flash(*qkv, torch.tensor([[0, 40, 0, 40]]))):
        out, lse = attend(*rows)
        plain = torch.autograd.grad(out, rows, dout, retain_graph=True)
        zeros = torch.autograd.grad([out, lse], rows, [dout, torch.zeros_like(lse)], retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(plain, zeros, strict=True))
        for value in (1.0, NAN):
            with pytest.raises(Exception, match="the gradient of lse needs distca's own kernels"):
                torch.autograd.grad([out, lse], rows, [dout, torch.full_like(lse, value)], retain_graph=True)


def test_ranks_whose_attention_is_pytorch_s_refuse_a_gradient_of_lse() -> None:
    flash_on_cpu.register()
    heads = distca.Heads(4, 2, 32, dtype=torch.bfloat16)
    plan = distca.plan(distca.Layout.from_documents([[100], [28]]), heads, tolerance=0.0, min_rows=1)
    batch = random_batch((100, 28), heads, 2)

    def work(rank: int, context: distca.Context, scale: float) -> Any:
        rows = [rows_of_rank(batch, plan.layout, rank, t).requires_grad_() for t in (batch.q, batch.k, batch.v)]
        out, lse = distca.core_attention(*rows, plan.for_rank(rank), context=context)
        return torch.autograd.grad([out.sum() + scale * lse.sum()], rows)

    with loopback_group(plan, attention="flash") as contexts:
        zeros = on_all_ranks(contexts, lambda rank, context: work(rank, context, 0.0))
        assert all(t.isfinite().all() for of_rank in zeros for t in of_rank)
        refusals = outcomes(contexts, lambda rank, context: work(rank, context, 1.0))
    assert all("the gradient of lse needs distca's own kernels" in str(error) for error in refusals), refusals


def test_the_gradient_of_sinks_by_aten_takes_that_of_lse() -> None:
    generator = torch.Generator().manual_seed(5)
    out, dout = torch.randn(2, 20, 4, 8, generator=generator)
    lse, dlse = torch.randn(2, 20, 4, generator=generator)
    sinks = torch.randn(4, generator=generator)
    out[7], lse[7], dlse[7] = 0.0, -math.inf, NAN
    expected = torch.ops.distca.sink_gradient(dout, out, lse, sinks, dlse)
    torch.testing.assert_close(torch.ops.distca.sink_gradient_by_aten(dout, out, lse, sinks, dlse), expected)
    assert expected.isfinite().all()
