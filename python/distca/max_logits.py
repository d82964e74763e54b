"""`MaxLogits`: the largest logits of each layer, of models that cannot ask for them."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch

from distca.errors import InvalidArgumentError
from distca.planner.plan_source import NO_LAYER_OF_STAGE, StepOfTick

if TYPE_CHECKING:
    from distca.context import Context

Layer = int | str | None


class MaxLogits(dict[Layer, torch.Tensor]):
    """The largest logits of this rank's rows, by layer: the ``layer`` of `core_attention`.

    `Context.max_logits` makes it. It has them once it is left: ``[H]`` float32 for each layer, the largest of all its
    calls inside. Those of calls without a layer are those of one layer, None.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._of_calls: dict[Layer, list[torch.Tensor]] = {}
        self._without_before = 0

    def __enter__(self) -> MaxLogits:
        if self._context._finder is not None:
            raise InvalidArgumentError(f"max_logits: context {self._context.name!r} finds them already")
        if self._context._is_recording:
            raise InvalidArgumentError("max_logits: a recording is open; pass max_logits=True to core_attention inside")
        self.clear()
        self._context._finder, self._without_before = self, self._num_without()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context._finder = None
        # Only now, because activation checkpointing that saves results takes note of all that is done in a layer.
        uneven = [layer for layer, found in self._of_calls.items() if len({len(of_call) for of_call in found}) > 1]
        for layer, found in self._of_calls.items():
            if layer not in uneven:
                self[layer] = torch.stack(found).amax(0)
        self._of_calls.clear()
        if kind is None and uneven:
            raise InvalidArgumentError(
                f"max_logits: calls of layer {uneven[0]} have different numbers of query heads. What to change: tell "
                "layers apart by core_attention(..., layer=)"
            )
        missed = self._num_without() - self._without_before
        if kind is None and missed > 0:
            raise InvalidArgumentError(
                f"max_logits: {missed} forward steps did not tell their largest logits. Compiled code does not look "
                "for who wants them. What to change: call the model without torch.compile, or pass max_logits=True "
                "to core_attention"
            )

    def take(self, layer: int | str | StepOfTick | None, max_logits: torch.Tensor) -> None:
        """Adds those of one call."""
        key = layer.layer if isinstance(layer, StepOfTick) else layer
        if key != NO_LAYER_OF_STAGE:
            self._of_calls.setdefault(key, []).append(max_logits)

    def _num_without(self) -> int:
        core = self._context._core
        return 0 if core is None else core.num_without_max_logits
