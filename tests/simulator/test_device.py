"""Measured devices: what their tables say is what a step takes. Every value here is added up by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

import distca
from distca.simulator.dense import dense_of, optimizer_seconds
from distca.simulator.device import Gemm, PartTime
from distca.simulator.machine import Machine
from distca.simulator.network import Network, Traffic
from distca.simulator.reading import read_cluster
from distca.simulator.setup import Cluster, Collective, LinkClass, Parallelism
from distca.simulator.simulate import simulate
from distca.simulator.work import AttentionWork, Round
from support.simulated import DEVICE, MODEL, cluster

POINT = {"q_rows": 1, "kv_rows": 1, "forward_ns": 2.0, "backward_ns": 6.0}


def _times(part: str, *points: tuple[int, float, float]) -> tuple[PartTime, ...]:
    return tuple(PartTime(part, numbers, forward, backward) for numbers, forward, backward in points)


def test_backward_of_a_product_has_a_rate_of_its_own() -> None:
    device = dataclasses.replace(DEVICE, gemms=(Gemm(1024, 64, 64, 100.0, 50.0),), launch=1e-6)
    once = 2 * 1024 * 64 * 64 / 100e12
    assert device.product(1024, 64, 64) == pytest.approx((once + 1e-6, 4 * once + 2e-6))
    same = dataclasses.replace(DEVICE, gemms=(Gemm(1024, 64, 64, 100.0),))
    assert same.product(1024, 64, 64) == pytest.approx((once, 2 * once))


def test_a_part_takes_the_time_that_is_known_between_sizes_and_beyond_them() -> None:
    device = dataclasses.replace(DEVICE, parts=_times("norm", (100, 100e-9, 200e-9), (10000, 20000e-9, 40000e-9)))
    # 1 and 2 ns a number; 1000 is halfway on a logarithmic scale.
    assert device.part("norm", 1000, 0) == pytest.approx((1500e-9, 3000e-9))
    assert device.part("norm", 10, 0) == pytest.approx((10e-9, 20e-9))
    assert device.part("norm", 100000, 0) == pytest.approx((200000e-9, 400000e-9))
    assert device.part("norm", 0, 0) == (0.0, 0.0)


def test_a_part_that_no_table_has_takes_its_bytes() -> None:
    device = dataclasses.replace(DEVICE, launch=1e-6)
    assert device.part("norm", 1000, 4e6) == pytest.approx((2e-6, 4e-6))
    assert device.part("sum", 1000, 0) == (0.0, 0.0)


def test_a_layer_has_two_norms_two_residuals_one_activation_and_five_sums_of_gradients() -> None:
    names = ("norm", "residual", "activation", "rotary", "sum", "embedding", "loss", "optimizer")
    parts = tuple(PartTime(name, 1, 10.0**power, 3 * 10.0**power) for power, name in enumerate(names))
    device = dataclasses.replace(DEVICE, gemms=(Gemm(1, 1, 1, 1e30),), parts=parts)
    setup = Cluster(1, 1, LinkClass(1, 0), LinkClass(1, 0), device)
    dense = dense_of([2], setup, MODEL, Parallelism())
    hidden, inner, turned = 2 * MODEL.hidden, 2 * MODEL.intermediate, 2 * 128 * (8 + 4)
    before, after = hidden + 1e3 * turned, hidden + 2 * 1e1 * hidden + 1e2 * inner
    assert float(dense.before.seconds) == pytest.approx(before)
    assert float(dense.before.backward.seconds) == pytest.approx(3 * before + 3 * 1e4 * hidden)
    assert float(dense.after.seconds) == pytest.approx(after)
    assert float(dense.after.backward.seconds) == pytest.approx(3 * after + 2 * 1e4 * hidden)
    assert float(dense.embedding.seconds) == pytest.approx(1e5 * hidden)
    assert float(dense.head.seconds) == pytest.approx(hidden + 1e6 * 2 * MODEL.vocabulary)
    assert optimizer_seconds(5, setup, MODEL) == pytest.approx(5e7)


def _machine(copy_bandwidth: float | None) -> tuple[Machine, AttentionWork]:
    """Two homes that come at 0 and 1 s. Home 0 sends 4 GB, and gets 2 GB back."""
    device = dataclasses.replace(DEVICE, copy_bandwidth=copy_bandwidth)
    machine = Machine(Network(cluster(2), 1), device)
    machine.now = torch.tensor([0.0, 1.0], dtype=torch.float64)
    there = torch.tensor([[0, 4e9], [0, 0]], dtype=torch.float64)
    nothing = torch.zeros(2, dtype=torch.float64)
    return machine, AttentionWork(nothing, nothing, Traffic.of(there, 2), Traffic.of(there.T / 2, 2))


def test_a_rank_that_copies_rows_itself_waits_for_credit_and_computes_nothing_meanwhile() -> None:
    machine, work = _machine(4e9)
    call = distca.calls.calls_of_pass("forward", 1)[0]
    step = machine.dispatch(work, call)
    # Credit comes after 1 s and a microsecond of latency. Then 4 GB are copied at 4 GB/s, and sent at 400 GB/s.
    assert machine.now.tolist() == pytest.approx([2 + 1e-6, 1.0])
    assert float(step.arrived[0][1]) == pytest.approx(1 + 4 / 400 + 2e-6)
    machine.attend(step, call)
    machine.collect(step, call)
    # Home 1 copies 2 GB back in 0.5 s, meanwhile home 0 copies; then it takes the 2 GB in 0.5 s.
    assert machine.now.tolist() == pytest.approx([2.5 + 1e-6, 1 + 4 / 400 + 2e-6 + 0.5])
    assert machine.copying.tolist() == pytest.approx([1.5, 0.5])


def test_rows_travel_while_a_device_computes_that_does_not_copy_them() -> None:
    machine, work = _machine(None)
    machine.dispatch(work, distca.calls.calls_of_pass("forward", 1)[0])
    assert machine.now.tolist() == [0.0, 1.0] and machine.copying.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("in_rounds", [False, True])
def test_a_round_is_computed_while_the_rows_of_the_next_and_the_results_of_the_one_before_travel(
    in_rounds: bool,
) -> None:
    """Home 0 sends 40 GB in 0.1 s for 3 s of computation, and gets 20 GB back in 0.05 s, twice."""
    machine, _ = _machine(None)
    machine.now = torch.zeros(2, dtype=torch.float64)
    nothing, seconds = (torch.tensor([0.0, s], dtype=torch.float64) for s in (0.0, 3.0))
    there, back = (torch.tensor(of, dtype=torch.float64) for of in ([[0, 40e9], [0, 0]], [[0, 0], [20e9, 0]]))
    one = Round(seconds, Traffic.of(there, 2), Traffic.of(back, 2))
    work = AttentionWork(
        nothing, 2 * seconds, Traffic.of(2 * there, 2), Traffic.of(2 * back, 2), rounds=[one, one] if in_rounds else []
    )
    call = distca.calls.calls_of_pass("forward", 1)[0]
    step = machine.dispatch(work, call)
    machine.attend(step, call)
    machine.collect(step, call)
    shown = 0.1 + 0.05 if in_rounds else 0.2 + 0.1  # the rows of the first round, and the results of the last
    assert float(machine.now[0]) == pytest.approx(6 + shown, abs=1e-4)
    assert machine.attention.tolist() == [0.0, 6.0]


def test_a_ring_takes_the_rate_that_is_known_of_its_size() -> None:
    link = LinkClass(1e9, 1.0, collectives=(Collective(100, 10.0), Collective(10000, 30.0)))
    assert link.ring_seconds(1000, 1e9, 3, "all_gather") == pytest.approx(1000 / 20)
    assert link.ring_seconds(10, 1e9, 3, "all_reduce") == pytest.approx(1.0)
    assert LinkClass(1e9, 1.0).ring_seconds(1000, 500.0, 3, "all_gather") == pytest.approx(2 + 3)


def test_fsdp_has_rates_of_its_own_or_those_of_other_gathers_and_reductions() -> None:
    gather, fsdp = Collective(100, 10.0, "all_gather"), Collective(100, 5.0, "fsdp_gather")
    kinds = ("all_gather", "fsdp_gather", "reduce_scatter", "fsdp_reduce")
    link = LinkClass(100.0, 0.0, collectives=(gather, fsdp))
    assert [link.ring_seconds(100, 1e9, 3, what) for what in kinds[:2]] == pytest.approx([10, 20])
    link = LinkClass(100.0, 0.0, collectives=(gather, Collective(100, 20.0)))
    assert [link.ring_seconds(100, 1e9, 3, what) for what in kinds] == pytest.approx([10, 10, 5, 5])


def test_what_a_ring_does_may_have_a_rate_of_its_own() -> None:
    gather = Collective(100, 10.0, "all_gather")
    link = LinkClass(1e9, 1.0, collectives=(gather, Collective(100, 20.0)))
    seconds = [link.ring_seconds(100, 1e9, 3, what) for what in ("all_gather", "reduce_scatter", "all_reduce")]
    assert seconds == pytest.approx([10, 5, 5])
    assert LinkClass(1e9, 1.0, collectives=(gather,)).ring_seconds(1000, 500.0, 3, "all_reduce") == pytest.approx(5)


def test_without_a_sharded_optimizer_every_rank_takes_the_whole_step() -> None:
    times = {}
    for sharded in (True, False):
        shape = Parallelism(data=4, shard_optimizer=sharded)
        (result,) = simulate(
            [[[64]] * 4], cluster=cluster(4), model=MODEL, parallelism=shape, strategies=["unbalanced"], record=True
        )
        (step,) = (event for event in result.events if event.what == "optimizer")
        times[sharded] = float((step.end - step.begin)[0])
    assert times[False] == pytest.approx(4 * times[True])


@pytest.mark.parametrize(("recompute", "times"), [(False, 0), (True, 1)])
def test_the_host_takes_its_time_for_each_layer_that_is_run_again(recompute: bool, times: int) -> None:
    seconds = []
    for overhead in (0.0, 0.25):
        device = dataclasses.replace(DEVICE, recompute_overhead=overhead)
        (result,) = simulate(
            [[[64]]],
            cluster=dataclasses.replace(cluster(1), device=device),
            model=MODEL,
            parallelism=Parallelism(recompute=recompute, save_attention=recompute),
            strategies=["unbalanced"],
        )
        seconds.append(result.seconds)
    assert seconds[1] - seconds[0] == pytest.approx(times * 0.25 * MODEL.layers)


def test_messages_of_one_byte_are_as_many_as_before() -> None:
    matrix = torch.tensor([[0, 8, 0, 5], [0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    network = Network(cluster(4, 2), 1, signal_only=True)
    network.send(torch.zeros(4, dtype=torch.float64), Traffic.of(matrix, 2))
    assert (network.bytes_inside, network.bytes_between) == (1, 2)


def test_a_number_of_fp32_has_four_bytes() -> None:
    model = dataclasses.replace(MODEL, dtype="fp32")
    assert (model.number_bytes, model.heads.dtype) == (4, torch.float32)
    with pytest.raises(distca.InvalidArgumentError, match="dtype = 'fp8'; one of fp32, bf16, fp16 is expected"):
        dataclasses.replace(MODEL, dtype="fp8")


def test_a_file_may_hold_the_cost_table_of_attention_and_wrong_tables_are_named(tmp_path: Path) -> None:
    link = {"bandwidth": 1e9, "latency": 0, "collectives": [{"bytes": 1, "bandwidth": 1.0}]}
    device = {
        "attention": {"heads": [1], "points": [POINT]},
        "gemms": [{"m": 1, "n": 1, "k": 1, "tflops": 1.0, "backward_tflops": 2.0}],
        "parts": [{"part": "norm", "numbers": 1, "forward": 1.0}],
        "peak_tflops": 1.0,
        "memory_bandwidth": 1.0,
        "memory": 1.0,
    }
    path = tmp_path / "cluster.json"
    content = {"ranks": 1, "ranks_per_node": 1, "inside": link, "between": link, "device": device}
    path.write_text(json.dumps(content))
    read = read_cluster(path).device
    assert (read.cost("forward").unit_ns, read.cost("backward").unit_ns) == (2.0, 6.0)
    for name, value, message in (
        ("parts", [{"part": "magic", "numbers": 1, "forward": 1.0}], "part = 'magic'; one of norm, rotary"),
        ("parts", [{"part": "norm", "numbers": 1}], "parts: 'forward' is missing"),
        ("parts", 3, "parts = 3; a list of part, numbers and forward"),
        ("attention", {"points": [{}]}, "was not written by `distca profile`"),
        ("attention", 3, "attention = 3"),
        ("copy_bandwidth", 0, "copy_bandwidth = 0; a positive number"),
        ("contention", 0.9, "contention = 0.9; from 1 to 100"),
        ("contention", "2", "contention = '2'; from 1 to 100"),
        ("layer_overhead", -1, "layer_overhead = -1; seconds from 0 to 1"),
        ("recompute_overhead", "1", "recompute_overhead = '1'; seconds from 0 to 1"),
    ):
        path.write_text(json.dumps({**content, "device": {**device, name: value}}))
        with pytest.raises(distca.InvalidArgumentError, match=message):
            read_cluster(path)
    path.write_text(json.dumps({**content, "inside": {**link, "collectives": [{"bytes": 0, "bandwidth": 1.0}]}}))
    with pytest.raises(distca.InvalidArgumentError, match="collectives: bytes = 0"):
        read_cluster(path)
    one = {"what": "broadcast", "bytes": 1, "bandwidth": 1.0}
    path.write_text(json.dumps({**content, "inside": {**link, "collectives": [one]}}))
    with pytest.raises(distca.InvalidArgumentError, match="collectives: what = 'broadcast'; one of all_gather"):
        read_cluster(path)
