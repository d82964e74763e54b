"""Where a layer's attention gives the other half of a ping-pong its turn."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from distca.planner.plan import Plan
from distca.steps import Step, attend, collect, dispatch

here = threading.local()
"""This thread's `half`, the one that is running; None outside of a ping-pong's forward pass."""


class _Pauses(Protocol):
    def pause(self, step: Step) -> None: ...


def in_half() -> bool:
    """Whether this thread is in a half of a ping-pong forward pass."""
    return getattr(here, "half", None) is not None


def core_attention_in_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """`core_attention` as three calls, between which the other half takes its turn.

    In backward, activation checkpointing runs it again: then there is no other half, and the three follow each other.
    """
    half: _Pauses | None = getattr(here, "half", None)
    if torch._C._current_graph_task_id() != -1:  # in backward
        half = None
    step = dispatch(q, k, v, plan, **options)
    if half is not None:
        half.pause(step)
    attend(step)
    if half is not None:
        half.pause(step)
    return collect(step)
