"""The places in a layer's attention where a half of a ping-pong gives the turn to the other half."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from distca.inputs import in_compiled_code
from distca.planner.plan_source import Resolved
from distca.steps import Step, attend, begin, collect

here = threading.local()
"""Per thread: `half` is the half that is running, or None outside of a ping-pong's forward pass."""


class _Pauses(Protocol):
    calls: int

    def pause(self, step: Step) -> None: ...


def in_half() -> bool:
    """Whether this thread is in the forward pass of a half of a ping-pong."""
    return getattr(here, "half", None) is not None


def calls_of_half() -> int | None:
    """How often the half that is running has called core attention. None outside of a ping-pong's forward pass."""
    half: _Pauses | None = getattr(here, "half", None)
    return None if half is None else half.calls


def core_attention_in_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Resolved, **options: Any
) -> tuple[torch.Tensor, ...]:
    """Does what `core_attention` does in three calls, and gives the turn away between them.

    Compiled code makes the calls between two graphs.
    """
    if in_compiled_code():
        from distca.pingpong import outside_of_graphs

        results: tuple[torch.Tensor, ...] = outside_of_graphs.call(_make_calls, q, k, v, call, **options)
        return results
    return _make_calls(q, k, v, call, **options)


def _make_calls(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Resolved, **options: Any
) -> tuple[torch.Tensor, ...]:
    """The three calls of `core_attention_in_parts`.

    Activation checkpointing runs them again in backward. There they give no turn away, and follow each other.
    """
    half: _Pauses | None = getattr(here, "half", None)
    if torch._C._current_graph_task_id() != -1:  # in backward
        half = None
    step = begin(q, k, v, call, **options)
    if half is not None:
        half.calls += 1
        half.pause(step)
    attend(step)
    if half is not None:
        half.pause(step)
    return collect(step)
