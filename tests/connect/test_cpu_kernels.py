"""The ranks of a group agree on one instruction set of the CPU's kernel."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

import distca
from distca import _C
from distca.connect.cpu_kernels import CpuKernels, agreed
from distca.trace.trace import Link
from support.processes import plan_for, tensors_for
from support.torch_ranks import join, torch_group

AMX = CpuKernels("amx", ("amx", "avx512_bf16", "avx512", "avx2", "plain"))
ZEN = CpuKernels("avx512_bf16", ("avx512_bf16", "avx512", "avx2", "plain"))
SLOW_DOT = CpuKernels("avx512", ("avx512_bf16", "avx512", "avx2", "plain"))
OLD = CpuKernels("avx2", ("avx2", "plain"))
ARM = CpuKernels("plain", ("plain",))


def forced(isa: str) -> CpuKernels:
    return CpuKernels(isa, (isa,), forced=True)


@pytest.mark.parametrize(
    ("ranks", "isa", "rank"),
    [
        ([ZEN], "avx512_bf16", 0),
        ([ZEN, ZEN, ZEN], "avx512_bf16", 0),
        ([AMX, ZEN], "avx512_bf16", 1),
        ([ZEN, AMX, SLOW_DOT], "avx512", 2),
        ([AMX, SLOW_DOT, OLD, ZEN], "avx2", 2),
        ([OLD, AMX, ARM], "plain", 2),
        ([AMX, forced("avx2"), ZEN], "avx2", 1),
        ([SLOW_DOT, forced("avx512_bf16")], "avx512_bf16", 1),
        ([forced("amx_emulated"), forced("amx_emulated")], "amx_emulated", 0),
    ],
)
def test_a_group_takes_the_weakest_choice_or_the_forced_one(ranks: list[CpuKernels], isa: str, rank: int) -> None:
    assert agreed(ranks) == (isa, rank)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (
            [ZEN, forced("avx2"), forced("plain")],
            "rank 1 has DISTCA_CPU_ISA = 'avx2', rank 2 has 'plain'; .*give all ranks the same, or none",
        ),
        (
            [forced("avx512"), AMX, OLD],
            "rank 0 has DISTCA_CPU_ISA = 'avx512', which rank 2 cannot use; it can use avx2, plain: name one that all",
        ),
        ([AMX, forced("amx_emulated")], "rank 1 has DISTCA_CPU_ISA = 'amx_emulated', which rank 0 cannot use; "),
    ],
)
def test_what_is_forced_is_not_given_up(ranks: list[CpuKernels], said: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=said):
        agreed(ranks)


def test_the_core_has_the_order_and_its_choice_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISTCA_CPU_ISA", raising=False)
    usable = _C.cpu_isas()
    assert usable and usable == [isa for isa in AMX.usable if isa in usable] and usable[-1] == "plain"
    assert CpuKernels.here() == CpuKernels(_C.cpu_isa(), tuple(usable))
    monkeypatch.setenv("DISTCA_CPU_ISA", "plain")
    assert CpuKernels.here() == forced("plain")


# ---- ranks

HEADS = distca.Heads(4, 2, 32, dtype=torch.bfloat16)


def become_a_cpu_with(best: str) -> None:
    """Lets this process tell the others that its CPU has nothing better. It is asked for no more than it tells."""
    usable = _C.cpu_isas()
    usable = usable[usable.index(best) :]
    _C.cpu_isas, _C.cpu_isa = lambda: usable, lambda: best


class Heard(logging.Handler):
    """The messages of distca's log on kernels that are not a rank's own choice."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        logger = logging.getLogger("distca")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        if "in place of" in record.getMessage():
            self.messages.append(record.getMessage())


def plans_of(rank: int, ranks: int) -> list[distca.Plan]:
    """A plan in which every rank computes rows of another, and one whose last rank computes them all."""
    layout = distca.Layout.from_documents([[400], *([[100]] * (ranks - 2)), []])
    served = distca.plan(layout, HEADS, rank=rank, servers=[ranks - 1], tolerance=0.0, min_rows=1)
    return [plan_for(ranks, rank, heads=HEADS), served]


def step_of(plan: distca.Plan, context: distca.Context) -> list[torch.Tensor]:
    """out, lse, dq, dk and dv of this rank's rows; nothing on a dedicated server."""
    if plan.num_rows == 0:
        for phase in ("forward", "backward"):
            distca.serve(plan, phase, context=context)
        return []
    q, k, v, gradient = tensors_for(plan)
    out, lse = distca.core_attention(q, k, v, plan, context=context)
    out.backward(gradient)
    return [out, lse, q.grad, k.grad, v.grad]


def local_attention() -> torch.Tensor:
    """The attention of some rows outside of the context, by a kernel that this call makes."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(150, heads, 32, generator=generator).bfloat16() for heads in (4, 2, 2))
    with ThreadPoolExecutor(1) as thread:  # every thread has a kernel of its own
        return thread.submit(distca.attention, q, k, v).result()[0]


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [one.detach().float().numpy().tobytes() for one in tensors]


def make_contexts(rank: int, ranks: int, pipe: Connection, port: int) -> None:
    """Makes a context for each request ``(forced, best, options)``, and takes a step of each plan in it."""
    join(rank, ranks, port)
    heard, own = Heard(), (_C.cpu_isas, _C.cpu_isa)
    while (request := pipe.recv()) is not None:
        forced_isa, best, options = request
        os.environ["DISTCA_CPU_ISA"] = forced_isa
        _C.cpu_isas, _C.cpu_isa = own
        if best:
            become_a_cpu_with(best)
        heard.messages.clear()
        with distca.init(max_tokens=400, heads=HEADS, timeout=20.0, **options) as context:
            results = [one for plan in plans_of(rank, ranks) for one in step_of(plan, context)]
            outside = local_attention()
            pipe.send((context.attention, list(heard.messages), bits(results), bits([outside])))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_on_different_cpus_compute_what_ranks_forced_to_the_weakest_do(ranks: int) -> None:
    usable = _C.cpu_isas()
    if len(usable) < 2:
        pytest.skip("the CPU and build have one instruction set")
    second, third = usable[1], usable[min(2, len(usable) - 1)]
    bests = [usable[0], usable[-1]] if ranks == 2 else [second, usable[0], third]
    weakest, where = bests[-1], bests.index(bests[-1])
    with torch_group(make_contexts, ranks) as group:

        def made(forced: str, bests: Sequence[str], **options: Any) -> list[Any]:
            for rank in range(ranks):
                group.send(rank, (forced, bests[rank], options))
            return [group.receive(rank) for rank in range(ranks)]

        alone = [made(isa, [""] * ranks, transport="shm") for isa in (weakest, usable[0])]
        expected, stronger = ([results for _, _, results, _ in told] for told in alone)
        assert all(one != other for one, other in zip(expected, stronger, strict=True) if one)
        [own] = {outside[0] for *_, outside in made("", [""] * ranks, transport="shm")}
        assert ranks == 3 or all(outside != [own] for *_, outside in alone[0])
        for options in ({"transport": "shm"}, {"transport": "shm", "link": Link(1e9)}, {"transport": "torch"}, {}):
            told = made("", bests, **options)
            for rank, (attention, messages, results, outside) in enumerate(told):
                assert attention == f"CPU kernel, {weakest}" and results == expected[rank], (rank, options)
                assert outside == [own]
                said = f"runs the CPU kernel {weakest} in place of {bests[rank]}, because rank {where} has {weakest}"
                assert [said in message for message in messages] == [True] * (bests[rank] != weakest)
        group.tell(None)
