"""Every transport compares what must be the same on all ranks of a context when the context is made."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

import distca
from distca import _C
from distca.connect import agreement
from distca.connect.agreement import Terms, agree
from distca.connect.cpu_kernels import CpuKernels
from distca.connect.exchange import gather_text
from support.processes import HEADS, Group, connect, fault_of
from support.torch_ranks import join, torch_group

TERMS = Terms("auto", "cuda", 1 << 20, "flash")
OTHERS = {
    "transport": (replace(TERMS, transport="shm"), "transport = 'auto', rank 1 has 'shm'; give all ranks"),
    "device": (replace(TERMS, device="cpu"), "device = 'cuda', rank 1 has 'cpu'; give all ranks"),
    "slot_bytes": (replace(TERMS, slot_bytes=64), "slot_bytes = 1048576, rank 1 has 64; give all ranks the same heap"),
    "attention": (replace(TERMS, attention="own"), "attention = 'flash', rank 1 has 'own'; .*DISTCA_ATTENTION"),
    "version": (TERMS, "version = '.*', rank 1 has '0.0.1, plan format 2'; install the same version"),
    "problem": (replace(TERMS, problem="no kernel"), "rank 1: no kernel"),
}


def tell_terms(rank: int, ranks: int, pipe: Connection, port: int) -> None:
    join(rank, ranks, port)
    own_version = agreement._version
    for name, (other, _) in OTHERS.items():
        agreement._version = (lambda: "0.0.1, plan format 2") if name == "version" and rank == 1 else own_version
        pipe.send(fault_of(lambda other=other: agree(dist.group.WORLD, other if rank == 1 else TERMS, 20.0)))
    agreement._version = own_version
    pipe.send(fault_of(lambda: agree(dist.group.WORLD, TERMS, 20.0)))
    for transport in ("shm", "torch", "auto"):
        options = {"transport": transport, "max_tokens": 1, "heads": HEADS, "timeout": 20.0}
        pipe.send(fault_of(lambda options=options: distca.init(heap_bytes=4096 if rank == 1 else 8192, **options)))
    options["heap_bytes"] = 8192
    for isa in ("plain", "vax"):
        os.environ["DISTCA_CPU_ISA"] = isa if rank == 1 else "avx2"
        pipe.send(fault_of(lambda: distca.init(**options)))
    del os.environ["DISTCA_CPU_ISA"]
    if rank == 1:
        _C.cpu_isas, _C.cpu_isa = lambda: ["plain"], lambda: "plain"
    else:
        os.environ["DISTCA_CPU_ISA"] = "avx2"
    pipe.send(fault_of(lambda: distca.init(**options)))
    pipe.recv()


def test_ranks_that_differ_are_told_who_and_in_what_and_what_to_set() -> None:
    with torch_group(tell_terms, 3) as group:
        for name, (_, said) in OTHERS.items():
            faults = [group.receive(rank) for rank in range(3)]
            assert faults == [faults[0]] * 3
            with pytest.raises(AssertionError if not faults[0][0] else distca.InvalidArgumentError, match=said):
                raise getattr(distca, faults[0][0])(faults[0][1])
            assert faults[0][0] == "InvalidArgumentError", name
        assert [group.receive(rank) for rank in range(3)] == [("", "")] * 3
        for _ in range(3):
            for rank in range(3):
                kind, text = group.receive(rank)
                assert kind == "InvalidArgumentError" and "rank 0 has slot_bytes = 4096, rank 1 has 2048" in text
        for said in (
            "rank 0 has DISTCA_CPU_ISA = 'avx2', rank 1 has 'plain'; .*give all ranks the same, or none",
            'rank 1: environment variable DISTCA_CPU_ISA is "vax"; this CPU and build allow: .*plain',
            "rank 0 has DISTCA_CPU_ISA = 'avx2', which rank 1 cannot use; it can use plain: name one that all",
        ):
            for rank in range(3):
                kind, text = group.receive(rank)
                assert kind == "InvalidArgumentError" and re.search(said, text), text
        group.tell("end")


@pytest.mark.parametrize("letter", ['"', "ü", "\0", "\U0001f600"])
def test_what_is_told_fits_into_a_message(letter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_version", lambda: "v" * 60)
    problem = Terms("cuda-ipc", "cuda", 2**63, "flash", letter * 1000)
    kernels = CpuKernels("avx512_bf16", ("amx", "avx512_bf16", "avx512", "avx2", "plain"))
    for longest in (problem, Terms("loopback", "cpu", 2**63, "flash", cpu_kernels=kernels)):
        assert len(agreement._text_of(longest).encode()) <= 512


def heaps_of_other_sizes(rank: int, ranks: int, pipe: Connection, control: str) -> None:
    slot_bytes = 1 << 20 if rank != 1 else 1 << 16
    pipe.send(fault_of(lambda: connect(rank, pipe, device="cpu", control=control, slot_bytes=slot_bytes, timeout=20.0)))


@pytest.mark.parametrize("control", ["shm", "tcp"])
def test_ranks_that_write_into_each_others_gpu_compare_their_heaps_before_they_do(control: str) -> None:
    with Group(heaps_of_other_sizes, 3, control, network=control == "tcp") as group:
        group.exchange_addresses()
        for rank in range(3):
            kind, text = group.receive(rank)
            assert kind == "InvalidArgumentError", (kind, text)
            more = 2 * 3 * 2048  # two slots have room for the largest logits of three ranks
            large, small = (2 << 20) + more, (2 << 16) + more
            peer, theirs, mine = (0, large, small) if rank == 1 else (1, small, large)
            assert f"rank {peer} has a heap of {theirs} bytes, rank {rank} one of {mine}; give all ranks" in text


def _texts(of_ranks: list[list[str]]) -> list[list[str]]:
    return [gather_text(texts[dist.get_rank()], dist.group.WORLD) for texts in of_ranks]


def test_texts_that_ranks_gather_may_be_empty() -> None:
    of_ranks = [["", ""], ["", "é and more"], ["x", ""]]
    assert distca.launch(_texts, of_ranks, ranks=2, threads=1) == [of_ranks] * 2
