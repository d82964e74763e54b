"""Tensors and scales that do not fit are refused before anything moves, and the context works on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import distca
from support.refusals import Group, Tensors

WRONG_TENSORS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Tensors], list[str]]] = {
    "q shorter": (lambda q, k, v: (q[:-1], k, v), ["different lengths", "[83, 4, 16]", "[84, 2, 16]"]),
    "k shorter": (lambda q, k, v: (q, k[:-1], v), ["different lengths", "[83, 2, 16]"]),
    "v shorter": (lambda q, k, v: (q, k, v[:-1]), ["different lengths", "[83, 2, 24]"]),
    "all shorter": (lambda q, k, v: (q[:-1], k[:-1], v[:-1]), ["another layout", "84 rows", "83"]),
    "no rows": (lambda q, k, v: (q[:0], k[:0], v[:0]), ["another layout", "84 rows", "0"]),
    "k another dtype": (lambda q, k, v: (q, k.bfloat16(), v), ["different dtypes", "float32, bfloat16, float32"]),
    "v another dtype": (lambda q, k, v: (q, k, v.bfloat16()), ["different dtypes", "float32, float32, bfloat16"]),
    "float64": (lambda q, k, v: (q.double(), k.double(), v.double()), ["float32, bfloat16 and float16 are supported"]),
    "float16": (lambda q, k, v: (q.half(), k.half(), v.half()), ["plan was made for", "float32", "float16"]),
    "integers": (lambda q, k, v: (q.long(), k.long(), v.long()), ["float32, bfloat16 and float16 are supported"]),
    "q on another device": (lambda q, k, v: (q.to("meta"), k, v), ["device"]),
    "k on another device": (lambda q, k, v: (q, k.to("meta"), v), ["device"]),
    "v on another device": (lambda q, k, v: (q, k, v.to("meta")), ["device"]),
    "k another dim": (lambda q, k, v: (q, k[..., :8], v), ["different head dims", "[84, 2, 8]"]),
    "v another head count": (lambda q, k, v: (q, k, v[:, :1]), ["different head counts", "[84, 1, 24]"]),
    "odd head counts": (lambda q, k, v: (q[:, :3], k, v), ["q has 3 heads, k has 2"]),
    "no key heads": (lambda q, k, v: (q, k[:, :0], v[:, :0]), ["k has 0"]),
    "dim of 12": (lambda q, k, v: (q[..., :12], k[..., :12], v), ["head dim 12", "multiples of 8"]),
    "wider value dim": (lambda q, k, v: (q, k, torch.cat([v, v[..., :8]], 2)), ["values 24", "values 32"]),
    "q last stride": (lambda q, k, v: (q.repeat(1, 1, 2)[..., ::2], k, v), ["q:", "contiguous", "stride is 2"]),
    "k last stride": (lambda q, k, v: (q, k.transpose(1, 2).contiguous().transpose(1, 2), v), ["k:", "contiguous"]),
    "v last stride": (lambda q, k, v: (q, k, v[..., :1].expand(-1, -1, 24)), ["v:", "contiguous", "stride is 0"]),
    "a batch dimension": (lambda q, k, v: (q[None], k[None], v[None]), ["q", "[tokens, heads, dim]"]),
    "no head dimension": (lambda q, k, v: (q[:, 0], k[:, 0], v[:, 0]), ["q", "[tokens, heads, dim]"]),
}


@pytest.mark.parametrize("wrong", WRONG_TENSORS)
def test_tensors_that_do_not_fit_are_refused_before_anything_moves(group: Group, wrong: str) -> None:
    change, said = WRONG_TENSORS[wrong]
    with pytest.raises(distca.InvalidArgumentError) as caught:
        group.attend(change(*group.inputs()), group.plan)
    for words in said:
        assert words in str(caught.value)
    group.check_still_works()


@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_a_scale_that_is_no_number_is_refused(group: Group, scale: float) -> None:
    with pytest.raises(distca.InvalidArgumentError, match="scale = "):
        group.attend(group.inputs(), group.plan, scale=scale)
    group.check_still_works()


def test_mixed_devices_are_refused_by_the_local_operator_too() -> None:
    q, k, v = torch.zeros(5, 2, 8), torch.zeros(5, 1, 8), torch.zeros(5, 1, 8)
    for inputs in ((q.to("meta"), k, v), (q, k.to("meta"), v), (q, k, v.to("meta"))):
        with pytest.raises(distca.InvalidArgumentError, match="device"):
            distca.attention(*inputs)
