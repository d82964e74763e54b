"""Ranks over gloo, as threads of one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

import distca
from distca.testing import _emulation
from support.processes import HEADS, LIMIT, Group

_TIMEOUT = LIMIT / 2
"""Seconds after which a rank says itself what it waited for, before the test gives up on it."""


@contextmanager
def torch_group(program: Callable[..., None], ranks: int, *args: Any) -> Iterator[Group]:
    """Runs `program(rank, ranks, pipe, port, *args)`. The ranks find each other at the store on that port."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with Group(program, ranks, store.port, *args, network=True) as group:
        yield group


def join(rank: int, ranks: int, port: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=_TIMEOUT))


def fork_later() -> int:
    """Forks once gloo's threads have let go of what they sent. They need Python for it, and before 3.12 a child that is
    forked just then hangs (https://github.com/python/cpython/issues/112275).
    """
    time.sleep(0.1)
    return os.fork()


def over_torch(**options: Any) -> distca.Context:
    context = distca.init(**{"transport": "torch", "max_tokens": 1, "heads": HEADS, "timeout": _TIMEOUT} | options)
    _emulation.fill_with_nan(context._core)
    return context
