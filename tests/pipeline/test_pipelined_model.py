"""A pipelined model computes what one process computes: loss and gradients, whatever the stages and recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import distca
from distca import pipeline
from distca.pipeline import Work
from support import staged_model as model
from support.branches import in_two
from support.ranks import launch


class Case(NamedTuple):
    """A pipeline: layers of each stage's chunks, micro-batches, chunks, what is checkpointed, and most in flight."""

    layers: Sequence[int]
    microbatches: int = 3
    chunks: int = 1
    recompute: str | tuple[int, ...] | None = None
    save_attention: bool = False
    in_flight: int | None = None
    branches: bool = False  # whether the second half of each document is a branch of the first


def _run(case: Case) -> tuple[float, dict[str, torch.Tensor], float, int]:
    """One rank's losses, gradients, imbalance and number of steps."""
    _rank, num_stages = dist.get_rank(), len(case.layers)
    data = dist.get_world_size() // num_stages
    documents = model.DOCUMENTS[: case.microbatches]
    layouts = [distca.Layout.from_documents(lengths[:data]) for lengths in documents]
    stages = [[stage * data + r for r in range(data)] for stage in range(num_stages)]
    with distca.init(max_tokens=512, heads=model.HEADS, timeout=20) as context:
        plans = pipeline.PipelinePlans(
            [in_two(layout) if case.branches else layout for layout in layouts],
            model.HEADS,
            stages=stages,
            layers=case.layers,
            chunks=case.chunks,
            in_flight=case.in_flight,
            context=context,
            tolerance=0.02,
            min_rows=8,
        )
        ticks = pipeline.Ticks(plans, context=context, recompute=case.recompute, save_attention=case.save_attention)
        whole = model.Model(sum(case.layers) * case.chunks)
        first_layers = [sum(case.layers) * chunk + sum(case.layers[: plans.stage]) for chunk in range(case.chunks)]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return distca.core_attention(q, k, v, ticks.plan, context=context)[0]

        def group_of(layers: Sequence[torch.nn.Module], h: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            for layer in layers:
                h = layer(h, positions, attend)
            return h

        def stage(work: Work, x: torch.Tensor | None) -> torch.Tensor:
            ids, labels, positions = model.tokens(work.microbatch, plans.index, documents[work.microbatch][plans.index])
            begin = first_layers[work.chunk]
            layers = list(whole.layers[begin : begin + case.layers[plans.stage]])

            def all_layers(h: torch.Tensor) -> torch.Tensor:
                return ticks.pad(group_of(layers, h, positions))

            h = whole.embedding(ids) if x is None else x
            if case.recompute == "stage":
                h = checkpoint(all_layers, h, use_reentrant=False)
            elif case.recompute is None:
                h = all_layers(h)
            else:
                extra: dict[str, Any] = {"context_fn": distca.save_core_attention} if case.save_attention else {}
                sizes = [1] * 8 if case.recompute == "layer" else list(case.recompute)
                while layers:
                    size = sizes.pop(0)
                    group = [layers.pop(0) for _ in range(max(size, 1))]
                    if size == 0:
                        h = group_of(group, h, positions)
                    else:
                        h = checkpoint(group_of, group, h, positions, use_reentrant=False, **extra)
                h = ticks.pad(h)
            is_last = work.chunk == case.chunks - 1 and plans.stage == num_stages - 1
            return whole.loss(h, labels) if is_last else h

        losses = ticks.run(stage, like=torch.empty(0, model.HIDDEN))
        assert [(tick.phase, tick.work) for tick in ticks.times] == [
            (tick.phase, tick.work[plans.stage]) for tick in plans.table
        ]
        ends = [0.0, *(tick.end for tick in ticks.times)]
        assert all(end <= tick.begin <= tick.computed <= tick.end for end, tick in zip(ends, ticks.times, strict=False))
        steps = context.step
        dist.barrier()
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    return float(sum(losses)), gradients, plans.stats.imbalance_after, steps


def _run_all(cases: list[Case]) -> list[Any]:
    return [_run(case) for case in cases]


TWO_STAGES = [
    Case([2, 2], microbatches=4),
    Case([1, 2], microbatches=5),
    Case([1, 1], microbatches=4, chunks=2),
    Case([2, 1], microbatches=2, chunks=2, recompute="stage"),
    Case([2, 2], recompute="layer"),
    Case([1, 2], recompute="layer"),
    Case([2, 2], recompute="stage"),
    Case([1, 2], recompute="stage"),
    Case([1, 3], recompute=(1, 2)),
    Case([1, 3], recompute=(1, 1, 0)),
    Case([2, 3], recompute=(0, 1, 0)),
    Case([2, 2], recompute="layer", save_attention=True),
    Case([1, 2], recompute="layer", save_attention=True),
    Case([1, 3], recompute=(1, 2), save_attention=True),
    Case([1, 2], microbatches=5, in_flight=2),
    Case([1, 2], microbatches=4, recompute="layer", branches=True),
]


THREE_STAGES = [
    Case([2, 1, 1], microbatches=4),
    Case([1, 1, 1], microbatches=3, chunks=2, recompute="layer"),
    Case([1, 2, 1], microbatches=2, recompute="stage"),
    Case([1, 1, 2], microbatches=1),
    Case([1, 2, 1], microbatches=6, in_flight=3, recompute="layer"),
]


ONE_STAGE = [Case([2], microbatches=4, chunks=2), Case([1], microbatches=2, chunks=3, recompute="stage")]


@pytest.mark.parametrize(
    ("cases", "ranks"),
    [(ONE_STAGE, 2), (TWO_STAGES, 4), (THREE_STAGES, 3)],
    ids=["one stage", "two stages", "three stages"],
)
def test_a_pipeline_computes_what_one_process_computes(cases: list[Case], ranks: int) -> None:
    results = launch(_run_all, cases, ranks=ranks)
    for number, case in enumerate(cases):
        of_ranks = [result[number] for result in results]
        documents = [lengths[: ranks // len(case.layers)] for lengths in model.DOCUMENTS[: case.microbatches]]
        model.assert_as_alone([result[:2] for result in of_ranks], sum(case.layers) * case.chunks, documents, case)
        assert max(imbalance for _, _, imbalance, _ in of_ranks) < 1.05, case
        assert len({steps for _, _, _, steps in of_ranks}) == 1
