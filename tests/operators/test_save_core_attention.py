"""`distca.save_core_attention` where core attention is the last thing that checkpointing would run again."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

import distca
from support.ranks import launch

HEADS = distca.Heads(q=2, kv=1, dim=8)


def _backward_of_attention_alone() -> tuple[torch.Tensor, int]:
    """Checkpointing stops inside of the call of core attention, because backward needs nothing that comes after it."""
    with distca.init(max_tokens=64, heads=HEADS, timeout=10) as context:
        plan = distca.plan(distca.Layout.from_documents([[40], [10, 30]]), HEADS, context=context, min_rows=8)
        q = torch.randn(40, 2, 8, generator=torch.Generator().manual_seed(context.rank), requires_grad=True)
        attend = lambda q: distca.core_attention(q, q[:, :1], q[:, 1:], plan)[0]  # noqa: E731
        if context.rank == 0:  # the steps are the same with and without
            checkpoint(attend, q, use_reentrant=False, context_fn=distca.save_core_attention).sum().backward()
        else:
            attend(q).sum().backward()
        saved, steps = q.grad, context.step
        q.grad = None
        attend(q).sum().backward()
        assert saved is not None and q.grad is not None
        return saved - q.grad, steps


def test_stopping_inside_of_core_attention_is_no_error_of_the_peers() -> None:
    for difference, steps in launch(_backward_of_attention_alone, ranks=2):
        assert not difference.any()
        assert steps == 2  # forward ran once
