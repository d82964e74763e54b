"""`distca bench attention`: the local kernel against PyTorch's own attention, document by document, and against itself.

A causal document counts half the FLOP of a full one. Forward has 2 products and backward 5; backward is 2.5 x forward.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import distca
from distca.apps.bench.harness import Result, Row
from distca.apps.common.timing import alternate, median_ratio, spread

HEADS = 8
#: Ratios that the kernel should reach, forward and backward, by dtype.
WANTED = {torch.float32: (2.5, 2.0), torch.bfloat16: (3.0, 2.5)}
#: For bf16 on tiles, which PyTorch's own attention uses too.
WANTED_ON_TILES = (1.2, 1.3)
SHORT_WANTED, MIX_WANTED, BF16_WANTED = 3.0, (0.95, 0.9), 0.95
_WAYS = {
    "floats": ("products in fp32", "multiply-adds on registers alone"),
    "pairs": ("dot products of bf16", "multiply-adds on registers alone"),
    "tiles": ("tiles of bf16", "multiply-adds on tiles alone"),
}


class Case(NamedTuple):
    """Causal documents of these lengths, one after another."""

    name: str
    lengths: tuple[int, ...]
    dim: int
    dtype: torch.dtype


def run(rounds: int | None = None, short: bool = False) -> Result:
    """Forward and backward. ``short`` leaves out the documents of 8192 rows and more, and flex_attention.

    Calls for many short documents, of milliseconds each, take five times as many rounds.
    """
    rounds = rounds or (3 if short else 7)
    rows: list[Row] = []
    details: dict[str, Any] = {"heads": HEADS, "rounds": rounds, "kernels": {}, "cases": {}}
    peaks = {dtype: _peak(dtype) for dtype in WANTED}
    for dtype, peak in peaks.items():
        rows.append(Row(f"{_short(dtype)}: {_kernel(dtype)}, {_multiply_adds(dtype)}", peak / 1e9, "GFLOP/s"))
        details["kernels"][_short(dtype)] = _kernel(dtype)
    for phase, ratio in _bf16_against_fp32(rounds).items():
        name = f"bf16 D 64, 4096, {phase}: time of our fp32 / of our bf16"
        rows.append(Row(name, ratio, "x", at_least=BF16_WANTED))
    for case in _cases(short):
        for phase, figures in _against_sdpa(case, rounds if len(case.lengths) == 1 else 5 * rounds).items():
            details["cases"][f"{case.name} {phase}"] = figures
            rows += _rows(case, phase, figures, peaks[case.dtype])
    for dtype in (torch.float32, torch.bfloat16):
        for phase, ratio in _mix_against_dense(dtype, rounds).items():
            name = f"shards of 128 and more, {_short(dtype)} {phase}: rate / dense rate"
            rows.append(Row(name, ratio, "x", at_least=MIX_WANTED[phase == "backward"]))
    if not short:
        rows.append(Row("flex_attention forward, fp32 D 64, 4096: its time / ours", _flex_ratio(rounds), "x"))
    return Result("attention", rows, details)


def _peak(dtype: torch.dtype) -> float:
    """Floating-point operations a second of multiply-adds on registers, with as many threads as PyTorch has."""
    number, threads = distca.Heads(1, 1, 8, dtype=dtype).dtype_number, torch.get_num_threads()
    return max(distca._C.measure_peak_flops(number, threads, 0.2) for _ in range(5))


def _kernel(dtype: torch.dtype) -> str:
    """The variant of the kernel that computes inputs of this dtype here."""
    return f"{distca._C.cpu_isa()}, {_WAYS[_operands(dtype)][0]}"


def _multiply_adds(dtype: torch.dtype) -> str:
    """What the peak is measured on."""
    return _WAYS[_operands(dtype)][1]


def _operands(dtype: torch.dtype) -> str:
    return distca._C.cpu_operands(distca.Heads(1, 1, 8, dtype=dtype).dtype_number)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def _cases(short: bool) -> list[Case]:
    generator = random.Random(0)
    documents = tuple(generator.randint(64, 512) for _ in range(24))
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        for dim in (64, 128):
            name = f"{_short(dtype)} D {dim}"
            if not short:
                cases += [Case(f"{name}, {n}", (n,), dim, dtype) for n in (8192, 16384)]
            cases.append(Case(f"{name}, 4096", (4096,), dim, dtype))
            if dim == 64:
                cases.append(Case(f"{name}, 24 of 64-512", documents, dim, dtype))
    return cases


def _inputs(case: Case) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = (4, sum(case.lengths), HEADS, case.dim)
    return torch.randn(shape, generator=generator).to(case.dtype).unbind()


def _tasks(lengths: Sequence[int]) -> torch.Tensor:
    ends = torch.tensor(lengths).cumsum(0)
    begins = ends - torch.tensor(lengths)
    return torch.stack([begins, ends, begins, ends], 1)


def _backward(outs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> Any:
    return partial(torch.autograd.grad, outs, inputs, grads, retain_graph=True)


def _phases(case: Case) -> dict[str, Callable[[], object]]:
    """The kernel's forward and backward of a case."""
    q, k, v, dout = _inputs(case)
    tasks = _tasks(case.lengths)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = distca.attention(leaves[0], leaves[1], leaves[2], tasks)[0]
    return {"forward": lambda: distca.attention(q, k, v, tasks), "backward": _backward([out], leaves, [dout])}


