"""`init` that fails leaves nothing behind, and the other ranks learn why at once."""

from __future__ import annotations

import os
import resource
import time
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import distca
from distca.connect import init as connect
from distca.connect.exchange import Exchange
from distca.connect.place import Place
from support.ranks import launch

HEADS = distca.Heads(q=2, kv=1, dim=8)


def test_a_context_that_could_not_be_made_whole_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise MemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(connect, "Context", refuse)
        with pytest.raises(MemoryError):
            distca.init(max_tokens=8, heads=HEADS)
    with distca.init(max_tokens=8, heads=HEADS) as context:
        assert context.num_ranks == 1


def _without_a_core_on_rank_1() -> str:
    if dist.get_rank() == 1:
        connect._C = SimpleNamespace(**{name: getattr(connect._C, name) for name in dir(connect._C)})
        connect._C.make_torch = _no_core
    try:
        with distca.init(max_tokens=8, heads=HEADS, transport="torch", timeout=20):
            plan = distca.plan(distca.Layout.from_documents([[8], []]), HEADS, context="default", min_rows=1)
            distca.core_attention(*(torch.ones(8, heads, 8) for heads in (2, 1, 1)), plan)
    except (MemoryError, distca.DistcaError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _no_core(**options: Any) -> None:
    raise MemoryError("no memory for the heap")


def test_peers_learn_why_a_rank_could_not_take_part() -> None:
    peer, failed = launch(_without_a_core_on_rank_1, ranks=2)
    assert failed == "MemoryError: no memory for the heap"
    assert "no memory for the heap" in peer


def test_a_group_is_left_also_where_its_peers_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(kind: str, text: str) -> None:
        raise OSError("too many open files")

    exchange = Exchange.__new__(Exchange)
    closed: list[bool] = []
    exchange._backend, exchange._reported = object(), False
    exchange._reports = SimpleNamespace(tell=refuse, close=lambda: closed.append(True))
    with pytest.raises(OSError):
        exchange.abandon("PeerDiedError", "why")
    assert exchange._backend is None and closed == [True]


def _refused_on_rank_1(reason: str) -> str:
    options: dict[str, Any] = {"max_tokens": 8, "heads": HEADS, "transport": "shm", "timeout": 20}
    alone = [dist.new_group([rank]) for rank in range(2)]
    with ExitStack() as opened:
        if dist.get_rank() == 1 and reason == "name":
            opened.enter_context(distca.init(alone[1], max_tokens=8, heads=HEADS))
        elif dist.get_rank() == 1 and reason == "open files":
            used, most = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, most))
        elif dist.get_rank() == 1:
            options["device"] = "cuda:99"
        return _outcome(**options)


def _outcome(**options: Any) -> str:
    """The error of `init`, or that it came late."""
    begin = time.monotonic()
    try:
        distca.init(**options).close()
    except (MemoryError, distca.DistcaError) as error:
        return f"{type(error).__name__}: {error}" if time.monotonic() - begin < 15 else "late"
    return "nothing"


@pytest.mark.parametrize(
    ("reason", "kind", "said"),
    [
        ("name", "InvalidArgumentError", "context 'default' exists already"),
        ("open files", "OperatingSystemError", "a group of 2 ranks may take 12 open files"),
        ("device", "DeviceError", "device = 'cuda:99'"),
    ],
)
def test_what_only_one_rank_is_refused_all_are_told(reason: str, kind: str, said: str) -> None:
    peer, refused = launch(_refused_on_rank_1, reason, ranks=2)
    assert refused.startswith(f"{kind}: init: {said}")
    assert peer.startswith(f"InvalidArgumentError: init: rank 1: {said}")


def _wrong_on_rank_1(name: str, value: Any) -> str:
    options: dict[str, Any] = {"max_tokens": 8, "heads": HEADS, "transport": "shm", "timeout": 20.0}
    if dist.get_rank() == 1:
        options[name] = value
    return _outcome(**options)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_tokens", 0, "max_tokens = 0"),
        ("heads", None, "heads"),
        ("timeout", float("nan"), "timeout = nan"),
        ("transport", "ship", "transport = 'ship'"),
        ("name", 5, "name = 5"),
        ("cost", 7, "cost is a int"),
        ("attention", 5, "attention = 5"),
        ("put_ctas", "x", "put_ctas = 'x'"),
        ("progress_thread", "x", "progress_thread = 'x'"),
    ],
)
def test_an_argument_that_is_wrong_on_one_rank_alone_is_told_to_all(name: str, value: Any, said: str) -> None:
    first, wrong, third = launch(_wrong_on_rank_1, name, value, ranks=3)
    assert wrong.startswith("InvalidArgumentError: ") and said in wrong, wrong
    for told in (first, third):
        assert told.startswith("InvalidArgumentError: init: rank 1: ") and said in told, told


def _cannot_connect_on_rank_1() -> str:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # its heap is larger
    try:
        return _outcome(max_tokens=512, heads=HEADS, transport="shm", timeout=20.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_rank_that_cannot_connect_is_told_to_all_with_its_reason() -> None:
    first, failed, third = launch(_cannot_connect_on_rank_1, ranks=3)
    assert failed.startswith("OperatingSystemError: could not give a memfd"), failed
    for told in (first, third):
        assert told == f"PeerLeftError: init: rank 1 could not connect: {failed}"


def _wrong_among_tensor_ranks(name: str, value: Any) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    options: dict[str, Any] = {"max_tokens": 8, "heads": distca.Heads(4, 4, 8), "timeout": 20.0}
    if dist.get_rank() == 1:
        options[name] = value
    return _outcome(tensor_parallel=mesh["tp"], **options)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("heads", distca.Heads(3, 3, 8), "cannot be divided among 2 tensor ranks"),
        ("heap_bytes", 1 << 20, "global rank 1 has 524288"),
        ("max_tokens", 0, "max_tokens = 0"),
    ],
)
def test_all_contexts_of_tensor_ranks_are_told_what_one_process_is_refused(name: str, value: Any, said: str) -> None:
    for rank, told in enumerate(launch(_wrong_among_tensor_ranks, name, value, ranks=4)):
        assert said in told and (rank == 1 or "init: global rank " in told), (rank, told)


def test_one_of_several_processes_must_be_in_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun each rank would otherwise be alone, and nothing would be balanced."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(distca.InvalidArgumentError, match="call torch.distributed.init_process_group before"):
        distca.init(max_tokens=8, heads=HEADS)
    for transport in ("loopback", "shm"):  # as `distca doctor` does
        distca.init(max_tokens=8, heads=HEADS, transport=transport).close()
    monkeypatch.setenv("WORLD_SIZE", "1")
    distca.init(max_tokens=8, heads=HEADS).close()


def test_groups_of_tensor_ranks_wait_as_long_as_init_does(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[timedelta] = []

    def refuse(ranks: list[int], timeout: timedelta) -> None:
        limits.append(timeout)
        raise RuntimeError("timed out")

    monkeypatch.setattr(dist, "new_group", refuse)
    with pytest.raises(distca.PeerTimeoutError, match="timed out"), Place([0], [[0]], 0, ((0,),)).group(7.0):
        pass
    assert limits == [timedelta(seconds=7)]
