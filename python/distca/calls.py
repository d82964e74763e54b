"""The order of the calls of core attention in a pass over a model's layers: recomputed, in halves, or neither."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from distca.arguments import is_whole, listed
from distca.errors import InvalidArgumentError

#: The layers [begin, end) that activation checkpointing runs again together.
Group = tuple[int, int]

_MIRROR = {"core_attention": "core_attention", "dispatch": "collect", "attend": "attend", "collect": "dispatch"}


class Call(NamedTuple):
    """A call that every rank makes in a pass over layers, whether it has rows or only serves.

    Attributes:
        part: ``"core_attention"`` for a whole step; ``"dispatch"``, ``"attend"`` or ``"collect"`` in a ping-pong.
        phase: ``"forward"`` or ``"backward"``. The parts of backward have the names of what they do: dispatch sends
            gradients to the servers.
        layer: number of the layer among those of the pass.
        half: 0 or 1 in a ping-pong; None otherwise.
    """

    part: str
    phase: str
    layer: int
    half: int | None = None

    @property
    def begins_step(self) -> bool:
        """Whether a step begins with this call."""
        return self.part in ("core_attention", "dispatch")


def calls_of_pass(phase: str, num_layers: int, *, groups: Sequence[Group] = (), halves: bool = False) -> list[Call]:
    """The calls of a forward or backward pass, in order.

    Backward is the mirror image of forward. The layers of a group are run again right before backward of the group's
    last layer begins: whatever needs a saved tensor first lies behind that layer's attention. In a ping-pong each half
    runs its own layers again, one part right after the other.

    Args:
        phase: ``"forward"`` or ``"backward"``.
        num_layers: number of layers.
        groups: the groups of layers that activation checkpointing runs again in backward.
        halves: whether two halves take turns (`distca.PingPong`).
    """
    forward = _in_halves(num_layers) if halves else [Call("core_attention", "forward", n) for n in range(num_layers)]
    if phase == "forward":
        return forward
    parts = ("dispatch", "attend", "collect") if halves else ("core_attention",)
    group_of_last = {end - 1: range(begin, end) for begin, end in groups}
    calls = []
    for part, _, layer, half in reversed(forward):
        mirrored = Call(_MIRROR[part], "backward", layer, half)
        if mirrored.begins_step:
            calls += [Call(part, "forward", n, half) for n in group_of_last.get(layer, ()) for part in parts]
        calls.append(mirrored)
    return calls


def _in_halves(num_layers: int) -> list[Call]:
    """Forward of a ping-pong: a half gives the turn away after dispatch and after attend."""
    calls = [("dispatch", 0, half) for half in range(2)] if num_layers else []
    for layer in range(num_layers):
        calls += [("attend", layer, half) for half in range(2)]
        for half in range(2):
            calls.append(("collect", layer, half))
            if layer + 1 < num_layers:
                calls.append(("dispatch", layer + 1, half))
    return [Call(part, "forward", layer, half) for part, layer, half in calls]


def groups_of(function: str, recompute: Any, num_layers: int) -> list[Group]:
    """The groups of layers that are run again together; none for None.

    Args:
        function: the name of the caller, for messages.
        recompute: None, ``"layer"``, ``"stage"`` (all layers at once), or the sizes of the groups; a 0 among them
            stands for a layer that is not run again.
        num_layers: number of layers.

    Raises:
        InvalidArgumentError: `recompute` is none of these, or the sizes do not sum up to the number of layers.
    """
    if recompute is None:
        return []
    if recompute == "stage":
        sizes = [num_layers]
    elif recompute == "layer":
        sizes = [1] * num_layers
    elif isinstance(recompute, str):
        raise InvalidArgumentError(
            f"{function}: recompute = {recompute!r}; None, 'layer', 'stage' and sizes of groups of layers are allowed"
        )
    else:
        sizes = listed(function, "recompute", recompute, "None, 'layer', 'stage' or sizes of groups of layers")
    if not all(is_whole(size, 0) for size in sizes) or sum(max(size, 1) for size in sizes) != num_layers:
        raise InvalidArgumentError(
            f"{function}: recompute = {recompute!r}; sizes that sum up to {num_layers} layers are expected, where 0 "
            "stands for a layer that is not run again"
        )
    begins = itertools.accumulate((max(size, 1) for size in sizes), initial=0)
    return [(begin, begin + size) for begin, size in zip(begins, sizes, strict=False) if size > 0]
