"""Attention on an emulated GPU (emulation/runtime): by the library's own kernels, on the machine of
test_kernels_on_host.py, in steps and alone. Errors are compared with PyTorch's.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

import distca
from emulation.emulated_gpu import OPTIONS, EmulatedGpu
from support.batches import Batch, random_batch, random_tasks, rows_of_rank, scattered, spill
from support.branches import attention_of_tree, own_rows, random_tree
from support.groups import loopback_group, on_all_ranks, run_step, together
from support.oracle import NAMES, ErrorPool, oracle, torch_attention
from support.score_features import eager_attention, random_sinks

Tensors = list[torch.Tensor]
T = TypeVar("T")

OWN = distca.Heads(8, 2, 16, 24, torch.bfloat16)
OWN_LENGTHS = (130, 3, 64, 225)
BOTH = pytest.mark.parametrize("own_gpu", [9, 8], ids=["9.0", "8.0"], indirect=True)


def _own_step(batch: Batch, plan: distca.Plan) -> tuple[torch.Tensor, ...]:
    with loopback_group(plan, **OPTIONS) as contexts:
        assert contexts[0].attention.startswith("distca's kernels")
        results = on_all_ranks(contexts, lambda rank, context: run_step(batch, plan, context))
    return together(batch.lengths, plan.layout, results)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_own_attention_is_as_exact_as_pytorch(own_gpu: EmulatedGpu, dtype: torch.dtype) -> None:
    pool = ErrorPool(dtype)
    heads = dataclasses.replace(OWN, dtype=dtype)
    for seed in range(3):
        batch, layout = random_batch(OWN_LENGTHS, heads, seed), scattered(OWN_LENGTHS, 1 + seed, seed)
        plan = distca.plan(layout, heads, tasks=random_tasks(layout, heads.kv, seed))
        pool.add(_own_step(batch, plan), torch_attention(batch), oracle(batch))
    pool.check()


@BOTH
@pytest.mark.parametrize("dims", [(512, 512), (264, 16)])
def test_kernels_that_run_twice_in_backward_are_exact_where_documents_share_rows(
    own_gpu: EmulatedGpu, dims: tuple[int, int]
) -> None:
    heads = distca.Heads(2, 1, *dims, torch.bfloat16)
    tree = random_tree(3, documents=4)
    batch, layout = random_batch(tree.lengths, heads, 1), tree.layout(2, 1)
    ours = _own_step(batch, distca.plan(layout, heads, tasks=random_tasks(layout, heads.kv, 1)))
    exact, mine = attention_of_tree(batch, tree, torch.float64), own_rows(batch, tree)
    for name, a, b in zip(NAMES, ours, exact, strict=True):
        error = ((a[mine].double() - b).square().mean() / b.square().mean()).sqrt()
        assert error < (1e-6 if name == "lse" else 1.5 * 2.0**-8), name


@BOTH
def test_own_attention_gives_rows_the_same_bits_whatever_the_plan(own_gpu: EmulatedGpu) -> None:
    batch = random_batch(OWN_LENGTHS, OWN, 1)
    results = []
    for ranks in (1, 2):
        layout = scattered(OWN_LENGTHS, ranks, 3)
        results.append(_own_step(batch, distca.plan(layout, OWN, tasks=random_tasks(layout, OWN.kv, ranks))))
    for name, a, b in zip(NAMES[:3], *results, strict=False):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("own_gpu", "link"), [(9, 450), (8, 300)], ids=["9.0", "8.0"], indirect=["own_gpu"])
def test_attention_leaves_multiprocessors_to_what_carries_rows_exactly_while_rows_travel(
    own_gpu: EmulatedGpu, link: int
) -> None:
    lengths = (200, 200)
    batch, layout = random_batch(lengths, OWN, 1), distca.Layout.from_documents([[200], [200]])
    blocks, puts = [], []
    for plan in (distca.plan(layout, OWN), distca.plan(layout, OWN, tasks=random_tasks(layout, OWN.kv, 1))):
        for kernel in ("kKernel", "put_kernel"):
            own_gpu.take_most_blocks(kernel)
        _own_step(batch, plan)
        blocks.append(own_gpu.take_most_blocks("kKernel"))
        puts.append(own_gpu.take_most_blocks("put_kernel"))
    assert blocks == [4, 2]  # of the emulated GPU's 4 multiprocessors, of which puts want more than half
    # In 1.5 us so many GiB/s have that much under way, and a block has 4 words of 16 bytes of each of 512 threads.
    assert puts[1] == 1 + link * 2**30 * 1.5e-6 // (512 * 4 * 16)


@BOTH
def test_own_attention_takes_sinks(own_gpu: EmulatedGpu) -> None:
    batch = random_batch((130, 20), OWN, 1)
    plan = distca.plan(spill((130, 20), 2), OWN, tolerance=0.0, min_rows=1)
    sinks = random_sinks(OWN.q, 1)

    def forward(rank: int, context: distca.Context) -> torch.Tensor:
        q, k, v = (rows_of_rank(batch, plan.layout, rank, t) for t in (batch.q, batch.k, batch.v))
        return distca.core_attention(q, k, v, plan.for_rank(rank), sinks=sinks, context=context)[0]

    with loopback_group(plan, **OPTIONS) as contexts:
        out = torch.cat(on_all_ranks(contexts, forward))
    exact = eager_attention(batch, torch.float64, 0.0, sinks)[0]
    assert ((out.double() - exact).square().mean() / exact.square().mean()).sqrt() < 2.0**-8


def test_a_context_says_which_kernels_compute(emulated_library: Path) -> None:
    plan = distca.plan(distca.Layout.from_documents([[8]]), OWN)
    said = {}
    for major in (8, 9):
        with EmulatedGpu(emulated_library).in_use(True, major) as gpu, loopback_group(plan, **OPTIONS) as [context]:
            said[context.attention] = gpu.is_own_the_default()
    assert said == {
        "distca's kernels for compute capability 8.0 and later": False,  # they have not run on a GPU
        "distca's kernels for compute capability 9.0": True,
    }


# ---- attention in this process alone: the GPU's backend is what the CPU's operator calls "flash" here


def _in_a_new_thread(work: Callable[[], T]) -> T:
    """Each thread keeps the backends that its calls of distca.attention were made with."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_attention_on_two_streams_at_once_gives_what_it_gives_alone(own_gpu: EmulatedGpu) -> None:
    operators = torch.ops.distca
    batches = [random_batch((lengths,), OWN, seed) for seed, lengths in enumerate((300, 180))]
    tasks = [torch.tensor([[0, *b.lengths, 0, *b.lengths]]) for b in batches]
    options = {"deterministic": True, "attention": "flash"}

    def forward(i: int) -> Tensors:
        return operators.attention(batches[i].q, batches[i].k, batches[i].v, tasks[i], **options)

    def backward(i: int, result: Tensors) -> Tensors:
        b = batches[i]
        return operators.attention_backward(b.dout, b.q, b.k, b.v, *result, tasks[i], **options)

    def queued(work: Callable[[int], Tensors], streams: Sequence[int]) -> list[Tensors]:
        results = []
        for i, stream in enumerate(streams):
            with own_gpu.stream(stream):
                results.append(work(i))
        for stream in streams:
            with own_gpu.stream(stream):
                own_gpu.synchronize()
        return results

    def run() -> None:
        right = queued(forward, [0, 0])
        gradients = queued(lambda i: backward(i, right[i]), [0, 0])
        for _ in range(3):
            for results, alone in (
                (queued(forward, [1, 2]), right),
                (queued(lambda i: backward(i, right[i]), [1, 2]), gradients),
            ):
                for mine, expected in zip(results, alone, strict=True):
                    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))

    _in_a_new_thread(run)


