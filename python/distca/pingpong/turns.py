"""The places in a layer's attention where a half of a ping-pong gives the turn to the other half."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from distca.planner.plan_source import Resolved
from distca.steps import Step, attend, begin, collect

here = threading.local()
"""Per thread: `half` is the half that is running, or None outside of a ping-pong's forward pass."""


class _Pauses(Protocol):
    def pause(self, step: Step) -> None: ...


def in_half() -> bool:
    """Whether this thread is in the forward pass of a half of a ping-pong."""
    return getattr(here, "half", None) is not None


def core_attention_in_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Resolved, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Does what `core_attention` does in three calls, and gives the turn away between them.

    Activation checkpointing runs it again in backward. There it gives no turn away, and the three calls follow each
    other.
    """
    half: _Pauses | None = getattr(here, "half", None)
    if torch._C._current_graph_task_id() != -1:  # in backward
        half = None
    step = begin(q, k, v, call, **options)
    if half is not None:
        half.pause(step)
    attend(step)
    if half is not None:
        half.pause(step)
    return collect(step)
