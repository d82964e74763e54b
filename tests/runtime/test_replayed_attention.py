"""Replayed attention: ranks sleep as long as attention would take."""

from __future__ import annotations

import pytest
import torch

import distca
from distca import testing
from support.batches import random_batch, spill
from support.groups import loopback_group, on_all_ranks

HEADS = distca.Heads(4, 2, 16)
LENGTHS = (90, 20, 7)
FORWARD, BACKWARD = distca.CostModel(unit_ns=500.0), distca.CostModel(per_pair=2, per_row=3, unit_ns=400.0)


def pairs_and_rows(plan: distca.Plan, rank: int) -> tuple[int, int]:
    """The visible pairs and the rows of the rank's tasks, counted for each of their query heads."""
    pairs = rows = 0
    for task in (task for task in plan.tasks if task.server == rank):
        heads = (task.kv_head_end - task.kv_head_begin) * (HEADS.q // HEADS.kv)
        pairs += heads * sum(row + 1 for row in range(task.q_begin, task.q_end))
        rows += heads * (task.q_end - task.q_begin)
    return pairs, rows


def test_attending_takes_at_least_the_modelled_time_and_rows_travel() -> None:
    plan = distca.plan(spill(LENGTHS, 2), HEADS, tolerance=0.01, min_rows=8, split_heads=False)
    away = [task for task in plan.tasks if task.home != task.server]
    assert away
    batch = random_batch(LENGTHS, HEADS, seed=2)
    layout = plan.layout

    def work(rank: int, context: distca.Context) -> tuple[torch.Tensor, list[distca.Trace]]:
        tensors = [t[rows_of(layout, rank)].clone().requires_grad_() for t in (batch.q, batch.k, batch.v)]
        context.start_trace()
        out, _ = distca.core_attention(*tensors, plan.for_rank(rank), context=context)
        forward = context.take_trace()
        out.backward(torch.ones_like(out))
        return out.detach(), [forward, context.take_trace()]

    with loopback_group(plan, replay=(FORWARD, BACKWARD)) as contexts:
        assert contexts[0].attention == "replayed"
        results = on_all_ranks(contexts, work)
    for rank, (_, traces) in enumerate(results):
        pairs, rows = pairs_and_rows(plan, rank)
        assert pairs > 0
        assert traces[0].attending >= pairs * 500e-9
        assert traces[1].attending >= (2 * pairs + 3 * rows) * 400e-9
        sent = sum(transfer.bytes for transfer in plan.transfers if transfer.source == rank)
        assert sum(rows.bytes for trace in traces for rows in trace.copies) == sent
    # A server sends home the query that it got for a row, because nothing has overwritten it.
    for task in away:
        for index, row in enumerate(global_rows(task)):
            home = [int(g) for g in rows_of(layout, task.home)].index(row)
            assert torch.equal(results[task.home][0][home], batch.q[row]), (task, index)
    at_home = next(task for task in plan.tasks if task.home == task.server)
    home = [int(g) for g in rows_of(layout, at_home.home)].index(global_rows(at_home)[0])
    assert results[at_home.home][0][home].isnan().all()  # this is what the test filled it with: nobody computed it


def rows_of(layout: distca.Layout, rank: int) -> torch.Tensor:
    """The rows of the batch that a rank holds, in its order."""
    starts = [sum(LENGTHS[:document]) for document in range(len(LENGTHS))]
    rows = [torch.arange(starts[d] + begin, starts[d] + end) for d, begin, end in layout.segments(rank) if d >= 0]
    return torch.cat(rows)


def global_rows(task: distca.Task) -> range:
    start = sum(LENGTHS[: task.document])
    return range(start + task.q_begin, start + task.q_end)


def test_costs_without_times_cannot_be_replayed() -> None:
    for replay in ((distca.CostModel(), BACKWARD), (FORWARD, distca.CostModel())):
        with pytest.raises(distca.InvalidArgumentError, match="measured: unit_ns is None"):
            testing.loopback(2, max_tokens=8, heads=HEADS, replay=replay)


@pytest.mark.parametrize("unit_ns", [0.0, -1.0, float("nan"), float("inf")])
def test_a_unit_that_is_no_time_is_refused(unit_ns: float) -> None:
    with pytest.raises(distca.InvalidArgumentError, match="a positive number is expected"):
        testing.loopback(2, max_tokens=8, heads=HEADS, replay=(FORWARD, distca.CostModel(unit_ns=unit_ns)))
