"""Activation checkpointing that does not run attention twice."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def save_core_attention() -> Any:
    """Saves the outputs of ``core_attention`` and recomputes everything else.

    Plain activation checkpointing runs every operator of a layer again in backward, attention with its traffic among
    them: right, but twice the steps. With this policy the operator's outputs are kept:

        torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=distca.save_core_attention)

    Returns:
        What ``context_fn`` of ``torch.utils.checkpoint.checkpoint`` must return.
    """
    return create_selective_checkpoint_contexts(_policy)


def _policy(_ctx: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    ops = torch.ops.distca
    whole = (ops.core_attention.default, ops.core_attention_retain.default)
    # Of a step in parts all are kept, so that none is begun again.
    parts = (ops.dispatch.default, ops.attend.default, ops.collect.default, ops.collect_retained.default)
    if operator in whole + parts:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
