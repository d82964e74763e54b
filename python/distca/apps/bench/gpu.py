"""`distca bench attention|shards --device cuda`: the local kernel on a GPU against the attention of PyTorch and others.

CUDA events time one call each, after the L2 cache was overwritten. That takes so long that the host has queued the call
before it begins; what the host needs for a call is a figure of its own. Figures are medians over rounds in which all
peers take turns. Data is random, because matrix products of zeros run faster.
"""

from __future__ import annotations

import importlib
import inspect
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import distca
from distca import _C
from distca.apps.bench.harness import Result, Row
from distca.apps.common.timing import Work, alternate, spread
from distca.errors import DeviceError

Q_HEADS, KV_HEADS = 32, 8
SHARD_ROWS = 8192
SHARDS = (64, 128, 256, 512, 1024, 2048)
_SEED = 0
_COLD_BYTES = 1 << 30  # many times the L2 cache


class Case(NamedTuple):
    """Causal documents of these lengths, one after another, in bf16."""

    name: str
    lengths: tuple[int, ...]
    dim: int


class Timer:
    """A timer: seconds of one call on a device, from a cold L2 cache."""

    def __init__(self) -> None:
        self._cold = torch.empty(_COLD_BYTES, dtype=torch.uint8, device="cuda")

    def __call__(self, work: Work) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):
            self._cold.zero_()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3


def host_seconds(work: Work) -> float:
    """Seconds that the host needs to queue a call."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    torch.cuda.synchronize()
    return seconds


def require_gpu() -> None:
    """Raises DeviceError if PyTorch finds no GPU."""
    if not torch.cuda.is_available():
        raise DeviceError("bench: --device cuda, but PyTorch finds no CUDA device here")


def attention(rounds: int | None = None, short: bool = False) -> Result:
    """Forward and backward of causal documents, against every peer that is installed."""
    require_gpu()
    return attention_of(list(_cases(short)), rounds or (5 if short else 15), Timer(), "cuda")


def shards(rounds: int | None = None, short: bool = False) -> Result:
    """Forward and backward of one causal document, whole and cut into tasks of equal length."""
    require_gpu()
    return shards_of(SHARD_ROWS, SHARDS, rounds or (5 if short else 15), Timer(), "cuda")


def _cases(short: bool) -> Iterator[Case]:
    generator = random.Random(_SEED)
    mixed = tuple(generator.randint(256, 6000) for _ in range(10))
    for dim in (128,) if short else (64, 128, 256):
        for length in (2048, 8192, 32768) if not short else (4096, 16384):
            yield Case(f"D {dim}, {length}", (length,), dim)
        yield Case(f"D {dim}, 10 of 256-6000", mixed, dim)
    if kernel("cuda") == "own":  # flash attention takes up to 256
        for length in (8192,) if short else (2048, 8192):
            yield Case(f"D 512, {length}", (length,), 512)


class Inputs(NamedTuple):
    """q, k and v as leaves that require gradients, and the gradient of the output."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


