"""Softcap and sinks of the local kernel, and values at the limits of the number formats."""

from __future__ import annotations

import math

import pytest
import torch

import distca
from support.batches import Batch, random_batch
from support.local_tasks import whole_documents
from support.oracle import NAMES, oracle
from support.score_features import check_features, eager_attention, random_sinks, with_ours

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
FEATURES = {"softcap": (5.0, False), "sinks": (0.0, True), "both": (3.0, True)}


@DTYPES
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("shape", [(8, 2, 64, None), (6, 2, 24, 40)], ids=str)
def test_softcap_and_sinks_are_as_exact_as_pytorch(
    shape: tuple[int, int, int, int | None], feature: str, dtype: torch.dtype
) -> None:
    check_features(distca.Heads(*shape, dtype=dtype), *FEATURES[feature])


@DTYPES
def test_softcap_and_sinks_give_the_same_bits_whatever_the_tasks_and_the_threads(dtype: torch.dtype) -> None:
    batch = random_batch((300, 97), distca.Heads(4, 2, 24, dtype=dtype), 1)
    sinks = random_sinks(4, 1)
    torch.set_num_threads(1)
    whole = with_ours(batch, whole_documents(batch.lengths), 7.0, sinks)
    cuts = [0, 1, 63, 64, 130, 201, 300]
    tasks = [[b, e, 0, e] for b, e in zip(cuts, cuts[1:], strict=False)] + [[300, 333, 300, 333], [333, 397, 300, 397]]
    torch.set_num_threads(3)
    pieces = with_ours(batch, torch.tensor(tasks[::-1]), 7.0, sinks)
    for name, a, b in zip((*NAMES, "dsinks"), pieces, whole, strict=True):
        if name not in ("dk", "dv"):  # tasks decide the order in which sums over query rows are formed
            assert torch.equal(a, b), name


def test_a_negative_scale_goes_together_with_a_softcap() -> None:
    batch = random_batch((70,), distca.Heads(2, 1, 16), 2)
    ours = with_ours(batch, whole_documents(batch.lengths), 2.0, None, scale=-0.4)
    for name, a, b in zip(NAMES, ours, eager_attention(batch, torch.float64, 2.0, None, scale=-0.4), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_sinks_may_lie_apart() -> None:
    batch = random_batch((70,), distca.Heads(4, 2, 16), 3)
    apart = torch.randn(4, 3)[:, 1].requires_grad_()
    together = apart.detach().clone().requires_grad_()
    for sinks in (apart, together):
        distca.attention(batch.q, batch.k, batch.v, None, sinks)[0].backward(batch.dout)
    assert apart.grad is not None and together.grad is not None
    assert torch.equal(apart.grad, together.grad)


@pytest.mark.parametrize("sink", [-math.inf, -1e4, 1e4])
def test_a_sink_of_any_size_takes_nothing_or_all(sink: float) -> None:
    batch = random_batch((70,), distca.Heads(2, 1, 16), 3)
    tasks = whole_documents(batch.lengths)
    with_sink = with_ours(batch, tasks, 0.0, torch.full((2,), sink))
    if sink < 0:
        for name, a, b in zip(NAMES, with_sink, with_ours(batch, tasks, 0.0, None), strict=False):
            assert torch.equal(a, b), name
    else:
        assert (with_sink[1] == sink).all()
        assert all((t == 0).all() for t in (with_sink[0], *with_sink[2:]))


def test_rows_of_no_task_give_a_sink_nothing() -> None:
    batch = random_batch((40, 30), distca.Heads(2, 1, 16), 4)
    batch.q[40:] = math.nan
    got = with_ours(batch, whole_documents((40,)), 0.0, random_sinks(2, 4))
    alone = Batch((40,), batch.heads, batch.q[:40], batch.k[:40], batch.v[:40], batch.dout[:40])
    torch.testing.assert_close(
        got[5].double(), eager_attention(alone, torch.float64, 0.0, random_sinks(2, 4))[5], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [({"softcap": -1.0}, "softcap = -1"), ({"softcap": math.nan}, "softcap"), ({"sinks": torch.zeros(3)}, "[3]")],
    ids=["negative", "nan", "shape"],
)
def test_a_softcap_or_sinks_that_make_no_sense_are_refused(options: dict[str, object], said: str) -> None:
    batch = random_batch((8,), distca.Heads(2, 1, 8), 5)
    with pytest.raises(distca.InvalidArgumentError) as caught:
        distca.attention(batch.q, batch.k, batch.v, **options)
    assert said in str(caught.value)


# ---- values at the ends ----


@DTYPES
def test_keys_with_a_score_of_minus_infinity_take_no_part(dtype: torch.dtype) -> None:
    """Rows that see no other key do not become NaN either: their out is 0 and their lse -inf."""
    batch = random_batch((150,), distca.Heads(2, 1, 16, dtype=dtype), 6)
    batch.q[..., 0] = 1.0
    hidden = torch.zeros(150, dtype=torch.bool)
    hidden[[0, 1, 2, 64, 70, 71, 149]] = True
    batch.k[hidden, :, 0] = -math.inf
    out, lse = distca.attention(batch.q, batch.k, batch.v)
    assert (out[:3] == 0).all() and (lse[:3] == -math.inf).all()
    # A row that sees all keys up to its own attends to those that are not NaN.
    q, k, v = (t.double() for t in (batch.q[148:149], batch.k[:149][~hidden[:149]], batch.v[:149][~hidden[:149]]))
    probs = torch.softmax(torch.einsum("ihd,jgd->hij", q, k) / 4, dim=2)
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        out[148:149].double(), torch.einsum("hij,jgd->ihd", probs, v), rtol=rounding, atol=rounding
    )


