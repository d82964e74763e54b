"""`distca bench transport`: how fast rows get into a peer's heap, and what that costs a rank that computes meanwhile.

A transport takes turns with a plain memcpy of the same rows, and with nothing else. Both therefore find the caches as
one of the two leaves them. An exchange of another transport in between would evict the code and the destination
of what runs next, and would make it look slower.
"""

from __future__ import annotations

import ctypes
import os
import statistics
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

import distca
from distca.apps.bench.harness import Result, Row
from distca.apps.common.timing import Work, alternate, in_turn, median_ratio, spread
from distca.testing import _emulation

ROW_BYTES = 4096
SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
SHORT_SIZES = (1 << 16, 1 << 20, 1 << 24)
#: The smallest message with a bound. A call from Python takes as long as to copy some tens of kilobytes; smaller
#: messages would measure the call.
SMALLEST_BOUND = 1 << 20
#: Number and total bytes of the buffers that take turns. The place of a megabyte in memory makes any copy up to a
#: quarter faster or slower, as memcpy into different buffers shows.
PLACES, PLACES_BYTES = 10, 1 << 26
#: Bytes sent beside a matmul of square matrices, which takes longer.
BESIDE_BYTES = 1 << 24
MATMUL_ROWS = 1024
WORD = 0  # of the signals; all are free, because the contexts take no steps

Times = tuple[list[float], ...]


class Measured(NamedTuple):
    """Seconds of each round on one rank. Those of the sender, rank 0, count."""

    bandwidth: dict[int, dict[str, Times]]
    """By message size and transport: (memcpy, the transport)."""
    beside: dict[int, dict[str, Times]]
    """By threads of a matmul and transport: (the matmul alone, the rows alone, both)."""


def run(rounds: int | None = None, short: bool = False) -> Result:
    """Two processes. The first one sends. The second one sleeps unless its part is needed."""
    rounds = rounds or (20 if short else 40)
    cores = len(os.sched_getaffinity(0))
    threads = sorted({max(1, cores - 1), cores})
    measured: Measured = distca.launch(_run_rank, SHORT_SIZES if short else SIZES, threads, rounds, ranks=2, threads=1)[
        0
    ]
    details = {
        "row_bytes": ROW_BYTES,
        "rounds": rounds,
        "ranks": 2,
        "torch": "gloo, one host",
        "matmul": [MATMUL_ROWS] * 3,
        "bytes_beside_matmul": BESIDE_BYTES,
        "spreads": {
            size: {name: [round(spread(t), 3) for t in times] for name, times in of_size.items()}
            for size, of_size in measured.bandwidth.items()
        },
    }
    return Result("transport", [*bandwidth_rows(measured.bandwidth), *beside_rows(measured.beside, cores)], details)


def bandwidth_rows(measured: dict[int, dict[str, Times]]) -> list[Row]:
    """For each size, the rate of memcpy and each transport's bandwidth as a share of it."""
    rows = []
    for size, of_size in measured.items():
        name = f"{size >> 10} KiB"
        memcpy = statistics.median(next(iter(of_size.values()))[0])
        rows.append(Row(f"{name}: memcpy, median", size / memcpy / 1e9, "GB/s"))
        for transport, (copies, sends) in of_size.items():
            bound = 0.8 if transport == "shm" and size >= SMALLEST_BOUND else None
            rows.append(
                Row(f"{name}: bandwidth of {transport} / memcpy", median_ratio(copies, sends), "x", at_least=bound)
            )
    return rows


def beside_rows(measured: dict[int, dict[str, Times]], cores: int) -> list[Row]:
    """The time that a matmul loses to rows that are sent while it runs."""
    rows = []
    for threads, of_threads in measured.items():
        for transport, (alone, send, both) in of_threads.items():
            name = f"matmul on {threads} of {cores} cores beside {BESIDE_BYTES >> 20} MiB by {transport}"
            stolen = statistics.median((b - a) / s for a, s, b in zip(alone, send, both, strict=True))
            rows += [
                Row(f"{name}: time / alone", median_ratio(both, alone), "x"),
                Row(f"{name}: time stolen / time of sending", stolen, "x"),
            ]
    return rows


def _run_rank(sizes: tuple[int, ...], threads: list[int], rounds: int) -> Measured:
    heap_bytes = 2 * max(*sizes, BESIDE_BYTES)
    join = partial(distca.init, max_tokens=1, heads=distca.Heads(q=1, kv=1, dim=8), heap_bytes=heap_bytes)
    with ExitStack() as stack:
        contexts = {
            "shm": stack.enter_context(join(transport="shm", name="bench/shm")),
            "shm with thread": stack.enter_context(join(transport="shm", name="bench/thread", progress_thread=True)),
            "torch": stack.enter_context(join(transport="torch", name="bench/torch")),
        }
        sends = dist.get_rank() == 0
        bandwidth: dict[int, dict[str, Times]] = {}
        for size in sizes:
            bandwidth[size] = {name: ([], []) for name in contexts}
            num_places = max(1, min(PLACES, PLACES_BYTES // size))
            places = torch.ones(num_places, 2, size if sends else ROW_BYTES, dtype=torch.uint8)
            for rows, copy in places:
                memcpy = partial(ctypes.memmove, copy.data_ptr(), rows.data_ptr(), size) if sends else _nothing
                for name, context in contexts.items():
                    send = in_turn(*(_send(context, rows) if sends else _receive(context)))
                    for all_times, times in zip(
                        bandwidth[size][name], alternate([memcpy, send], -(-rounds // num_places)), strict=True
                    ):
                        all_times += times
        beside: dict[int, dict[str, Times]] = {}
        rows = torch.ones(BESIDE_BYTES, dtype=torch.uint8)
        for count in threads:
            torch.set_num_threads(count)
            a, b, c = torch.rand(3, MATMUL_ROWS, MATMUL_ROWS)
            matmul = partial(torch.mm, a, b, out=c) if sends else _nothing
            beside[count] = {}
            for name, context in contexts.items():
                start, finish = _send(context, rows) if sends else _receive(context)
                works_ = [matmul, in_turn(start, finish), in_turn(start, matmul, finish)]
                beside[count][name] = tuple(alternate(works_, rounds))
    return Measured(bandwidth, beside)


def _nothing() -> None:
    """What the receiver does while the sender works alone: nothing."""


def _send(context: distca.Context, rows: torch.Tensor) -> tuple[Work, Work]:
    """Two functions: one starts to send rows to rank 1, the other waits until they are there."""
    core = context._core
    assert core is not None
    start = partial(_emulation.send_rows, core, 1, rows.data_ptr(), rows.numel() // ROW_BYTES, ROW_BYTES, WORD, 1)
    if context.transport == "torch":
        exchange = partial(_emulation.exchange, core)
        # The peer comes to the second exchange when the rows lie in its heap.
        return in_turn(start, exchange, exchange), _nothing
    return start, partial(_emulation.quiet, core)


def _receive(context: distca.Context) -> tuple[Work, Work]:
    """The peer's two functions. Shared memory needs nothing of the receiver, which sleeps until the next exchange."""
    core = context._core
    assert core is not None
    if context.transport != "torch":
        return _nothing, _nothing
    exchange = partial(_emulation.exchange, core)
    return in_turn(exchange, exchange), _nothing
