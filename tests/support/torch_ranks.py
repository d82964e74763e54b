"""Ranks over gloo, as threads of one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

import distca
from distca.testing import _emulation
from support.processes import HEADS, Group


@contextmanager
def torch_group(program: Callable[..., None], ranks: int, *args: Any) -> Iterator[Group]:
    """Runs `program(rank, ranks, pipe, port, *args)`. The ranks find each other at the store on that port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Group(program, ranks, store.port, *args, network=True) as group:
        yield group


def join(rank: int, ranks: int, port: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def over_torch(**options: Any) -> distca.Context:
    context = distca.init(**{"transport": "torch", "max_tokens": 1, "heads": HEADS, "timeout": 20.0} | options)
    _emulation.fill_with_nan(context._core)
    return context
