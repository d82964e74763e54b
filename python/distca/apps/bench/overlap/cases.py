"""The steps that are measured: what is common to ranks that compute and ranks that sleep."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import distca
from distca.trace.trace import TrainingPhase

Halves = Sequence[dict[str, Any]]
#: Seconds from when a message has left a rank to when it arrives.
LATENCY = 1e-5


class Measured(NamedTuple):
    """What one rank measured at one speed of the link.

    Attributes:
        link_speed: bytes a second.
        kinds: for each kind of step its trace in each round.
    """

    link_speed: float
    kinds: dict[str, list[distca.Trace]]


def take_step(
    model: torch.nn.Module,
    halves: Halves,
    context: distca.Context,
    ping_pong: bool,
    together: Callable[[], object],
) -> distca.Trace:
    """Takes a step of training whose phases begin on all ranks together, and returns its trace.

    Args:
        model: the model.
        halves: its keyword arguments for each half, but for the context.
        context: what it runs over; it is recording a trace.
        ping_pong: whether the halves take turns.
        together: a barrier of all ranks.
    """
    calls = [{**half, "context": context} for half in halves]
    both = distca.PingPong(model) if ping_pong else None
    together()
    context.take_trace()
    begin = time.monotonic()
    first, second = both(*calls) if both is not None else [model(**call) for call in calls]
    forward = TrainingPhase("forward", begin, time.monotonic())
    together()
    begin = time.monotonic()
    (first.float().square().mean() + second.float().square().mean()).backward()
    backward = TrainingPhase("backward", begin, time.monotonic())
    together()
    return context.take_trace().of_step(0, forward.begin, backward.end, phases=[forward, backward])
