"""A forward or backward pass over the layers of a stage, in the runtime's order of calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from distca.calls import Call, calls_of_pass, groups_of
from distca.simulator.dense import Dense
from distca.simulator.machine import AttentionStep, Machine
from distca.simulator.work import AttentionWork


@dataclasses.dataclass(frozen=True)
class LayerWork:
    """A layer of a micro-batch, or of one half of it: its dense parts, and its attention by phase."""

    dense: Dense
    attention: Mapping[str, AttentionWork]


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Keys and values that the ranks of context parallel groups gather in every layer.

    Attributes:
        groups: ``[number, n]`` the homes of each group.
        forward_bytes: bytes of all keys and values of a group, gathered before attention.
        backward_bytes: bytes of all their gradients, reduced and scattered after it.
    """

    groups: torch.Tensor
    forward_bytes: float
    backward_bytes: float


#: The weights that are in no layer, as if they were one.
_ENDS = -1


class ShardedWeights:
    """Weights of FSDP: gathered a layer ahead of their use, reduced when the layer's backward has ended.

    Embedding and logits are gathered before the first layer's forward, and reduced after its backward.
    A gather copies the rank's shard into the buffer that is gathered, and the buffer into whole weights. A reduction
    copies gradients into the buffer that is reduced; the collective itself takes the mean. Copies read and write their
    bytes, unless the rates of FSDP's collectives are known: these have them. A rank that moves rows itself
    (`Device.copy_bandwidth`) also waits for its collectives: they overlap nothing.

    Args:
        groups: ``[number, n]`` the homes that share weights. A home that has all of them gathers and copies nothing.
        layer_bytes: bytes of a layer's weights, and of its gradients.
        ends_bytes: the same of embedding and logits.
        kept: whether weights stay whole from forward to backward, as in ping-pong.
    """

    def __init__(self, groups: torch.Tensor, layer_bytes: float, ends_bytes: float, *, kept: bool) -> None:
        self._groups, self._layer_bytes, self._ends_bytes, self._kept = groups, layer_bytes, ends_bytes, kept
        self._ready: dict[int, torch.Tensor] = {}
        self._whole: set[int] = set()
        self._reduced: torch.Tensor | None = None

    def begin(self, machine: Machine, phase: str) -> None:
        """Waits for the weights of embedding and logits."""
        if phase == "forward":
            self.use(machine, _ENDS, None)

    def end(self, machine: Machine, phase: str) -> None:
        """In backward their gradients are reduced."""
        if phase == "backward":
            self.leave(machine, _ENDS, phase)

    def use(self, machine: Machine, layer: int, following: int | None) -> None:
        """Waits for the weights of a layer, and begins to gather those of the following one."""
        self._gather(machine, layer)
        if following is not None and machine.device.copy_bandwidth is None:
            self._gather(machine, following)
        machine.wait_until(self._ready[layer])
        if layer not in self._whole:
            self._copy(machine, self._bytes(layer))
            self._whole.add(layer)

    def leave(self, machine: Machine, layer: int, phase: str) -> None:
        """Frees the weights of a layer; in backward its gradients are reduced meanwhile."""
        if phase == "backward":
            num_bytes = self._bytes(layer)
            self._copy(machine, num_bytes)
            self._reduced = machine.network.ring(self._groups, machine.now, num_bytes, "fsdp_reduce")
            if machine.device.copy_bandwidth is not None:
                self.finish(machine)
        if phase == "backward" or not self._kept:
            self._ready.pop(layer, None)
            self._whole.discard(layer)

    def finish(self, machine: Machine) -> None:
        """Waits for the last gradients."""
        if self._reduced is not None:
            machine.wait_until(self._reduced)

    def _gather(self, machine: Machine, layer: int) -> None:
        if layer not in self._ready:
            num_bytes = self._bytes(layer)
            self._copy(machine, num_bytes / self._groups.shape[1])
            self._ready[layer] = machine.network.ring(self._groups, machine.now, num_bytes, "fsdp_gather")

    def _bytes(self, layer: int) -> float:
        return self._ends_bytes if layer == _ENDS else self._layer_bytes

    def _copy(self, machine: Machine, num_bytes: float) -> None:
        if self._groups.shape[1] > 1 and not machine.network.knows(self._groups, "fsdp_gather"):
            machine.copy_in_memory(num_bytes)


def run_pass(
    machine: Machine,
    phase: str,
    num_layers: int,
    halves: Mapping[int | None, LayerWork],
    *,
    recompute: bool = False,
    save_attention: bool = False,
    embedding: bool = False,
    head: bool = False,
    gathered: Gathered | None = None,
    weights: ShardedWeights | None = None,
) -> None:
    """Runs all layers of a pass on all homes. A home without rows computes nothing of its own, and serves.

    Args:
        machine: the homes.
        phase: ``"forward"`` or ``"backward"``.
        num_layers: number of layers.
        halves: the work of each half, 0 and 1; or of the whole, None.
        recompute: whether each layer's forward is run again before its backward.
        save_attention: whether that leaves core attention out.
        embedding: whether the homes with ``embedding`` seconds look the input up.
        head: whether the homes with ``head`` seconds compute the logits and the loss.
        gathered: what context parallelism gathers.
        weights: the weights, if they are sharded.
    """
    machine.phase = phase
    groups = groups_of("simulate", "layer" if recompute and not save_attention else None, num_layers)
    forward = phase == "forward"
    steps: dict[tuple[str, int, int | None], AttentionStep] = {}
    left: dict[int, int] = {}
    if weights is not None:
        weights.begin(machine, phase)
    for half in halves.values():
        if embedding and forward:
            machine.compute(half.dense.embedding)
        if head and not forward:
            machine.compute(half.dense.head.backward)
    for call in calls_of_pass(phase, num_layers, groups=groups, halves=None not in halves):
        work, key = halves[call.half], (call.phase, call.layer, call.half)
        again = forward or call.phase == "forward"
        if call.begins_step:
            if weights is not None:
                following = call.layer + (1 if forward else -1)
                weights.use(machine, call.layer, following if 0 <= following < num_layers else None)
            if save_attention and not again:
                machine.compute(work.dense.before)
                machine.compute(work.dense.again)
            machine.compute(work.dense.before if again else work.dense.after.backward)
            if gathered is not None and again:
                _gather(machine, gathered, gathered.forward_bytes, call, "all_gather")
            steps[key] = machine.dispatch(work.attention[call.phase], call)
        if call.part in ("core_attention", "attend"):
            machine.attend(steps[key], call)
        if call.part in ("core_attention", "collect"):
            machine.collect(steps.pop(key), call)
            if gathered is not None and not again:
                _gather(machine, gathered, gathered.backward_bytes, call, "reduce_scatter")
            machine.compute(work.dense.after if again else work.dense.before.backward)
            if call.phase == phase:
                left[call.layer] = left.get(call.layer, 0) + 1
                if weights is not None and left[call.layer] == len(halves):
                    weights.leave(machine, call.layer, phase)
    for half in halves.values():
        if embedding and not forward:
            machine.compute(half.dense.embedding.backward)
        if head and forward:
            machine.compute(half.dense.head)
    if weights is not None:
        weights.end(machine, phase)


def _gather(machine: Machine, gathered: Gathered, num_bytes: float, call: Call, what: str) -> None:
    machine.wait_until(machine.network.ring(gathered.groups, machine.now, num_bytes, what, rows=True), call)
