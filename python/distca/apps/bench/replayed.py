"""The training step that `distca bench replay` runs on 8 ranks, run and modelled."""

from __future__ import annotations

import json
import statistics
from importlib.resources import files

import torch

from distca.apps.bench import replay
from distca.simulator.dense import Dense, Part
from distca.simulator.device import Device, Gemm
from distca.simulator.machine import Machine
from distca.simulator.network import Network
from distca.simulator.passes import LayerWork, run_pass
from distca.simulator.setup import Cluster, LinkClass
from distca.simulator.work import attention_work


def replayed(rounds: int) -> dict[str, tuple[float, float]]:
    """Measured and modelled: time of a balanced step over one without balance, and mean idle shares of both."""
    of = replay.setup()
    real = replay.take_steps(of, rounds)
    model = {balance: _modelled(of, balance) for balance in (True, False)}
    seconds = {balance: statistics.median(step.seconds for step in real[balance]) for balance in real}
    idle = {balance: statistics.median(statistics.mean(step.idle) for step in real[balance]) for balance in real}
    return {
        "balanced / not balanced": (seconds[True] / seconds[False], model[True].seconds / model[False].seconds),
        "idle share": (idle[True], statistics.mean(model[True].idle)),
        "idle share without balance": (idle[False], statistics.mean(model[False].idle)),
    }


def _modelled(of: replay.Setup, balance: bool) -> replay.Step:
    """The step as the simulator has it. Without balance the second half follows the first, and goes backward first."""
    cluster = _cluster(of)
    machine = Machine(Network(cluster, 1), cluster.device)
    works = [
        LayerWork(
            _dense(of.dense),
            {phase: attention_work(plan, phase, cluster.device, replay.RANKS) for phase in ("forward", "backward")},
        )
        for plan in of.plans[balance]
    ]
    for phase, order in (("forward", (0, 1)), ("backward", (1, 0))):
        if balance:
            run_pass(machine, phase, replay.LAYERS, dict(enumerate(works)))
        else:
            for half in order:
                run_pass(machine, phase, replay.LAYERS, {None: works[half]})
    seconds = float(machine.now.max())
    return replay.Step(seconds, (1 - (machine.dense + machine.attention) / seconds).tolist())


def _dense(seconds: float) -> Dense:
    """Parts that take a share of so many seconds on every rank."""
    none = torch.zeros(replay.RANKS, dtype=torch.float64)
    before, after = (Part(none + share * seconds, none + 2 * share * seconds, none, 0) for share in _SHARES)
    nothing = Part(none, none, none, 0)
    return Dense(nothing, before, after, nothing, nothing)


_SHARES = (replay.BEFORE, 1 - replay.BEFORE)


def _cluster(of: replay.Setup) -> Cluster:
    """The emulated link, and the cost table with its times scaled as the run scales them."""
    table = json.loads((files("distca.planner") / "costs" / f"{replay.COSTS}.json").read_text())
    scaled = Device(table, (Gemm(1, 1, 1, 1.0),), 1.0, 1.0, 1.0)
    assert of.forward.unit_ns is not None
    factor = of.forward.unit_ns / scaled.cost("forward").unit_ns  # type: ignore[operator]
    for point in table["points"]:
        point["forward_ns"] *= factor
        point["backward_ns"] *= factor
    # The sending thread waits for credit; the link carries the rows.
    device = Device(table, (Gemm(1, 1, 1, 1.0),), 1.0, 1.0, 1.0, copy_bandwidth=1e18)
    link = LinkClass(of.link.bytes_per_second, of.link.latency)
    return Cluster(replay.RANKS, replay.RANKS, link, link, device)
