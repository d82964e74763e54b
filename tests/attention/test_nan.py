"""A NaN in one row of a document reaches the rows that see it and no others, not even by multiplication with zero."""

from __future__ import annotations

import pytest
import torch

import distca

LENGTH = 150  # more than two key blocks, and not a multiple of one


def gradients_and_results(tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    q, k, v = (one.clone().requires_grad_() for one in tensors[:3])
    out, lse = distca.attention(q, k, v)
    out.backward(tensors[3])
    return {"out": out.detach(), "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("row", [0, 1, 63, 64, 100, 128, LENGTH - 1])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_a_nan_reaches_no_row_that_does_not_see_it(name: str, row: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(row)
    tensors = [torch.randn(LENGTH, heads, 8, generator=generator).to(dtype) for heads in (4, 2, 2, 4)]
    clean = gradients_and_results(tensors)
    tensors[("q", "k", "v", "dout").index(name)][row] = float("nan")
    found = gradients_and_results(tensors)

    def unharmed(result: str, rows: slice) -> bool:
        return torch.equal(found[result][rows], clean[result][rows])

    before, after = slice(0, row), slice(row + 1, LENGTH)
    if name in ("k", "v"):  # earlier rows do not see this row as a key
        assert unharmed("out", before) and unharmed("lse", before) and unharmed("dq", before)
    # The NaN is in one query: other queries do not use it, nor do the gradients of later keys, which it does not see.
    else:
        assert all(unharmed(result, rows) for result in ("out", "lse", "dq") for rows in (before, after))
        assert unharmed("dk", after) and unharmed("dv", after)
    if name == "dout":
        assert torch.equal(found["out"], clean["out"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_row_whose_scores_are_all_minus_infinity_takes_nothing_of_any_value(dtype: torch.dtype) -> None:
    tensors = [torch.ones(LENGTH, heads, 8, dtype=dtype) for heads in (4, 2, 2)]
    q, k, v = tensors
    q[70], k[:], v[3] = -1e30, 1e30, float("nan")  # the products overflow
    out, lse = distca.attention(q, k, v)
    assert (lse[70] == -float("inf")).all()
    assert (out[70] == 0).all()
