"""The local kernel, `distca.attention`, over tasks in one process's tensors."""

from __future__ import annotations

import math

import pytest
import torch

import distca
from support.batches import LENGTHS, Batch, needle_batch, random_batch
from support.local_tasks import whole_documents
from support.oracle import NAMES, ErrorPool, oracle, torch_attention
from support.ranks import launch
from support.score_features import check_features

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
NAN = float("nan")
SHAPES = [
    *((8, 2, 64, None), (8, 1, 16, None), (5, 5, 24, 40), (8, 4, 8, 8), (4, 4, 256, 16), (6, 2, 16, 256)),
    *((4, 1, 512, None), (2, 2, 264, 8)),
]


def _compute(batch: Batch, tasks: torch.Tensor | None, scale: float | None = None) -> tuple[torch.Tensor, ...]:
    q, k, v = (t.clone().requires_grad_() for t in (batch.q, batch.k, batch.v))
    out, lse = distca.attention(q, k, v, tasks, scale=scale)
    out.backward(batch.dout)
    return out.detach(), lse, q.grad, k.grad, v.grad


def check_exactness(heads: distca.Heads) -> None:
    pool = ErrorPool(heads.dtype)
    for seed in range(-(-10_000 // (sum(LENGTHS) * heads.q))):
        batch = random_batch(LENGTHS, heads, seed)
        pool.add(_compute(batch, whole_documents(batch.lengths)), torch_attention(batch), oracle(batch))
    pool.check()


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_documents_are_as_exact_as_pytorch(shape: tuple[int, int, int, int | None], dtype: torch.dtype) -> None:
    check_exactness(distca.Heads(*shape, dtype=dtype))


def check_many_short_documents(dtype: torch.dtype) -> None:
    """Compares short documents, each of which one worker computes whole, with one at a time and one key/value head.

    One unit is too much for one of several workers. Its keys are packed first, and its rows are shared by the workers.
    """
    lengths = (1, 130, 64, 257, 31, 96, 300, 64)
    batch = random_batch((*lengths, 1500), distca.Heads(4, 2, 24, 40, dtype), 9)
    tasks = whole_documents(batch.lengths)
    cut = tasks[3].tolist()  # this one's rows are two tasks
    several = torch.cat([tasks, torch.tensor([[cut[0] + 70, cut[1], cut[0], cut[1]]])])
    several[3, 1], several[3, 3] = cut[0] + 70, cut[0] + 70
    together = _compute(batch, several)
    for begin, end, *_ in tasks.tolist():
        for kv_head in range(2):
            rows, heads = slice(begin, end), slice(2 * kv_head, 2 * kv_head + 2)
            out, lse = distca.attention(batch.q[rows, heads], batch.k[rows, [kv_head]], batch.v[rows, [kv_head]])
            assert torch.equal(together[0][rows, heads], out), (begin, end, kv_head)
            assert torch.equal(together[1][rows, heads], lse), (begin, end, kv_head)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_many_short_documents_give_bitwise_what_each_gives_alone(threads: int, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_many_short_documents(dtype)
    finally:
        torch.set_num_threads(before)


def _exact_or_why_not_here() -> str:
    try:
        distca.attention(*[torch.zeros(1, 1, 8)] * 3)
    except distca.InvalidArgumentError as error:
        return str(error)
    check_exactness(distca.Heads(16, 4, 8, 24))
    check_exactness(distca.Heads(16, 2, 24, 8, torch.bfloat16))
    check_exactness(distca.Heads(16, 2, 24, 8, torch.float16))
    check_features(distca.Heads(6, 2, 24, 40), 3.0, True)
    check_many_short_documents(torch.float32)
    check_many_short_documents(torch.bfloat16)
    return "exact"


@pytest.mark.parametrize(
    "isa", ["plain", "avx2", "avx512", "avx512_bf16", "avx512_bf16_emulated", "amx", "amx_emulated"]
)
def test_every_instruction_set_is_as_exact_as_pytorch(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process chooses its instruction set once, so each case runs in a process of its own."""
    monkeypatch.setenv("DISTCA_CPU_ISA", isa)
    [found] = launch(_exact_or_why_not_here, ranks=1)
    if isa != "plain" and found != "exact":
        assert found.startswith(f'environment variable DISTCA_CPU_ISA is "{isa}"')
        pytest.skip(found)
    assert found == "exact"


def test_without_tasks_all_rows_are_one_causal_document() -> None:
    batch = random_batch((211,), distca.Heads(4, 2, 16), 3)
    for name, a, b in zip(NAMES, _compute(batch, None), _compute(batch, whole_documents((211,))), strict=True):
        assert torch.equal(a, b), name
    torch.testing.assert_close(_compute(batch, None)[0].double(), oracle(batch)[0], rtol=1e-5, atol=1e-5)


@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 64, 100])
def test_queries_are_the_last_rows_before_the_end_of_the_keys(rows: int, dtype: torch.dtype) -> None:
    """This is the case of generation with a cache: there are fewer queries than keys."""
    length = 131
    batch = random_batch((length,), distca.Heads(4, 2, 16, 24, dtype), 4)
    dout = batch.dout.clone()
    dout[: length - rows] = 0
    whole = Batch(batch.lengths, batch.heads, batch.q, batch.k, batch.v, dout)
    last = Batch(batch.lengths, batch.heads, batch.q[length - rows :], batch.k, batch.v, dout[length - rows :])
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    for name, a, b in zip(NAMES, _compute(last, None), oracle(whole), strict=True):
        b = b[length - rows :] if name in ("out", "lse", "dq") else b
        torch.testing.assert_close(a.double(), b, rtol=rounding, atol=rounding, msg=lambda t, name=name: f"{name}: {t}")


@DTYPES
@pytest.mark.parametrize("scale", [None, 3.0])  # with the latter, maxima of rows rise by much after their first keys
def test_a_document_in_pieces_gives_bitwise_what_it_gives_whole(scale: float | None, dtype: torch.dtype) -> None:
    batch = random_batch((300, 97), distca.Heads(4, 2, 24, dtype=dtype), 5)
    rounding = (1e-5 if dtype == torch.float32 else 2e-2) * (scale or 1)
    whole = _compute(batch, whole_documents(batch.lengths), scale=scale)
    cuts = [0, 1, 2, 63, 64, 65, 130, 200, 299, 300]
    pieces = [[b, e, 0, e] for b, e in zip(cuts, cuts[1:], strict=False)]
    pieces += [[300, 340, 300, 340], [340, 397, 300, 397]]
    generator = torch.Generator().manual_seed(5)
    tasks = torch.tensor(pieces)[torch.randperm(len(pieces), generator=generator)]
    for name, a, b in zip(NAMES, _compute(batch, tasks, scale=scale), whole, strict=True):
        if name in ("dk", "dv"):  # tasks decide the order in which sums over query rows are formed
            torch.testing.assert_close(a, b, rtol=rounding, atol=rounding)
        else:
            assert torch.equal(a, b), name


@DTYPES
def test_rows_of_no_task_are_not_touched_and_give_nothing(dtype: torch.dtype) -> None:
    batch = random_batch((40, 70, 30), distca.Heads(4, 2, 16, dtype=dtype), 6)
    whole = _compute(batch, whole_documents(batch.lengths))
    outside = slice(40, 110)
    for t in (batch.q, batch.k, batch.v, batch.dout):
        t[outside] = NAN
    tasks = whole_documents(batch.lengths)[[0, 2]]
    for name, a, b in zip(NAMES, _compute(batch, tasks), whole, strict=True):
        assert (a[outside] == (-math.inf if name == "lse" else 0.0)).all(), name
        assert torch.equal(a[:40], b[:40]) and torch.equal(a[110:], b[110:]), name


@DTYPES
def test_keys_past_a_task_s_last_row_take_no_part_not_even_times_zero(dtype: torch.dtype) -> None:
    batch = random_batch((100,), distca.Heads(2, 1, 16, dtype=dtype), 7)
    tasks = torch.tensor([[0, 70, 0, 70]])
    clean = _compute(batch, tasks)
    for t in (batch.q, batch.k, batch.v, batch.dout):
        t[70:] = NAN
    for name, a, b in zip(NAMES, _compute(batch, tasks), clean, strict=True):
        assert torch.equal(a, b), name
        assert not a.isnan().any(), name


@DTYPES
def test_a_key_that_dominates_a_row_is_the_key_of_that_document_row_and_head(dtype: torch.dtype) -> None:
    batch, expected = needle_batch(LENGTHS, distca.Heads(8, 2, 64, 24, dtype), seed=8)
    out = _compute(batch, whole_documents(batch.lengths))[0]
    assert torch.equal(out, expected)


@DTYPES
@pytest.mark.parametrize("size", [1e-30, 1e3, 3e5])
def test_scores_of_any_size_overflow_nothing(size: float, dtype: torch.dtype) -> None:
    batch = random_batch((130, 3), distca.Heads(2, 1, 16, dtype=dtype), 9)
    big = Batch(batch.lengths, batch.heads, batch.q * size, batch.k, batch.v, batch.dout)
    out, lse, dq, dk, dv = _compute(big, whole_documents(big.lengths))
    reference = oracle(big)
    for t in (out, lse, dq, dk, dv):
        assert t.isfinite().all()
    # Scores have rounding errors of their size times 2^-24, which carry over to the probabilities.
    torch.testing.assert_close(lse.double(), reference[1], rtol=1e-6, atol=1e-5)
    if size <= 1e3:
        torch.testing.assert_close(out.double(), reference[0], rtol=1e-2, atol=1e-2)


@DTYPES
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_the_number_of_threads_changes_no_bit(threads: int, dtype: torch.dtype) -> None:
    batch = random_batch(LENGTHS, distca.Heads(4, 2, 40, 24, dtype), 10)
    torch.set_num_threads(1)
    alone = _compute(batch, whole_documents(batch.lengths))
    torch.set_num_threads(threads)
    for name, a, b in zip(NAMES, _compute(batch, whole_documents(batch.lengths)), alone, strict=True):
        assert torch.equal(a, b), name


def test_nothing_in_nothing_out() -> None:
    q, k, v = torch.zeros(0, 4, 8), torch.zeros(0, 2, 8), torch.zeros(0, 2, 16)
    out, lse = distca.attention(q, k, v)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([[0, 10, 0, 10], [9, 20, 20, 31]], "query row 9"),
        ([[0, 41, 0, 41]], "query rows [0, 41) of 40"),
        ([[-1, 4, 0, 5]], "query rows [-1, 4)"),
        ([[4, 4, 0, 5]], "query rows [4, 4)"),
        ([[0, 4, 0, 41]], "key rows [0, 41) of 40"),
        ([[0, 4, -1, 5]], "key rows [-1, 5)"),
        ([[0, 4, 7, 7]], "key rows [7, 7)"),
        ([[0, 10, 0, 9]], "more query rows (10) than key rows (9)"),
        ([[0, 10, 0, 10], [10, 20, 5, 20]], "overlap"),
        ([[0, 10, 0, 10], [10, 15, 0, 12]], "row 7"),
        ([[0, 10, 0, 2**62]], str(2**62)),
    ],
    ids=str,
)
def test_tasks_that_make_no_sense_are_refused(tasks: list[list[int]], said: str) -> None:
    batch = random_batch((40,), distca.Heads(2, 1, 8), 11)
    with pytest.raises(distca.InvalidArgumentError) as caught:
        distca.attention(batch.q, batch.k, batch.v, torch.tensor(tasks))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (torch.zeros(3, 3, dtype=torch.int64), "[N, 4]"),
        (torch.zeros(4, dtype=torch.int64), "[N, 4]"),
        (torch.zeros(1, 4, dtype=torch.int32), "int64"),
        (torch.zeros(4, 2, dtype=torch.int64).T, "contiguous"),
    ],
    ids=["width", "rank", "dtype", "strides"],
)
def test_a_task_table_of_another_form_is_refused(tasks: torch.Tensor, said: str) -> None:
    batch = random_batch((40,), distca.Heads(2, 1, 8), 11)
    with pytest.raises(distca.InvalidArgumentError) as caught:
        distca.attention(batch.q, batch.k, batch.v, tasks)
    assert said in str(caught.value)
