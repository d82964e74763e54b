"""Sharded weights: what is copied, gathered and reduced when. Every value here is added up by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from distca.simulator.machine import Machine
from distca.simulator.network import Network
from distca.simulator.passes import ShardedWeights
from distca.simulator.setup import Collective, Parallelism
from distca.simulator.simulate import simulate
from support.simulated import DEVICE, MODEL, cluster

#: Of a layer. Its shard is copied in 0.1 s and all of it in 0.2 s at 4 TB/s. Half of it is sent in 0.5 s at 400 GB/s.
LAYER_BYTES = 4e11
#: Of embedding and logits.
ENDS_BYTES = 2 * LAYER_BYTES


def _made(ranks: int, copy_bandwidth: float | None, *, kept: bool = False) -> tuple[Machine, ShardedWeights]:
    device = dataclasses.replace(DEVICE, copy_bandwidth=copy_bandwidth)
    machine = Machine(Network(cluster(ranks), 1), device)
    return machine, ShardedWeights(torch.arange(ranks).view(1, -1), LAYER_BYTES, ENDS_BYTES, kept=kept)


def _at(machine: Machine, seconds: float) -> None:
    assert machine.now.tolist() == pytest.approx([seconds] * len(machine.now), abs=1e-5)  # but for latencies


def test_weights_are_gathered_ahead_and_copied_once_in_and_once_out() -> None:
    machine, weights = _made(2, None)
    weights.use(machine, 0, 1)
    _at(machine, 0.1 + 0.5 + 0.2)  # the next layer's shard is copied meanwhile
    weights.use(machine, 0, 1)  # the other half of ping-pong: the weights are there
    _at(machine, 0.8)
    weights.use(machine, 1, None)
    _at(machine, 0.1 + 0.5 + 0.5 + 0.2)
    assert machine.dense.tolist() == pytest.approx([0.1 + 0.1 + 0.2 + 0.2] * 2)


def test_known_rates_of_fsdp_have_the_copies_in_them() -> None:
    rates = (Collective(1, 1e12, "fsdp_gather"), Collective(1, 4e11, "fsdp_reduce"))
    on = cluster(2)
    on = dataclasses.replace(on, inside=dataclasses.replace(on.inside, collectives=rates))
    machine = Machine(Network(on, 1), on.device)
    weights = ShardedWeights(torch.arange(2).view(1, -1), LAYER_BYTES, ENDS_BYTES, kept=False)
    weights.use(machine, 0, None)
    _at(machine, 0.2)  # half of the layer at 1 TB/s
    weights.leave(machine, 0, "backward")
    weights.finish(machine)
    _at(machine, 0.2 + 0.5)
    assert machine.dense.tolist() == [0, 0]


def test_gradients_are_copied_and_then_reduced_meanwhile() -> None:
    machine, weights = _made(2, None)
    weights.leave(machine, 0, "backward")
    _at(machine, 0.2)
    weights.finish(machine)
    _at(machine, 0.2 + 0.5)


def test_ranks_that_copy_rows_themselves_wait_for_their_collectives() -> None:
    machine, weights = _made(2, 1e9)
    weights.use(machine, 0, 1)
    _at(machine, 0.8)
    weights.use(machine, 1, None)
    _at(machine, 2 * 0.8)
    weights.leave(machine, 1, "backward")
    _at(machine, 2 * 0.8 + 0.2 + 0.5)


def test_weights_are_gathered_again_in_backward_unless_they_are_kept() -> None:
    for kept, again in ((False, 0.8), (True, 0.0)):
        machine, weights = _made(2, 1e9, kept=kept)
        weights.use(machine, 0, None)
        weights.leave(machine, 0, "forward")
        weights.use(machine, 0, None)
        _at(machine, 0.8 + again)


def test_embedding_and_logits_are_gathered_in_forward_and_reduced_in_backward() -> None:
    machine, weights = _made(2, None)
    weights.begin(machine, "forward")
    _at(machine, 2 * (0.1 + 0.5 + 0.2))
    weights.end(machine, "forward")
    weights.begin(machine, "backward")
    _at(machine, 1.6)
    weights.end(machine, "backward")
    _at(machine, 1.6 + 2 * 0.2)
    weights.finish(machine)
    _at(machine, 2.0 + 2 * 0.5)
    weights.begin(machine, "forward")  # of another micro-batch
    _at(machine, 3.0 + 1.6)


@pytest.mark.parametrize("copy_bandwidth", [None, 1e9])
def test_one_rank_copies_and_gathers_nothing(copy_bandwidth: float | None) -> None:
    machine, weights = _made(1, copy_bandwidth)
    weights.begin(machine, "forward")
    weights.use(machine, 0, 1)
    weights.leave(machine, 0, "forward")
    weights.use(machine, 0, None)
    weights.leave(machine, 0, "backward")
    weights.end(machine, "backward")
    weights.finish(machine)
    assert machine.now.tolist() == [0.0] and machine.dense.tolist() == [0.0]


@pytest.mark.parametrize(("strategy", "gathers"), [("unbalanced", 2), ("distca", 1)])
def test_a_step_gathers_and_reduces_all_weights(strategy: str, gathers: int) -> None:
    # Each of 4 ranks sends three quarters of what is gathered or reduced. Ping-pong keeps what it has gathered.
    whole = (
        MODEL.number_bytes
        * 3
        * (MODEL.layers * (gathers + 1) * MODEL.layer_weights + 2 * 2 * MODEL.hidden * MODEL.vocabulary)
    )
    (result,) = simulate(
        [[[32, 32]] * 4],  # equal documents, and halves: nothing else moves
        cluster=cluster(4),
        model=MODEL,
        parallelism=Parallelism(data=4, fsdp=True),
        strategies=[strategy],
    )
    assert result.bytes_inside == pytest.approx(whole)
