"""`MaxLogits`: the largest logits of each layer, of models that cannot ask for them."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch

from distca.errors import InvalidArgumentError
from distca.planner.plan_source import StepOfTick

if TYPE_CHECKING:
    from distca.context import Context


class MaxLogits(dict["int | str | None", torch.Tensor]):
    """The largest logits of this rank's rows since it was entered, by layer: the ``layer`` of `core_attention`.

    `Context.max_logits` makes it. A layer's are ``[H]`` float32, the largest of all its calls; those of a layer without
    a name are those of all such layers.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._first_step = 0
        self._is_asked = False

    def __enter__(self) -> MaxLogits:
        if self._context.finder is not None:
            raise InvalidArgumentError(f"max_logits: context {self._context.name!r} finds them already")
        if self._context.is_recording:
            raise InvalidArgumentError("max_logits: a recording is open; pass max_logits=True to core_attention inside")
        self._context.finder, self._first_step = self, self._context.step
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.finder = None
        if kind is None and not self._is_asked and self._context.step > self._first_step:
            raise InvalidArgumentError(
                f"max_logits: {self._context.step - self._first_step} steps were taken and none of them has told its "
                "largest logits. Compiled code does not look for who wants them. What to change: call the model "
                "without torch.compile, or pass max_logits=True to core_attention"
            )

    def ask(self) -> None:
        """Notes that a step asks for them: one of this rank's calls, or one that it serves."""
        self._is_asked = True

    def take(self, layer: int | str | StepOfTick | None, max_logits: torch.Tensor) -> None:
        """Adds those of one call."""
        key = layer.layer if isinstance(layer, StepOfTick) else layer
        self[key] = torch.maximum(self[key], max_logits) if key in self else max_logits
