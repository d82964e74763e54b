"""`Caller`: who makes a call of core attention, and what surrounds each operator of that call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from distca.context import Context
from distca.errors import typed_errors
from distca.registry import find_context, get_context
from distca.trace.nsys import operator_range


def is_deterministic(asked: bool) -> bool:
    """Whether attention must be deterministic: the caller or torch asks for it."""
    return asked or torch.are_deterministic_algorithms_enabled()


class Caller(NamedTuple):
    """A layer that makes a call in a context.

    Attributes:
        context: the name of the context.
        layer: the number or name of the layer, if it is known.
        half: the half of a ping-pong, 0 or 1, or None outside of one.
    """

    context: str
    layer: int | str | None = None
    half: int | None = None

    @staticmethod
    def of(context: str | Context, layer: int | str | None, half: int | None = None) -> Caller:
        """The caller in a context that is given as such, or by its name."""
        return Caller(context.name if isinstance(context, Context) else context, layer, half)

    def options(self, scale: float | None, softcap: float, deterministic: bool) -> dict[str, Any]:
        """The keywords that the operators of a step share."""
        scores = {"scale": scale, "softcap": softcap, "deterministic": is_deterministic(deterministic)}
        return {"context": self.context, **scores}

    @contextmanager
    def calls(self, operator: str, *, compares: bool = True) -> Iterator[None]:
        """Surrounds a call of `operator`.

        Errors get their types and name the layer, and there is an NVTX range if one is wanted. If the call `compares`,
        ranks that begin a step in it compare its layer.
        """
        if torch.compiler.is_compiling():
            with typed_errors(self.layer):
                yield
            return
        found = find_context(self.context)
        core = None if found is None or self.layer is None or not compares else found._core
        with typed_errors(self.layer), operator_range(operator, found is not None and found.nsys):
            if core is None:
                yield
                return
            core.set_layer(str(self.layer))
            try:
                yield
            finally:
                core.set_layer("")

    def note(self, step: int | None = None) -> None:
        """Tells the trace who began this step, or the last one."""
        if self.layer is None and self.half is None:
            return
        here = get_context(self.context)
        if here is not None:
            here.note_caller(here.step if step is None else step, self.layer, self.half)
