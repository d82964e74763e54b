"""Wrong arguments that people pass by mistake are refused by a typed error that names them and what is expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import distca

HEADS = distca.Heads(4, 2, 16)
LAYOUT = distca.Layout.from_documents([[60, 40]])
SHAPES = [(100, 4, 16), (100, 2, 16), (100, 2, 16)]
np = pytest.importorskip("numpy")


@pytest.fixture
def context() -> Iterator[distca.Context]:
    with distca.init(max_tokens=100, heads=HEADS) as one:
        yield one


def _refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=f"^{re.escape(message)}"):
        call()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: distca.Layout.from_documents([100, 20]), "layout: rank 0 is 100; a list of lengths for each rank, [["),
        (lambda: distca.Layout.from_documents([[3], 4]), "layout: rank 1 is 4; a list of lengths for each rank, [[..."),
        (lambda: distca.Layout.from_documents(None), "layout: its argument is None; a list of lengths for each rank"),
        (
            lambda: distca.Layout.from_documents(["ab"]),
            "layout: document 0 on rank 0 has length 'a'; integers from 1 to",
        ),
        (
            lambda: distca.Layout(5),
            "layout: its argument is 5; a list of segments (document, begin, end) for each rank",
        ),
        (lambda: distca.Layout([1, 2]), "layout: rank 0 is 1; a list of segments (document, begin, end) for each rank"),
        (lambda: distca.Layout([[(0, 1)]]), "layout: rank 0, segment 0 is (0, 1); integers (document, begin, end) up"),
        (lambda: distca.Layout([[3]]), "layout: a segment is 3; (document, begin, end) is expected"),
        (lambda: distca.Layout.packed(9, ranks=2, tokens_per_rank=64), "layout: lengths is 9; a list of lengths is"),
        (
            lambda: distca.Layout.packed([[9]], ranks=2, tokens_per_rank=64),
            "layout: document 0 has length [9]; integers from 1",
        ),
        (lambda: distca.Layout.head_tail(9, ranks=2), "layout: lengths is 9; a list of lengths is expected"),
    ],
)
def test_layouts(make: Callable[[], Any], message: str) -> None:
    _refused(make, message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((5, 2, 16), "heads: 5 query heads and 2 key/value heads; 1 to 4096 query heads that are a multiple of the"),
        ((0, 0, 8), "heads: 0 query heads and 0 key/value heads; 1 to 4096"),
        ((4, 0, 8), "heads: 4 query heads and 0 key/value heads; 1 to 4096"),
        ((4, 3, 16), "heads: 4 query heads and 3 key/value heads; 1 to 4096"),
        ((5000, 1, 16), "heads: 5000 query heads and 1 key/value heads; 1 to 4096"),
        ((4, 2, 0), "heads: dim = 0, v_dim = 0; multiples of 8 from 8 to 512 are allowed"),
        ((4, 2, 16, 4), "heads: dim = 16, v_dim = 4; multiples of 8 from 8 to 512 are allowed"),
        ((4, 2, 20), "heads: dim = 20, v_dim = 20; multiples of 8 from 8 to 512 are allowed"),
        ((4, 2, 16, 520), "heads: dim = 16, v_dim = 520; multiples of 8 from 8 to 512 are allowed"),
        (("4", 2, 16), "heads: q = '4'; an integer is expected"),
        ((4, 2, 16.0), "heads: dim = 16.0; an integer is expected"),
        ((4, 2, None), "heads: dim = None; an integer is expected"),
        ((4, 2, 16, 16, "bf16"), "heads: dtype = bf16; torch.float32, torch.bfloat16, torch.float16 are supported"),
    ],
)
def test_heads(arguments: tuple[Any, ...], message: str) -> None:
    _refused(lambda: distca.Heads(*arguments), message)


def test_what_the_core_allows_of_heads_is_allowed() -> None:
    for dim in range(8, 513, 8):
        distca.plan(LAYOUT, distca.Heads(4096, 4096, dim))
    assert distca.Heads(np.int64(4), np.int32(2), 16) == HEADS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": [[100]]}, "plan: layout is a list; a distca.Layout is expected, as made by distca.Layout.from_doc"),
        ({"heads": (4, 2, 16)}, "plan: heads is a tuple; a distca.Heads is expected, as made by distca.Heads(q=8, kv="),
        ({"rank": "0"}, "plan: rank = '0'; 0 to 0 are allowed"),
        ({"rank": -1}, "plan: rank = -1; 0 to 0 are allowed"),
        ({"mask": 3}, "plan: mask = 3; 'causal', 'full' are allowed"),
        ({"mask": []}, "plan: mask = []; 'causal', 'full' are allowed"),
        ({"window": "a"}, "plan: window = 'a'; None or an integer from 1 to 2147483648 is allowed"),
        ({"servers": 3}, "plan: servers is 3; a list of ranks, or None for all, is expected"),
        ({"servers": []}, "plan: servers is empty; None stands for all ranks"),
        ({"servers": [1]}, "plan: servers = [1]; ranks from 0 to 0 are allowed"),
        ({"speeds": ["a"]}, "plan: speeds = ['a']; integers from 1 to 1048576 are allowed"),
        ({"speeds": [1, 1]}, "plan: 2 speeds for 1 ranks"),
        ({"ranks_per_node": "x"}, "plan: ranks_per_node = 'x'; None or 1 to 2**62 is allowed"),
        ({"tolerance": "big"}, "plan: tolerance = 'big'; 0 to 1 is allowed"),
        ({"tolerance": float("nan")}, "plan: tolerance = nan; 0 to 1 is allowed"),
        ({"min_rows": 0}, "plan: min_rows = 0; an integer from 1 to 2**62 is allowed"),
        ({"min_rows": "x"}, "plan: min_rows = 'x'; an integer from 1 to 2**62 is allowed"),
        ({"objective": 1}, "plan: objective = 1; 'all' and 'forward' are allowed"),
        ({"capacity": "1G"}, "plan: capacity = '1G' bytes; 1 to 2**62 are allowed"),
        ({"cost": "pairs"}, "plan: cost is a str; a distca.CostModel is expected, as made by distca.CostModel.load("),
        ({"tasks": 3}, "plan: tasks is 3; a list of tasks, or None for ours, is expected"),
        ({"tasks": [(1, 2)]}, "plan: a task is (1, 2); six integers (document, q_begin, q_end, kv_head_begin, kv_head"),
        ({"retain_bytes": "x"}, "plan: retain_bytes = 'x'; a number of bytes from 0 to 2**46 is allowed, or one for"),
    ],
)
def test_plans(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"layout": LAYOUT, "heads": HEADS} | options
    _refused(lambda: distca.plan(**arguments), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"windows": 3}, "plans: windows is 3; a list of windows, of which None stands for none, is expected"),
        ({"windows": [[1]]}, "plans: a window is [1]; None, a number of rows or a distca.Chunk is allowed"),
        ({"windows": [0]}, "plans: a window is 0; None, a number"),
        ({"windows": [None], "window": 5}, "plans: window and windows are given; name all of them in windows"),
        (
            {"windows": [distca.Chunk(4)], "mask": "full"},
            "plans: mask = 'full' with Chunk(rows=4); the rows of a chunk",
        ),
    ],
)
def test_plans_of_several_windows(options: dict[str, Any], message: str) -> None:
    _refused(lambda: distca.plans(LAYOUT, HEADS, **options), message)


def test_ranks_of_plans_and_numbers_of_other_kinds() -> None:
    plan = distca.plan(LAYOUT, HEADS, tolerance=torch.tensor(0.5))
    assert plan.for_rank(torch.tensor(0)).rank == 0
    for rank in ("0", None, 1, -1):
        _refused(lambda rank=rank: plan.for_rank(rank), f"plan: rank = {rank!r}; 0 to 0 are allowed")
    of_lists: Any = distca.Scores(["causal"])
    documents = len(LAYOUT.document_lengths)
    _refused(
        lambda: distca.plan(LAYOUT, HEADS, scores=[of_lists] * documents), "plan: mask = ['causal']; 'causal', 'full'"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": "many"}, "init: max_tokens = 'many'; an integer from 1 on is expected"),
        ({"max_tokens": 10**17}, "init: max_tokens = 100000000000000000; a heap for so many rows of these heads has "),
        ({"heads": (4, 2, 16)}, "init: heads is a tuple; a distca.Heads is expected"),
        ({"heap_bytes": "1G"}, "init: heap_bytes = '1G'; a number of bytes is expected"),
        ({"timeout": "1"}, "init: timeout = '1'; a number of seconds from 0.001 to 1e+08 is expected"),
        ({"timeout": 0}, "init: timeout = 0; a number of seconds from 0.001 to"),
        ({"timeout": float("inf")}, "init: timeout = inf; a number of seconds from 0.001 to"),
        ({"name": 3}, "init: name = 3; a string of printable characters is expected"),
        ({"group": 3}, "init: group is a int; a torch.distributed.ProcessGroup is expected, as new_group returns it"),
        ({"cost": "pairs"}, "init: cost is a str; a distca.CostModel is expected"),
        ({"device": "disk"}, "init: device = 'disk'; "),
    ],
)
def test_contexts(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"max_tokens": 100, "heads": HEADS} | options
    _refused(lambda: distca.init(**arguments), message)
    assert distca.get_context() is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: {"q": q.numpy()}, "core_attention: q is a ndarray; a torch.Tensor is expected"),
        (lambda q, k, v: {"v": None}, "core_attention: v is a NoneType; a torch.Tensor is expected"),
        (lambda q, k, v: {"sinks": [1.0]}, "core_attention: sinks is a list; a torch.Tensor is expected"),
        (lambda q, k, v: {"context": 3}, "context is a int; a distca.Context, or the name of one, is expected"),
        (lambda q, k, v: {"context": None}, "context is a NoneType; a distca.Context, or the name of one, is expected"),
        (lambda q, k, v: {"context": []}, "context is a list; a distca.Context, or the name of one, is expected"),
        (
            lambda q, k, v: {name: t.transpose(0, 1) for name, t in (("q", q), ("k", k), ("v", v))},
            "core_attention: q has shape [4, 100, 16], and the plan 100 tokens on this rank; [tokens, heads, dim] is "
            "expected: transpose(0, 1)",
        ),
        (lambda q, k, v: {"q": q.double()}, "q has dtype float64; float32, bfloat16 and float16 are"),
        (lambda q, k, v: {"v": v.long()}, "v has dtype int64; float32, bfloat16 and float16 are"),
        (lambda q, k, v: {"scale": "0.1"}, "scale = '0.1'; a number is expected"),
        (lambda q, k, v: {"softcap": None}, "softcap = None; a number is expected"),
        (lambda q, k, v: {"scale": 10**400}, "scale is too large for a floating-point number"),
        (lambda q, k, v: {"deterministic": "yes"}, "core_attention: deterministic is 'yes'; True or False is expected"),
        (lambda q, k, v: {"q": q.to_sparse()}, "core_attention: q is sparse; pass a dense tensor, q.to_dense()"),
        (lambda q, k, v: {"sinks": torch.zeros(4).to_sparse()}, "core_attention: sinks is sparse; pass a dense tensor"),
        (lambda q, k, v: {"sinks": torch.zeros(4) * 1j}, "core_attention: sinks has dtype torch.complex64; real"),
        (lambda q, k, v: {"scale": 1e39}, "scale = 1e+39; a finite float32 is expected"),
        (lambda q, k, v: {"softcap": 1e39}, "softcap = 1e+39; 0 (none) or a positive finite float32 is expected"),
        (lambda q, k, v: {"softcap": 1e-50}, "softcap = 1e-50; 0 (none) or a positive finite float32 is expected"),
        (lambda q, k, v: {"sinks": torch.zeros(4, device="meta")}, "q, k and v are on cpu; another input is on meta"),
        (lambda q, k, v: {"q": q[None]}, "core_attention: q has shape [1, 100, 4, 16]; [tokens, heads, dim] is"),
        (lambda q, k, v: {"plan": torch.zeros(4)}, "core_attention: plan is a Tensor; a distca.Plan is expected"),
    ],
)
def test_calls(change: Callable[..., dict[str, Any]], message: str, context: distca.Context) -> None:
    q, k, v = (torch.randn(shape) for shape in SHAPES)
    good: dict[str, Any] = {"q": q, "k": k, "v": v, "plan": distca.plan(LAYOUT, HEADS)}
    _refused(lambda: distca.core_attention(**good | change(q, k, v)), message)
    assert distca.core_attention(**good)[0].shape == q.shape  # the context still works


def test_the_local_kernel_and_the_report_of_memory() -> None:
    q, k, v = (torch.randn(shape) for shape in SHAPES)
    bad: Any = [[0, 9, 0, 9]]
    _refused(lambda: distca.attention(q.numpy(), k, v), "attention: q is a ndarray; a torch.Tensor is expected")
    _refused(lambda: distca.attention(q, k, v, bad), "attention: tasks is a list; an int64 tensor [N, 4] is expected")
    _refused(lambda: distca.attention(q, k.double(), v), "k has dtype float64; float32, bfloat16 and float16 are")
    tasks = torch.tensor([[0, 100, 0, 100]])
    meta = "q, k and v are on cpu; another input is on meta, which has no data"
    _refused(lambda: distca.attention(q, k, v, tasks.to("meta")), meta)
    _refused(lambda: distca.attention(q, k, v, tasks, torch.zeros(4, device="meta")), meta)
    out, lse = distca.attention(q, k, v, tasks)
    backward = torch.ops.distca.attention_backward
    _refused(lambda: backward(out, q, k, v, out, lse.to("meta"), tasks), meta)
    _refused(lambda: distca.attention(q, k, v, tasks.int()), "tasks must be a contiguous int64 CPU tensor")
    _refused(lambda: distca.attention(q, k, v, scale=-1e39), "scale = -1e+39; a finite float32 is expected")
    _refused(lambda: distca.attention(q, k, v, scale="0.1"), "scale = '0.1'; a number is expected")
    _refused(lambda: distca.serve(bad, "forward"), "serve: plan is a list; a distca.Plan is expected, as made by")
    _refused(lambda: distca.halves(bad), "halves: layout is a list; a distca.Layout is expected, as made by")
    _refused(lambda: distca.memory_report(bad), "memory_report: a plan is a list; a distca.Plan is expected")