def _bf16_against_fp32(rounds: int) -> dict[str, float]:
    """Times bf16 against fp32, both computed by the kernel. A CPU on which bf16 is slower has the wrong variant."""
    of_fp32, of_bf16 = (_phases(Case("", (4096,), 64, dtype)) for dtype in (torch.float32, torch.bfloat16))
    return {phase: median_ratio(*alternate((of_fp32[phase], of_bf16[phase]), rounds)) for phase in of_fp32}


def _against_sdpa(case: Case, rounds: int) -> dict[str, dict[str, float]]:
    """Times the kernel against SDPA, on contiguous documents [1, heads, rows, dim], on which it is fastest."""
    q, k, v, dout = _inputs(case)
    split = [[t.transpose(0, 1)[None].contiguous() for t in x.split(case.lengths)] for x in (q, k, v, dout)]

    def sdpa(*documents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in zip(*documents, strict=True)]

    split_leaves = [[t.detach().requires_grad_() for t in of_kind] for of_kind in split[:3]]
    flat = [t for of_kind in split_leaves for t in of_kind]
    peers = {"forward": lambda: sdpa(*split[:3]), "backward": _backward(sdpa(*split_leaves), flat, split[3])}
    flop = sum(2 * n * n * case.dim * HEADS for n in case.lengths)
    figures = {}
    for phase, work in _phases(case).items():
        ours, theirs = alternate((work, peers[phase]), rounds)
        figures[phase] = {
            "ratio": 1 / median_ratio(ours, theirs),
            "gflops": (2.5 if phase == "backward" else 1.0) * flop / statistics.median(ours) / 1e9,
            "spread": spread(ours),
            "peer_spread": spread(theirs),
        }
    return figures


def _rows(case: Case, phase: str, figures: dict[str, float], peak: float) -> list[Row]:
    wanted = (WANTED_ON_TILES if _operands(case.dtype) == "tiles" else WANTED[case.dtype])[phase == "backward"]
    if len(case.lengths) > 1:
        wanted = SHORT_WANTED
    return [
        Row(f"{case.name}, {phase}: SDPA's time / ours", figures["ratio"], "x", at_least=wanted),
        Row(f"{case.name}, {phase}: rate", figures["gflops"], "GFLOP/s"),
        Row(f"{case.name}, {phase}: share of the {_multiply_adds(case.dtype)}", figures["gflops"] * 1e9 / peak, "x"),
    ]


def _mix_against_dense(dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Times the same documents whole, and cut into tasks of at least 128 rows that come in any order."""
    case = Case("", (4096, 2048, 2048), 64, dtype)
    q, k, v, dout = _inputs(case)
    generator = random.Random(1)
    mixed = []
    for begin, end, *_ in _tasks(case.lengths).tolist():
        row = begin
        while row < end:
            cut = end if end - row < 256 else min(row + generator.randint(128, 700), end - 128)
            mixed.append((row, cut, begin, cut))
            row = cut
    generator.shuffle(mixed)
    ratios = {}
    whole, cut_up = _tasks(case.lengths), torch.tensor(mixed)
    dense, mix = alternate([partial(distca.attention, q, k, v, tasks) for tasks in (whole, cut_up)], rounds)
    ratios["forward"] = median_ratio(dense, mix)
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    backwards = [
        _backward([distca.attention(leaves[0], leaves[1], leaves[2], tasks)[0]], leaves, [dout])
        for tasks in (whole, cut_up)
    ]
    dense, mix = alternate(backwards, rounds)
    ratios["backward"] = median_ratio(dense, mix)
    return ratios


def _flex_ratio(rounds: int) -> float:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case = Case("", (4096,), 64, torch.float32)
    q, k, v, _ = _inputs(case)
    batched = [t.transpose(0, 1)[None].contiguous() for t in (q, k, v)]
    block_mask = create_block_mask(lambda _b, _h, i, j: i >= j, None, None, 4096, 4096, device="cpu")
    compiled = torch.compile(flex_attention)
    with torch.no_grad():
        ours, theirs = alternate(
            [
                partial(distca.attention, q, k, v),
                partial(compiled, batched[0], batched[1], batched[2], block_mask=block_mask),
            ],
            rounds,
        )
    return 1 / median_ratio(ours, theirs)