def test_attention_without_a_context_is_refused_while_a_graph_is_captured(own_gpu: EmulatedGpu) -> None:
    def attend() -> None:
        q, k, v = torch.randn(3, 64, 2, 16, dtype=torch.bfloat16).unbind()
        before = distca.attention(q, k, v, attention="flash")
        own_gpu.synchronize()
        gc.collect()  # memory of the tests before, which must not be freed while a graph is captured
        with own_gpu.graph(), pytest.raises(distca.InvalidArgumentError, match="a table that is gone when a graph is"):
            distca.attention(q, k, v, attention="flash")
        after = distca.attention(q, k, v, attention="flash")
        own_gpu.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    _in_a_new_thread(attend)


def test_what_flash_attention_lacks_and_own_kernels_have_is_an_error_that_names_them(gpu: EmulatedGpu) -> None:
    def error_of(dtype: torch.dtype) -> str:
        q, k, v = (torch.zeros(3, heads, 16, dtype=dtype) for heads in (4, 2, 2))
        with pytest.raises(distca.InvalidArgumentError) as error:
            distca.attention(q, k, v, softcap=2.0, attention="flash")
        return str(error.value)

    bf16, fp32 = _in_a_new_thread(lambda: [error_of(dtype) for dtype in (torch.bfloat16, torch.float32)])
    assert bf16 == "softcap = 2; what stands for flash attention has none; distca's own kernels take it: " + (
        'attention="own"'
    )
    assert fp32 == "softcap = 2; what stands for flash attention has none"


def test_what_own_kernels_lack_is_an_error_that_says_what_they_take(own_gpu: EmulatedGpu) -> None:
    def attend() -> None:
        q, k, v = torch.zeros(3, 3, 2, 16).unbind()
        distca.attention(q, k, v, attention="flash")

    with pytest.raises(
        distca.InvalidArgumentError, match='attention = "own": .* take bfloat16 and float16, not float32'
    ):
        _in_a_new_thread(attend)


@BOTH
@pytest.mark.parametrize(("query_heads", "dim", "v_dim"), [(65, 16, 16), (33, 264, 16)])
def test_more_query_heads_than_a_tile_has_rows_are_an_error(
    own_gpu: EmulatedGpu, query_heads: int, dim: int, v_dim: int
) -> None:
    def attend() -> None:
        q = torch.zeros(3, query_heads, dim, dtype=torch.bfloat16)
        distca.attention(q, q[:, :1].contiguous(), torch.zeros(3, 1, v_dim, dtype=q.dtype), attention="flash")

    with pytest.raises(distca.InvalidArgumentError, match=f"query heads of these dimensions .* not {query_heads}"):
        _in_a_new_thread(attend)
