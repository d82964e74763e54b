"""What activation checkpointing runs again in a backward tick."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distca.calls import Group, groups_of
from distca.errors import InvalidArgumentError


def groups_of_stages(function: str, recompute: Any, layers: Sequence[int]) -> list[Group]:
    """The groups of layers that are run again; none if none are.

    Args:
        function: the function that was told, for messages.
        recompute: as in `Ticks`.
        layers: number of layers of each stage's chunks.

    Raises:
        InvalidArgumentError: `recompute` is none of what is allowed, or a shallow stage ends inside of a group.
    """
    groups = groups_of(function, recompute, max(layers))
    if recompute == "stage":
        return groups
    for stage, num_layers in enumerate(layers):
        if any(begin < num_layers < end for begin, end in groups):
            raise InvalidArgumentError(
                f"{function}: recompute = {recompute!r}, and stage {stage} with its {num_layers} layers ends inside of "
                "a group"
            )
    return groups
