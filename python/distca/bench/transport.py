"""`distca bench transport`: how fast rows get into a peer's heap, beside a plain memcpy of the same rows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch.distributed as dist

import distca
from distca.bench.harness import Result, Row, alternate, median_ratio, spread

ROW_BYTES = 4096
SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
SHORT_SIZES = (1 << 16, 1 << 20, 1 << 24)
#: A call from Python takes about as long as to copy some tens of kilobytes, so that smaller messages measure the call.
SMALLEST_BOUND = 1 << 20
WORD = 0  # of the signals; the contexts take no steps, so all are free

Times = tuple[list[float], list[float], list[float]]


def run(rounds: int | None = None, short: bool = False) -> Result:
    """Two single-threaded processes; the first sends, in alternation by memcpy to itself, shm and torch (gloo)."""
    rounds = rounds or (20 if short else 40)
    sizes = SHORT_SIZES if short else SIZES
    rows, spreads = [], {}
    for size, (memcpy, shm, torch_) in distca.launch(_run_rank, sizes, rounds, ranks=2, threads=1)[0].items():
        spreads[size] = [round(spread(times), 3) for times in (memcpy, shm, torch_)]
        name, bound = f"{size >> 10} KiB", 0.8 if size >= SMALLEST_BOUND else None
        rows += [
            Row(f"{name}: memcpy, median", size / sorted(memcpy)[len(memcpy) // 2] / 1e9, "GB/s"),
            Row(f"{name}: bandwidth of shm / memcpy", median_ratio(memcpy, shm), "x", at_least=bound),
            Row(f"{name}: bandwidth of torch / memcpy", median_ratio(memcpy, torch_), "x"),
        ]
    details = {"row_bytes": ROW_BYTES, "rounds": rounds, "ranks": 2, "torch": "gloo, one host", "spreads": spreads}
    return Result("transport", rows, details)


def _run_rank(sizes: tuple[int, ...], rounds: int) -> dict[int, Times]:
    """Seconds of each round by message size, as this rank saw them; those of the sender, rank 0, count."""
    join = partial(distca.init, max_tokens=1, heads=distca.Heads(q=1, kv=1, dim=8), heap_bytes=2 * max(sizes))
    times: dict[int, Times] = {}
    with (
        join(transport="shm", name="bench/shm") as shm,
        join(transport="torch", name="bench/torch") as torch_,
    ):
        for size in sizes:
            make = _sender if dist.get_rank() == 0 else _receiver
            memcpy, by_shm, by_torch = alternate(make(shm, torch_, size), rounds)
            times[size] = (memcpy, by_shm, by_torch)
    return times


def _sender(shm: distca.Context, torch_: distca.Context, size: int) -> list[Callable[[], object]]:
    rows, copy = (ctypes.c_char * size)(), (ctypes.c_char * size)()
    message = memoryview(rows).cast("B").cast("B", [size // ROW_BYTES, ROW_BYTES])

    def by_shm() -> None:
        assert shm._core is not None
        shm._core.put(1, 0, message)
        shm._core.signal(1, WORD, 1)

    def by_torch() -> None:
        assert torch_._core is not None
        torch_._core.put(1, 0, message)
        torch_._core.exchange()
        torch_._core.exchange()  # the peer comes to this one when the rows lie in its heap

    return [partial(ctypes.memmove, copy, rows, size), by_shm, by_torch]


def _receiver(shm: distca.Context, torch_: distca.Context, size: int) -> list[Callable[[], object]]:
    assert shm._core is not None and torch_._core is not None
    exchange = torch_._core.exchange

    def by_torch() -> None:
        exchange()
        exchange()

    # A put into shared memory needs nothing of its target, and this rank sleeps until the next exchange.
    return [lambda: None, lambda: None, by_torch]
