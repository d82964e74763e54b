"""ATen's flash attention with variable lengths on the CPU, so that its callers can be tested there.

It follows the operator's contract: it computes the textbook formula in float64, rounds at the end, and asserts
everything that the CUDA kernels rely on.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch


@cache
def register() -> torch.library.Library:
    """Makes aten::_flash_attention_forward and _backward work for CPU tensors in this process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", _forward, "CPU")
    library.impl("_flash_attention_backward", _backward, "CPU")
    return library


def _check_rows(*tensors: torch.Tensor) -> None:
    for t in tensors:
        assert t.dim() == 3 and t.dtype in (torch.bfloat16, torch.float16), (t.shape, t.dtype)
        assert t.stride(2) == 1 and t.data_ptr() % 16 == 0, (t.stride(), t.data_ptr())
        assert all(stride % 8 == 0 for stride in t.stride()[:2]), t.stride()
        # Stricter than ATen's kernels: the rows of distca's own come from the same function.
        assert all(stride > 0 or size <= 1 for stride, size in zip(t.stride(), t.shape, strict=True)), t.stride()
        assert t.shape[2] % 8 == 0 and t.shape[2] <= 256


def _check_ends(ends: torch.Tensor, total: int) -> None:
    assert ends.dtype == torch.int32 and ends.is_contiguous()
    words = ends.tolist()
    assert words[0] == 0 and words[-1] == total and all(a <= b for a, b in zip(words, words[1:], strict=False)), words


def _sequences(q_ends: torch.Tensor, kv_begins: torch.Tensor, kv_lengths: torch.Tensor | None) -> list[Any]:
    rows = q_ends.tolist()
    begins = kv_begins.tolist()
    lengths = [b - a for a, b in zip(begins, begins[1:], strict=False)] if kv_lengths is None else kv_lengths.tolist()
    assert len(rows) == len(begins) == len(lengths) + 1
    return [
        (slice(rows[i], rows[i + 1]), slice(begins[i], begins[i] + lengths[i]), rows[i + 1] - rows[i], lengths[i])
        for i in range(len(lengths))
    ]


def _scores(q: Any, k: Any, scale: float, causal: bool, left: int | None, right: int | None) -> torch.Tensor:
    """Scores [H, rows, keys] in float64, -inf where a row does not see a key. The last row is aligned with the last
    key.
    """
    group = q.shape[1] // k.shape[1]
    assert scale > 0, scale  # scores that are not seen are -inf before they are scaled
    scores = torch.einsum("ihd,jhd->hij", q.double(), k.double().repeat_interleave(group, 1)) * scale
    rows, keys = scores.shape[1:]
    # The distance of key j from the key of row i.
    distance = torch.arange(keys)[None] - (torch.arange(rows)[:, None] + keys - rows)
    last = 0 if causal else math.inf if right is None else right
    first = -math.inf if left is None else -left
    return scores.masked_fill((distance > last) | (distance < first), -math.inf)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[torch.Tensor, ...]:
    _check_rows(query, key, value)
    _check_ends(cum_seq_q, query.shape[0])
    if seqused_k is None:
        _check_ends(cum_seq_k, key.shape[0])
    assert (dropout_p, return_debug_mask, alibi_slopes, block_table, num_splits) == (0.0, False, None, None, None)
    out, lse = torch.full_like(query, math.nan), torch.full((query.shape[1], query.shape[0]), math.nan)
    group = query.shape[1] // key.shape[1]
    for rows, keys, num_rows, num_keys in _sequences(cum_seq_q, cum_seq_k, seqused_k):
        assert max_q >= 2 and num_rows <= max_q and num_keys <= max_k and keys.stop <= key.shape[0]
        scores = _scores(query[rows], key[keys], scale, is_causal, window_size_left, window_size_right)
        values = value[keys].double().repeat_interleave(group, 1)
        out[rows] = torch.einsum("hij,jhd->ihd", scores.softmax(2), values).to(query.dtype)
        lse[:, rows] = scores.logsumexp(2).float()
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), query.new_empty(0)


def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: torch.Tensor,
    unused: torch.Tensor,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[torch.Tensor, ...]:
    _check_rows(grad_out, query, key, value, out)
    assert grad_out.is_contiguous() and out.is_contiguous() and logsumexp.is_contiguous() and dropout_p == 0.0
    assert logsumexp.shape == (query.shape[1], query.shape[0]) and logsumexp.dtype == torch.float32
    assert rng_state.dtype == unused.dtype == torch.uint64
    _check_ends(cum_seq_q, query.shape[0])
    _check_ends(cum_seq_k, key.shape[0])  # no key belongs to two sequences
    dq, dk, dv = (torch.full_like(t, math.nan) for t in (query, key, value))
    group = query.shape[1] // key.shape[1]
    delta = (out.double() * grad_out.double()).sum(2).T
    for rows, keys, num_rows, num_keys in _sequences(cum_seq_q, cum_seq_k, None):
        assert num_rows <= max_q and num_keys <= max_k
        scores = _scores(query[rows], key[keys], scale, is_causal, window_size_left, window_size_right)
        p = (scores - logsumexp[:, rows, None].double()).exp()
        of_out = grad_out[rows].double()
        dp = torch.einsum("ihd,jhd->hij", of_out, value[keys].double().repeat_interleave(group, 1))
        ds = p * (dp - delta[:, rows, None]) * scale

        def of_key_heads(t: torch.Tensor) -> torch.Tensor:
            return t.unflatten(1, (-1, group)).sum(2)

        dq[rows] = torch.einsum("hij,jhd->ihd", ds, key[keys].double().repeat_interleave(group, 1)).to(dq.dtype)
        dk[keys] = of_key_heads(torch.einsum("hij,ihd->jhd", ds, query[rows].double())).to(dk.dtype)
        dv[keys] = of_key_heads(torch.einsum("hij,ihd->jhd", p, of_out)).to(dv.dtype)
    return dq, dk, dv
