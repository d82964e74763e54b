"""`distca bench transport --device cuda`: rows within one GPU, beside a copy of the same rows, and beside a matmul.

Rows go from one rank of `distca.loopback` to another, and from one rank of NVSHMEM to itself. The latter has a process
of its own, because NVSHMEM may end a process in which it does not begin. In both cases the kernel that serves all peers
that load and store reach sends the rows, on a stream of the transport's own. The host's clock times them from the call
until they are there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch

import distca
from distca.apps.bench.gpu import require_gpu
from distca.apps.bench.harness import Result, Row
from distca.apps.common.timing import Work, alternate, in_turn, median_ratio
from distca.connect.launch import RankError
from distca.errors import DeviceError, DistcaError
from distca.testing import _emulation

ROW_BYTES = 4096
SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
SHORT_SIZES = (1 << 16, 1 << 20, 1 << 24)
BESIDE_BYTES = 1 << 24
MATMUL_ROWS, MATMULS = 8192, 8
WORD = 0  # of the signals; all are free, because the contexts take no steps


class Pair(NamedTuple):
    """The context that puts and the context that is put to, both in this process."""

    sender: distca.Context
    receiver: distca.Context


class MatmulBeside:
    """A timer: seconds of products of bf16 matrices on a stream of their own, while other work is repeated."""

    def __init__(self) -> None:
        self._a, self._b, self._c = torch.randn(3, MATMUL_ROWS, MATMUL_ROWS, device="cuda", dtype=torch.bfloat16)
        self._stream = torch.cuda.Stream()
        torch.cuda.synchronize()  # the matrices must be there before that stream reads them

    def __call__(self, work: Work) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            begin.record()
            for _ in range(MATMULS):
                torch.mm(self._a, self._b, out=self._c)
            end.record()
        while not end.query():
            work()
        return begin.elapsed_time(end) * 1e-3


def transport(rounds: int | None = None, short: bool = False) -> Result:
    """Runs the benchmark over the GPU transports that are available here."""
    require_gpu()
    sizes, rounds = SHORT_SIZES if short else SIZES, rounds or (20 if short else 40)
    result = _measured(["loopback"], sizes, rounds)
    if not result.rows:
        raise DeviceError(f"bench: no loopback on this GPU: {result.details['missing']['loopback']}")
    try:
        [apart] = distca.launch(_measured, ["nvshmem"], sizes, rounds, ranks=1)
    except RankError as error:
        result.details["missing"]["nvshmem"] = error.headline
    else:
        result.rows.extend(row for row in apart.rows if "nvshmem" in row.name)
        result.details["missing"].update(apart.details["missing"])
    return result


def _measured(names: list[str], sizes: tuple[int, ...], rounds: int) -> Result:
    """The benchmark over these transports, as far as they are available here."""
    with ExitStack() as stack:
        pairs, missing = connect(names, "cuda", 2 * max(*sizes, BESIDE_BYTES), stack)
        if not pairs:
            return Result("transport-cuda", [], {"missing": missing})
        result = transport_of(pairs, sizes, rounds, MatmulBeside(), "cuda", _synchronize)
    result.details["missing"] = missing
    return result


def _synchronize() -> None:
    """Waits for what this thread has queued, and not for matmuls on another stream."""
    torch.cuda.current_stream().synchronize()


def connect(
    names: Iterable[str], device: str, heap_bytes: int, stack: ExitStack
) -> tuple[dict[str, Pair], dict[str, str]]:
    """Those of these transports that are available on a device, and why the others are not. `stack` closes their
    contexts.
    """
    heads = distca.Heads(q=1, kv=1, dim=64, dtype=torch.bfloat16)
    options: dict[str, Any] = {"max_tokens": 1, "heads": heads, "heap_bytes": heap_bytes, "device": device}
    makers: dict[str, Callable[[], list[distca.Context]]] = {
        "loopback": lambda: distca.loopback(2, **options),
        "nvshmem": lambda: [distca.init(transport="nvshmem", name="bench/nvshmem", **options)],
    }
    pairs, missing = {}, {}
    for name in names:
        try:
            contexts = [stack.enter_context(context) for context in makers[name]()]
        except DistcaError as error:
            missing[name] = str(error)
        else:
            pairs[name] = Pair(contexts[0], contexts[-1])
    return pairs, missing


def transport_of(
    pairs: Mapping[str, Pair],
    sizes: tuple[int, ...],
    rounds: int,
    beside: Callable[[Work], float],
    device: str,
    synchronize: Work,
) -> Result:
    """Runs the benchmark over these transports. `beside` times a matmul while it repeats other work."""
    rows: list[Row] = []
    for size in sizes:
        source, copy = torch.ones(2, size, dtype=torch.uint8, device=device)
        works = [in_turn(partial(copy.copy_, source), synchronize)]
        works += [in_turn(partial(_send, pair, source), synchronize) for pair in pairs.values()]
        copies, *sends = alternate(works, rounds)
        name = f"{size >> 10} KiB"
        rows.append(Row(f"{name}: copy on the device, median", size / statistics.median(copies) / 1e9, "GB/s"))
        rows += [
            Row(f"{name}: bandwidth of {over} / copy", median_ratio(copies, times), "x")
            for over, times in zip(pairs, sends, strict=True)
        ]
    source = torch.ones(BESIDE_BYTES, dtype=torch.uint8, device=device)
    counted = [_Counted(in_turn(partial(_send, pair, source), synchronize)) for pair in pairs.values()]
    alone, *times_beside = alternate([lambda: None, *counted], rounds, beside)
    for over, work, times in zip(pairs, counted, times_beside, strict=True):
        name = f"matmul beside puts of {BESIDE_BYTES >> 20} MiB by {over}"
        rows.append(Row(f"{name}: time / alone", median_ratio(times, alone), "x"))
        rows.append(Row(f"{name}: puts in a matmul", work.count / (rounds + 1), ""))
    details = {"row_bytes": ROW_BYTES, "rounds": rounds, "device": device, "matmuls": [MATMULS, *3 * [MATMUL_ROWS]]}
    return Result("transport-cuda", rows, details)


class _Counted:
    """Work with a count of how often it was done."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.count = 0

    def __call__(self) -> None:
        self._work()
        self.count += 1


def _send(pair: Pair, rows: torch.Tensor) -> None:
    """Sends rows. What is queued next comes after them."""
    core = pair.sender._core
    assert core is not None
    _emulation.send_rows(core, pair.receiver.rank, rows.data_ptr(), rows.numel() // ROW_BYTES, ROW_BYTES, WORD, 1)
    _emulation.join(core)
