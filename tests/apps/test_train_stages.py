"""Which layers a stage has, and what the stages compute for each other."""

from __future__ import annotations

import itertools

import pytest

from distca import Heads, Layout
from distca.apps.train.split import deal_layers, ranges_of
from distca.pipeline import PipelinePlans


@pytest.mark.parametrize(("layer", "head"), [(1.0, 0.0), (1.0, 0.5), (1.0, 1.0), (2.0, 5.0), (1.0, 9.0)])
@pytest.mark.parametrize(("num_layers", "stages", "chunks"), [(5, 3, 1), (8, 2, 2), (9, 4, 1), (4, 4, 1), (12, 3, 2)])
def test_the_costliest_stage_costs_as_little_as_it_can(
    num_layers: int, stages: int, chunks: int, layer: float, head: float
) -> None:
    def worst(layers: tuple[int, ...]) -> float:
        return max(chunks * of_stage * layer + head * (stage == stages - 1) for stage, of_stage in enumerate(layers))

    each = range(1, num_layers + 1)
    possible = [dealt for dealt in itertools.product(each, repeat=stages) if sum(dealt) * chunks == num_layers]
    dealt = deal_layers(num_layers, stages, chunks=chunks, layer=layer, head=head)
    assert tuple(dealt) in possible
    assert worst(tuple(dealt)) == min(map(worst, possible))


def test_chunks_of_all_stages_follow_each_other_in_the_order_of_the_layers() -> None:
    assert [ranges_of([3, 2], stage, 1) for stage in (0, 1)] == [[range(3)], [range(3, 5)]]
    assert [ranges_of([1, 2], stage, 2) for stage in (0, 1)] == [[range(1), range(3, 4)], [range(1, 3), range(4, 6)]]


@pytest.mark.parametrize("across_stages", [True, False])
def test_stages_compute_for_each_other_unless_balance_is_inside_stages(across_stages: bool) -> None:
    layouts = [Layout.packed(lengths, ranks=2, tokens_per_rank=96) for lengths in ([150, 42], [8] * 24)]
    stages = [[0, 1], [2, 3]]
    plans = PipelinePlans(layouts, Heads(4, 2, 16), stages=stages, across_stages=across_stages, min_rows=8)
    tasks = [task for tick in range(len(plans.table)) for task in plans.plan(tick, 0).tasks]
    assert any(task.home != task.server for task in tasks), "nothing is balanced at all"
    crossing = [task for task in tasks if (task.home in stages[0]) != (task.server in stages[0])]
    assert bool(crossing) == across_stages
