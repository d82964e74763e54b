"""`Caller`: who makes a call of core attention, and what surrounds each operator of that call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

import torch

from distca.context import Context
from distca.errors import typed_error, typed_errors
from distca.planner.plan_source import StepOfTick
from distca.registry import find_context, get_context, refuse_closed
from distca.trace.nsys import operator_range


def is_deterministic(asked: bool) -> bool:
    """Whether attention must be deterministic: the caller or torch asks for it."""
    return asked or torch.are_deterministic_algorithms_enabled()


def forward_step_of(context: Context | None, step: int | None = None) -> int:
    """What backward of this forward step, or of the last one, tells the other ranks: its number, and 0 if they may not
    compare it. A step that was recomputed in backward has another number where a rank checkpoints in another way, and a
    recorded one where a rank has recorded other steps before, and one for all replays.
    """
    if context is None or context._is_recording or torch._C._current_graph_task_id() != -1:
        return 0
    return context.step if step is None else step


class Caller(NamedTuple):
    """A layer that makes a call in a context.

    Attributes:
        context: the name of the context.
        layer: the number or name of the layer, or the step of a tick, if it is known.
        half: the half of a ping-pong, 0 or 1, or None outside of one.
    """

    context: str
    layer: int | str | StepOfTick | None = None
    half: int | None = None

    @staticmethod
    def of(context: str | Context, layer: int | str | StepOfTick | None, half: int | None = None) -> Caller:
        """The caller in a context that is given as such, or by its name."""
        if isinstance(context, Context):
            find_context(context)  # refuses one that is closed
            context = context.name
        return Caller(context, layer, half)

    @property
    def name(self) -> str:
        """The caller in words, as far as it is known."""
        if self.layer is None or isinstance(self.layer, StepOfTick):
            return str(self.layer or "")
        return f"layer {self.layer}"

    @property
    def compared(self) -> str:
        """What ranks that begin a step compare: the number of the step in its tick, or else the layer."""
        return str(
            self.layer.number if isinstance(self.layer, StepOfTick) else "" if self.layer is None else self.layer
        )

    def options(self, scale: float | None, softcap: float, deterministic: bool) -> dict[str, Any]:
        """The keywords that the operators of a step share."""
        scores = {"scale": scale, "softcap": softcap, "deterministic": is_deterministic(deterministic)}
        return {"context": self.context, **scores}

    def calls(self, operator: str, *, compares: bool = True, forward_step: int = 0) -> AbstractContextManager[None]:
        """Surrounds a call of `operator`.

        Errors get their types and name the layer, and there is an NVTX range if one is wanted. If the call `compares`,
        ranks that begin a step in it compare `compared`. They also compare `forward_step`, the number of the step
        whose gradients a backward step computes; 0 if it is not known.
        """
        if torch.compiler.is_compiling():
            return typed_errors(self.name)
        return _OperatorCall(self, operator, compares, forward_step)

    def note(self, step: int | None = None) -> None:
        """Tells the trace who began this step, or the last one."""
        if self.layer is None and self.half is None:
            return
        here = get_context(self.context)
        if here is not None:
            layer = self.name if isinstance(self.layer, StepOfTick) else self.layer
            here.note_caller(here.step if step is None else step, layer, self.half)


class _OperatorCall:
    """What `Caller.calls` returns: not a generator, which would take longer than all that it does."""

    def __init__(self, caller: Caller, operator: str, compares: bool, forward_step: int) -> None:
        found = find_context(caller.context)
        if found is None:
            refuse_closed(caller.context)
        self._caller = caller
        self._compared = caller.compared if compares else "", forward_step
        self._range = operator_range(operator, True) if found is not None and found.nsys else None
        self._core = found._core if found is not None and any(self._compared) else None

    def __enter__(self) -> None:
        if self._range is not None:
            self._range.__enter__()
        if self._core is not None:
            self._core.set_caller(*self._compared)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._core is not None:
            self._core.set_caller("", 0)
        if self._range is not None:
            self._range.__exit__(kind, error, trace)
        if isinstance(error, RuntimeError) and (typed := typed_error(error, self._caller.name)) is not None:
            raise typed from None