def _inputs(lengths: Sequence[int], dim: int, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(_SEED)

    def normal(heads: int) -> torch.Tensor:
        rows = torch.randn(sum(lengths), heads, dim, generator=generator, device=device)
        return rows.to(torch.bfloat16)

    q, k, v = (normal(heads).requires_grad_() for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    return Inputs(q, k, v, normal(Q_HEADS))


def _ends(lengths: Sequence[int]) -> list[int]:
    return torch.tensor([0, *lengths]).cumsum(0).tolist()


# ---- the peers: each computes out [rows, heads, dim] from the inputs, or raises if it cannot


def kernel(device: str) -> str:
    """Chooses what computes: distca's own kernels if the device has some, and otherwise flash attention."""
    own = device == "cpu" or (torch.cuda.get_device_capability() >= (8, 0) and _C.cuda_status()[0])
    return "own" if own else "flash"


def _ours(x: Inputs, lengths: Sequence[int]) -> Callable[[], torch.Tensor]:
    ends = _ends(lengths)
    tasks = torch.tensor([(a, b, a, b) for a, b in zip(ends, ends[1:], strict=False)])
    return partial(_attend, x, tasks)


def _attend(x: Inputs, tasks: torch.Tensor) -> torch.Tensor:
    return distca.attention(x.q, x.k, x.v, tasks, attention=kernel(x.q.device.type))[0]


def _sdpa(backend: SDPBackend, x: Inputs, lengths: Sequence[int]) -> Callable[[], torch.Tensor]:
    """Attention of PyTorch by one backend, document by document."""

    def forward() -> torch.Tensor:
        parts = []
        with sdpa_kernel(backend):
            for document in zip(*(t.split(list(lengths)) for t in (x.q, x.k, x.v)), strict=True):
                q, k, v = (t.transpose(0, 1)[None] for t in document)
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
                parts.append(out[0].transpose(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return forward


def _sdpa_of_wide_heads(backend: SDPBackend, x: Inputs, lengths: Sequence[int]) -> Callable[[], torch.Tensor]:
    """What PyTorch has for heads that flash attention does not take. Each query head gets keys of its own, before the
    forward is timed.
    """
    if x.q.shape[2] <= 256:
        raise ValueError("flash attention takes these heads")
    k, v = (t.repeat_interleave(Q_HEADS // KV_HEADS, 1) for t in (x.k, x.v))
    return _sdpa(backend, x._replace(k=k, v=v), lengths)


def _varlen(x: Inputs, lengths: Sequence[int]) -> Callable[[], torch.Tensor]:
    varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    ends = torch.tensor(_ends(lengths), dtype=torch.int32, device=x.q.device)
    longest = max(lengths)
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}  # torch 2.10
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    return lambda: varlen_attn(x.q, x.k, x.v, ends, ends, longest, longest, **options)


def _flash_attn_4(x: Inputs, lengths: Sequence[int]) -> Callable[[], torch.Tensor]:
    function: Any = importlib.import_module("flash_attn.cute").flash_attn_varlen_func
    ends = torch.tensor(_ends(lengths), dtype=torch.int32, device=x.q.device)

    def forward() -> torch.Tensor:
        out = function(x.q, x.k, x.v, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True)
        return out[0] if isinstance(out, tuple) else out

    return forward


PEERS: dict[str, Callable[[Inputs, Sequence[int]], Callable[[], torch.Tensor]]] = {
    "SDPA flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "SDPA cuDNN": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "SDPA efficient": partial(_sdpa_of_wide_heads, SDPBackend.EFFICIENT_ATTENTION),
    "varlen_attn": _varlen,
    "flash-attn-4": _flash_attn_4,
}


def _works(forward: Callable[[], torch.Tensor], x: Inputs) -> dict[str, Work]:
    """Forward and backward of one peer. Both are tried once."""
    out = forward()
    backward = partial(torch.autograd.grad, out, (x.q, x.k, x.v), x.dout, retain_graph=True)
    backward()

    def without_graph() -> object:
        with torch.no_grad():
            return forward()

    return {"forward": without_graph, "backward": backward}


def attention_of(cases: Sequence[Case], rounds: int, timer: Callable[[Work], float], device: str) -> Result:
    """Runs the benchmark of attention over these cases."""
    rows: list[Row] = []
    missing: dict[str, str] = {}
    details: dict[str, Any] = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "dtype": "bfloat16", "rounds": rounds}
    for case in cases:
        x = _inputs(case.lengths, case.dim, device)
        contestants = {"distca": _works(_ours(x, case.lengths), x)}
        for name, make in PEERS.items():
            try:
                contestants[name] = _works(make(x, case.lengths), x)
            except (ImportError, AttributeError, RuntimeError, TypeError, ValueError) as error:
                missing[f"{name}, {case.name}"] = str(error).splitlines()[0][:200] if str(error) else repr(error)
        flop = sum(2 * n * n * case.dim * Q_HEADS for n in case.lengths)  # of a causal forward: half of two products
        for phase, factor in (("forward", 1.0), ("backward", 2.5)):
            times = alternate([works[phase] for works in contestants.values()], rounds, timer)
            ours = statistics.median(times[0])
            details[f"{case.name}, {phase}"] = {
                name: {"seconds": statistics.median(t), "spread": spread(t)}
                for name, t in zip(contestants, times, strict=True)
            }
            rows.append(Row(f"{case.name}, {phase}: rate", factor * flop / ours / 1e12, "TFLOP/s"))
            for name, of_peer in list(zip(contestants, times, strict=True))[1:]:
                rows.append(Row(f"{case.name}, {phase}: {name}'s time / ours", statistics.median(of_peer) / ours, "x"))
            if device == "cuda":
                of_host = alternate([works[phase] for works in contestants.values()], rounds, host_seconds)
                seconds = {name: statistics.median(t) for name, t in zip(contestants, of_host, strict=True)}
                details[f"{case.name}, {phase}, host seconds"] = seconds
                rows.append(Row(f"{case.name}, {phase}: the host's time for a call", seconds["distca"] * 1e6, "us"))
    details["attention"] = kernel(device)
    return Result("attention-cuda", rows, {**details, "missing": missing, "device": device})


def shards_of(
    length: int, shard_rows: Sequence[int], rounds: int, timer: Callable[[Work], float], device: str
) -> Result:
    """Runs the benchmark of shards over one document of that length, cut into tasks of so many rows."""
    x = _inputs((length,), 128, device)
    works: dict[int, dict[str, Work]] = {}
    for n in (length, *shard_rows):
        tasks = torch.tensor([(i, i + n, 0, i + n) for i in range(0, length, n)])
        works[n] = _works(partial(_attend, x, tasks), x)
    rows = []
    for phase in ("forward", "backward"):
        times = alternate([of_length[phase] for of_length in works.values()], rounds, timer)
        whole = statistics.median(times[0])
        rows += [
            Row(f"tasks of {n} rows, {phase}: rate / rate of the whole document", whole / statistics.median(t), "x")
            for n, t in zip(shard_rows, times[1:], strict=True)
        ]
    details = {"rows": length, "dim": 128, "dtype": "bfloat16", "rounds": rounds, "device": device}
    details["attention"] = kernel(device)
    return Result("shards-cuda", rows, details)
