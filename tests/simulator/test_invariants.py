"""Whole steps: what must hold of any of them, and the runtime's own calls."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import distca
from distca.calls import Call
from distca.simulator.case import Case, Documents
from distca.simulator.dense import Dense, Part
from distca.simulator.machine import Machine
from distca.simulator.network import Network, Traffic
from distca.simulator.passes import LayerWork, run_pass
from distca.simulator.setup import Parallelism
from distca.simulator.simulate import StrategyResult, simulate
from distca.simulator.strategies import STRATEGIES
from distca.simulator.ticking import Ticking
from distca.simulator.work import AttentionWork
from support.groups import loopback_group, on_all_ranks
from support.halves import Model, halves_for, ping_pong, plans_for, results, seeded
from support.simulated import DEVICE, DOCUMENTS, MODEL, SHAPES, cluster

EQUAL = [[[9000] * 4] * 4] * 2


def _simulate(
    name: str,
    shape: Parallelism,
    documents: Documents = DOCUMENTS,
    *,
    per_node: int = 4,
    speed: float = 1.0,
    tolerance: float = 0.05,
    record: bool = False,
) -> StrategyResult:
    ranks = shape.homes * shape.tensor * shape.pipeline
    (result,) = simulate(
        documents,
        cluster=cluster(ranks, per_node, speed=speed),
        model=MODEL,
        parallelism=shape,
        strategies=[name],
        tolerance=tolerance,
        record=record,
    )
    return result


@pytest.mark.parametrize("name", ["variable-chunks", "distca-single", "distca"])
@pytest.mark.parametrize("shape", ["data", "recompute", "tensor", "fsdp"])
def test_equal_documents_leave_nothing_to_gain(name: str, shape: str) -> None:
    of = Parallelism(data=4, micro_batches=2, recompute=True) if shape == "recompute" else SHAPES[shape]
    alone, other = (_simulate(strategy, of, EQUAL, speed=1e6) for strategy in ("unbalanced", name))
    # A half has twice as many messages between tensor ranks, and its weights are gathered once, not twice.
    rel = 1e-9 if shape in ("data", "recompute") else 1e-2
    assert other.seconds == pytest.approx(alone.seconds, rel=rel)
    assert other.idle_by_cause.attention == pytest.approx(0, abs=rel)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_causes_add_up_to_the_idle_share_and_to_what_is_exposed(name: str, shape: Parallelism) -> None:
    if not STRATEGIES[name].applies(shape, MODEL, 1):
        pytest.skip("a strategy that is not there in this parallelism")
    result = _simulate(name, shape)
    causes, mean = result.idle_by_cause, sum(result.idle) / len(result.idle)
    assert causes.rows + causes.links + causes.uneven + causes.fill == pytest.approx(mean)
    assert causes.rows + causes.links == pytest.approx(result.exposed_communication)
    assert min(causes.rows, causes.links, causes.uneven, causes.fill) >= 0


@pytest.mark.parametrize("name", ["unbalanced", "distca-single", "distca"])
def test_saved_attention_is_not_run_again_and_the_last_product_neither(name: str) -> None:
    """By hand: one rank, whose calls cost nothing, computes two parts of each layer and half again."""
    device = dataclasses.replace(DEVICE, call_overhead=0.0)
    one = dataclasses.replace(cluster(1), device=device)
    shape = Parallelism(recompute=True, save_attention=True)

    def seconds(shape: Parallelism) -> tuple[float, float]:
        setting = {"cluster": one, "model": MODEL, "strategies": [name], "record": True}
        (result,) = simulate([[[4096] * 4]], parallelism=shape, **setting)
        attention = sum(float((e.end - e.begin).sum()) for e in result.events if e.what == "attention")
        return result.seconds, attention

    (kept, attention), (all_again, twice), (none, once) = map(
        seconds, (shape, Parallelism(recompute=True), Parallelism())
    )
    case = Case([[[4096] * 4]], one, MODEL, shape)
    rows = [[8192], [8192]] if name == "distca" else [[16384]]
    parts = [(of.before, of.after, of.again) for of in map(case.dense, rows)]
    assert attention == pytest.approx(once) and twice > 1.2 * once
    again = sum(float(before.seconds + again.seconds) for before, _, again in parts)
    assert kept - none == pytest.approx(MODEL.layers * again, rel=1e-6)
    everything = sum(float(before.seconds + after.seconds) for before, after, _ in parts)
    assert all_again - none == pytest.approx(MODEL.layers * everything + twice - once, rel=1e-6)
    down, residual = (
        DEVICE.product(rows[0][0], MODEL.hidden, MODEL.intermediate),
        float(parts[0][1].seconds - parts[0][2].seconds),
    )
    assert residual > down.forward


def test_idle_shares_have_the_causes_that_were_put_into_a_step() -> None:
    pipeline = Parallelism(pipeline=2, micro_batches=4)
    # By hand: equal micro-batches of two stages leave one of five passes idle, if links take no time.
    fill = _simulate("unbalanced", pipeline, [[[8192]]] * 4, speed=1e9).idle_by_cause
    assert fill.fill == pytest.approx(1 / 5, abs=0.02) and fill.rows + fill.uneven == pytest.approx(0, abs=1e-9)
    # Unequal micro-batches of equal tokens make stages wait, which is not the fill of the pipeline.
    unequal = _simulate("unbalanced", pipeline, [[[8192]], [[64] * 128]] * 2, speed=1e9).idle_by_cause
    assert unequal.uneven > 0.02 and unequal.rows == 0
    # One rank has all the attention: what it needs besides is idle on the other one.
    one_sided = [[[65536], [64] * 1024]]
    alone = _simulate("unbalanced", Parallelism(data=2), one_sided, speed=1e9)
    assert alone.idle_by_cause.uneven == pytest.approx(sum(alone.idle) / 2, abs=1e-4)
    # Its keys and queries travel if it is balanced. A slow link leaves little but these to wait for.
    single = _simulate("distca-single", Parallelism(data=2), one_sided, per_node=1, speed=0.01).idle_by_cause
    assert single.rows > 0.5 > single.uneven
    tensor = _simulate("unbalanced", Parallelism(tensor=2), [[[8192]]], speed=0.01).idle_by_cause
    assert tensor.links > 0.5 and tensor.rows + tensor.uneven + tensor.fill == pytest.approx(0, abs=1e-9)
    # Two ranks gather keys and values of 131,072 rows in four layers, and scatter their gradients. Half of them travel
    # to each rank at 4 GB/s: 4 heads of 128 + 128 numbers of 2 bytes a row.
    gathered = _simulate("all-gather", Parallelism(context=2), [[[65536], [65536]]], speed=0.01)
    travelled = 2 * 4 * (131072 / 2 * 4 * (128 + 128) * 2) / 4e9
    assert gathered.idle_by_cause.rows * gathered.seconds == pytest.approx(travelled, rel=1e-3)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("name", "per_node"), [("distca-single", 2), ("distca", 2), ("distca", 4)])
def test_bytes_are_those_of_the_plans_statistics(name: str, per_node: int, recompute: bool) -> None:
    shape = Parallelism(data=4, micro_batches=2, recompute=recompute)
    alone, balanced = (_simulate(one, shape, per_node=per_node) for one in ("unbalanced", name))
    moved = between = 0
    for micro_batch in DOCUMENTS:
        whole = distca.Layout.from_documents(micro_batch)
        layouts = [half.layout for half in distca.halves(whole)] if name == "distca" else [whole]
        for layout in layouts:
            stats = distca.plan(
                layout,
                MODEL.heads,
                cost=DEVICE.cost(),
                tolerance=0.05,
                ranks_per_node=per_node,
                overlap=name == "distca",
            ).stats
            for message in stats.bytes:
                times = MODEL.layers * (2 if recompute and message.startswith("forward") else 1)
                moved += times * stats.bytes[message]
                between += times * stats.bytes_between_nodes[message]
    assert moved > 0
    assert balanced.bytes_between - alone.bytes_between == pytest.approx(between, abs=1)
    assert balanced.bytes_inside - alone.bytes_inside == pytest.approx(moved - between, abs=1)


_SECONDS = st.lists(st.integers(0, 9), min_size=4, max_size=4)
_CELLS = st.lists(st.integers(0, 9), min_size=16, max_size=16)


def _work(dense: list[int], at_once: list[int], cells: list[int], order: list[int]) -> LayerWork:
    """A layer of four homes in this order. Times are 10 ms, cells 100 MB from home to home; results go back."""
    index = torch.tensor(order)
    matrix = (torch.tensor(cells).reshape(4, 4).double().fill_diagonal_(0) * 1e8)[index][:, index]
    seconds, own = (torch.tensor(of).double()[index] / 100 for of in (dense, at_once))
    nothing = torch.zeros(4, dtype=torch.float64)
    part, none = Part(seconds, 2 * seconds, nothing, 0), Part(nothing, nothing, nothing, 0)
    attention = AttentionWork(own, matrix.sum(0) / 1e10, Traffic.of(matrix, 2), Traffic.of(matrix.T, 2))
    return LayerWork(Dense(none, part, part, none, none), {"forward": attention, "backward": attention})


@given(_SECONDS, _SECONDS, _CELLS, _CELLS, st.booleans())
def test_the_ranks_of_a_node_may_change_places_in_a_step(
    dense: list[int], at_once: list[int], first: list[int], second: list[int], nodes_bind: bool
) -> None:
    order = [1, 0, 3, 2]
    setup = cluster(4, 2, node_bandwidth=50e9 if nodes_bind else None)
    ends = []
    for numbers in ([0, 1, 2, 3], order):
        machine = Machine(Network(setup, 1), DEVICE)
        halves = {half: _work(dense, at_once, cells, numbers) for half, cells in enumerate((first, second))}
        for phase in ("forward", "backward"):
            run_pass(machine, phase, 2, halves)
        ends.append(machine.now)
    assert ends[1].tolist() == pytest.approx(ends[0][order].tolist())


@pytest.mark.parametrize("per_node", [2, 4])
def test_tasks_begin_after_their_rows_have_left_and_results_come_after_their_tasks(per_node: int) -> None:
    shape, documents = Parallelism(data=4), DOCUMENTS[:1]
    case = Case(documents, cluster(4, per_node), MODEL, shape)
    program = Ticking(case, ping_pong=True)
    machine = Machine(Network(case.cluster, 1), DEVICE, record=True)
    program.play(machine)
    latency = case.cluster.inside.latency
    seen = 0
    for tick, part in itertools.product(range(2), range(2)):
        phase = program.plans.table[tick].phase
        moved = _matrix(program, tick, part, phase)
        for layer in range(MODEL.layers):
            step = {
                name: [e for e in machine.events if e.call == Call(name, phase, layer, part)]
                for name in ("dispatch", "attend", "collect")
            }
            left, came = step["dispatch"][0].end, step["collect"][-1].end
            own, later = (event for event in step["attend"] if event.what == "attention")
            for source, server in moved.nonzero().tolist():
                assert later.begin[server] >= left[source] + latency
                assert came[source] >= later.end[server] + latency
                seen += 1
            assert bool((own.end <= later.begin).all())
    assert seen > 20


def _matrix(program: Ticking, tick: int, part: int, phase: str) -> torch.Tensor:
    """From which home rows go to which, by the plan's own list of transfers."""
    matrix = torch.zeros(4, 4)
    for transfer in program.plans.plan(tick, 0, part).transfers:
        if transfer.message == f"{phase}_in":
            matrix[transfer.source, transfer.target] += transfer.bytes
    return matrix


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_link_carries_more_than_it_can_in_a_step(name: str) -> None:
    # Two of four ranks share the two key/value heads that each of two tensor ranks has.
    context = Parallelism(context=4, tensor=2, micro_batches=2) if name == "ulysses-ring" else SHAPES["context"]
    for shape in (SHAPES["data"], context, SHAPES["fsdp"]):
        result = _simulate(name, shape, per_node=2, speed=0.05)
        ranks = shape.homes * shape.tensor  # each has links of its own
        assert result.bytes_inside <= result.seconds * ranks * 400e9 * 0.05
        assert 0 < result.bytes_between <= result.seconds * ranks * 40e9 * 0.05


@pytest.mark.parametrize("recompute", [False, True])
def test_two_simulated_ranks_make_the_calls_that_two_ranks_make(recompute: bool) -> None:
    plans = plans_for(2)
    options = {"recompute": {}} if recompute else {}

    def work(rank: int, context: distca.Context) -> list[tuple[str, str, int | None]]:
        model = seeded(lambda: Model(layers=2))
        context.start_trace()
        results(ping_pong, model, halves_for(plans, context, **options))
        spans = sorted((one for one in context.take_trace().spans if not one.is_wait), key=lambda one: one.begin)
        return [(one.name, one.phase, one.half) for one in spans]

    with loopback_group(plans) as contexts:
        real = on_all_ranks(contexts, work)
    shape = Parallelism(data=2, recompute=recompute)
    (result,) = simulate(
        [[[100, 31], [20, 150]]],
        cluster=cluster(2),
        model=dataclasses.replace(MODEL, layers=2),
        parallelism=shape,
        strategies=["distca"],
        record=True,
    )
    calls = [call for call, _ in itertools.groupby(event.call for event in result.events) if call is not None]
    assert [(call.part, call.phase, call.half) for call in calls] == real[0] == real[1]