@DTYPES
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_logits_of_ten_thousand_overflow_nothing(sign: float, dtype: torch.dtype) -> None:
    batch = random_batch((130,), distca.Heads(2, 1, 16, dtype=dtype), 7)
    batch.q[...] = sign * 100.0
    batch.k[...] = 25.0 * (1 + torch.arange(130) % 2)[:, None, None]  # the logits are 1e4 and 2e4
    for name, a, b in zip(NAMES, with_ours(batch, whole_documents((130,)), 0.0, None), oracle(batch), strict=True):
        assert a.isfinite().all(), name
        if name in ("out", "lse", "dv"):
            # The log-sum-exp that backward gets is rounded, by 2e4 * 2^-24; dv has that error too.
            rounding = 2e-2 if dtype == torch.bfloat16 else 2e-3 if name == "dv" else 1e-5
            torch.testing.assert_close(a.double(), b, rtol=rounding, atol=rounding)


@DTYPES
def test_subnormal_numbers_are_numbers_or_nothing(dtype: torch.dtype) -> None:
    batch = random_batch((70,), distca.Heads(2, 1, 16, dtype=dtype), 8)
    small = Batch(batch.lengths, batch.heads, *(t * 1e-39 for t in (batch.q, batch.k, batch.v, batch.dout)))
    for name, a, b in zip(NAMES, with_ours(small, whole_documents((70,)), 0.0, None), oracle(small), strict=True):
        # The kernel may treat a subnormal operand as zero.
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-37, msg=lambda text, name=name: f"{name}: {text}")


def _by_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in which each row takes the keys that it sees and no others, not even times zero."""
    rows = []
    for i in range(len(q)):
        scores = torch.einsum("hd,jhd->hj", q[i], k[: i + 1]) * q.shape[-1] ** -0.5
        rows.append(torch.einsum("hj,jhd->hd", torch.softmax(scores, dim=1), v[: i + 1]))
    return torch.stack(rows)


@DTYPES
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("broken", ["q", "k", "v"])
@pytest.mark.parametrize("row", [5, 70])
def test_what_is_not_finite_reaches_exactly_the_results_and_gradients_that_depend_on_it(
    row: int, broken: str, value: float, dtype: torch.dtype
) -> None:
    batch = random_batch((140,), distca.Heads(2, 2, 16, dtype=dtype), 8)
    getattr(batch, broken)[row] = value
    inputs = [t.double().requires_grad_() for t in (batch.q, batch.k, batch.v)]
    _by_row(*inputs).backward(batch.dout.double())
    ours = with_ours(batch, whole_documents((140,)), 0.0, None)
    expected = [_by_row(batch.q.double(), batch.k.double(), batch.v.double()), *(t.grad for t in inputs)]
    for name, a, b in zip(("out", "dq", "dk", "dv"), (ours[0], *ours[2:5]), expected, strict=True):
        assert torch.equal(a.isfinite().all(dim=2), b.isfinite().all(dim=2)), name
