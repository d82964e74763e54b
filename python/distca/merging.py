"""`merge_states`: attention over all keys, of attention over parts of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from distca.errors import InvalidArgumentError


def merge_states(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys, of attention of the same queries over parts of them that share no key.

    Each part comes from `distca.core_attention`, `distca.attention` or another attention that returns the log-sum-exp
    (FlashInfer's function of this name does the same). The result is differentiable, and exact but for the rounding of
    the parts. Where rows have sinks, exactly one part takes them.

    Args:
        outs: the outputs ``[T, H, Dv]`` of the parts, all of one dtype.
        lses: their natural log-sum-exps ``[T, H]``, float32.

    Returns:
        out ``[T, H, Dv]`` in the dtype of the parts, and lse ``[T, H]`` float32. A row that sees no key in any part has
        out 0 and lse -inf, and its gradients are zero.

    Raises:
        InvalidArgumentError: there is no part, or shapes or dtypes do not go together.
    """
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise InvalidArgumentError(f"merge_states: {len(outs)} outs and {len(lses)} lses; the same number is expected")
    for out, lse in zip(outs, lses, strict=True):
        _check(out, lse, outs[0])
    stacked = torch.stack(lses)
    unseen = stacked == -math.inf
    nothing = unseen.all(0)
    finite = stacked.masked_fill(nothing, 0.0)  # of -inf alone, softmax would make NaN
    shares = torch.softmax(finite, 0)
    merged: Any = sum(
        share[..., None] * out.float().masked_fill(hidden[..., None], 0.0)  # there an attention may leave anything
        for share, out, hidden in zip(shares, outs, unseen, strict=True)
    )
    return merged.to(outs[0].dtype), torch.logsumexp(finite, 0).masked_fill(nothing, -math.inf)


def _check(out: Any, lse: Any, first: Any) -> None:
    if not isinstance(out, torch.Tensor) or not isinstance(lse, torch.Tensor):
        raise InvalidArgumentError(
            f"merge_states: a part is a {type(out).__name__} and a {type(lse).__name__}; tensors are expected"
        )
    if (
        lse.dtype != torch.float32
        or out.shape[:-1] != lse.shape
        or (out.shape, out.dtype) != (first.shape, first.dtype)
    ):
        raise InvalidArgumentError(
            f"merge_states: an out is {out.dtype} {list(out.shape)} with an lse {lse.dtype} {list(lse.shape)}; "
            f"out {first.dtype} {list(first.shape)} and lse float32 {list(first.shape[:-1])} are expected"
        )
