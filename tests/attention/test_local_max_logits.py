"""The largest logits of `distca.attention`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import distca
from support.batches import LENGTHS, random_batch
from support.largest_logits import largest_logits
from support.local_tasks import cut, whole


@pytest.mark.parametrize("tasks", [whole, partial(cut, seed=1)], ids=["whole documents", "cut"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_attention_of_one_process_finds_those_of_the_rows_that_have_a_task(dtype: torch.dtype, tasks: Any) -> None:
    heads = distca.Heads(8, 2, 64, 32, dtype)
    batch = random_batch(LENGTHS, heads, 1)
    for options in ({}, {"softcap": 2.0, "scale": -0.5}, {"window": 30}, {"mask": "full"}):
        if tasks is not whole and "mask" in options:
            continue
        rows = torch.tensor(tasks(batch.lengths))
        out, lse, found = distca.attention(batch.q, batch.k, batch.v, rows, **options, max_logits=True)
        plain = distca.attention(batch.q, batch.k, batch.v, rows, **options)
        assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])
        has_task = torch.zeros(sum(LENGTHS), dtype=torch.bool)
        for begin, end, *_ in rows.tolist():
            has_task[begin:end] = True
        right = largest_logits(batch, **options)[has_task].amax(0)
        torch.testing.assert_close(found.double(), right, rtol=1e-6, atol=1e-6)
