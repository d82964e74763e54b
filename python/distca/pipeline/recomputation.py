"""What activation checkpointing runs again in a backward tick."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distca.arguments import is_whole, listed
from distca.errors import InvalidArgumentError


def groups_of(function: str, recompute: Any, layers: Sequence[int]) -> list[tuple[int, int]] | None:
    """The ranges [begin, end) of layers that are run again together, or None if none are.

    Args:
        function: the function that was told, for messages.
        recompute: as in `Ticks`.
        layers: number of layers of each stage's chunks.

    Raises:
        InvalidArgumentError: `recompute` is none of what is allowed, or a shallow stage ends inside of a group.
    """
    depth = max(layers)
    if recompute is None:
        return None
    if recompute == "stage":
        return [(0, depth)]
    if recompute == "layer":
        sizes = [1] * depth
    elif isinstance(recompute, str):
        raise InvalidArgumentError(
            f"{function}: recompute = {recompute!r}; None, 'layer', 'stage' and sizes of groups of layers are allowed"
        )
    else:
        sizes = listed(function, "recompute", recompute, "None, 'layer', 'stage' or sizes of groups of layers")
    if not all(is_whole(size, 1) for size in sizes) or sum(sizes) != depth:
        raise InvalidArgumentError(
            f"{function}: recompute = {recompute!r}; sizes that sum up to {depth} layers are expected"
        )
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    for stage, num_layers in enumerate(layers):
        if num_layers not in ends:
            raise InvalidArgumentError(
                f"{function}: recompute = {recompute!r}, and stage {stage} with its {num_layers} layers ends inside "
                "of a group"
            )
    return list(zip([0, *ends[:-1]], ends, strict=True))
