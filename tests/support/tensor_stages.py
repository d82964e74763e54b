"""The small model of `staged_model` with tensor parallelism, in one stage or in a pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import distca
from distca import pipeline
from distca.pipeline import Ticks, Work
from support import halved_stages, tensor_parallel
from support import staged_model as model
from support.ranks import launch

#: [micro-batch][data rank]: unequal attention.
DOCUMENTS = [
    [[300], [30] * 10, [40, 60] * 3],
    [[100, 200], [150, 150], [300]],
    [[10] * 30, [290, 10], [100] * 3],
]


class Case(NamedTuple):
    """Sizes of the tensor and data groups, layers of each stage's chunks, what is run again, and if in ping-pong."""

    tensor: int = 2
    data: int = 2
    layers: Sequence[int] = (2,)
    microbatches: int = 2
    chunks: int = 1
    recompute: str | None = None
    save_attention: bool = False
    ping_pong: bool = False
    heads: distca.Heads = model.HEADS
    order: tuple[str, ...] = ("pipeline", "data", "tensor")  # of the mesh, from the outermost dimension

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.tensor * self.data * len(self.layers)


class Result(NamedTuple):
    """Of one process: its losses, its part of the gradients of the whole model, and figures of its context."""

    loss: float
    gradients: dict[str, torch.Tensor]
    imbalance: float
    steps: int


def run(case: Case) -> Result:
    """Trains one iteration in this process."""
    sizes = {"pipeline": len(case.layers), "data": case.data, "tensor": case.tensor}
    mesh = dist.init_device_mesh("cpu", tuple(sizes[name] for name in case.order), mesh_dim_names=case.order)
    documents = [of_ranks[: case.data] for of_ranks in DOCUMENTS[: case.microbatches]]
    layouts = [distca.Layout.from_documents(lengths) for lengths in documents]
    mine = model.Model(sum(case.layers) * case.chunks, case.heads)
    tensor_parallel.divide(mine, mesh.get_group("tensor"))
    with distca.init(
        max_tokens=512,
        heads=case.heads,
        tensor_parallel=mesh["tensor"],
        pipeline_parallel=mesh.get_group("pipeline"),
        timeout=20,
    ) as context:
        options = {"context": context, "tolerance": 0.02, "min_rows": 8}
        train = _one_stage if len(case.layers) == 1 and not case.ping_pong else _pipeline
        loss, imbalance = train(case, mine, context, layouts, documents, options)
        steps = context.step
        dist.barrier()
    tensor_rank = mesh.get_local_rank("tensor")
    gradients = tensor_parallel.of_whole(mine, model.Model(len(mine.layers), case.heads), tensor_rank, case.tensor)
    return Result(loss if tensor_rank == 0 else 0.0, gradients, imbalance, steps)


def _one_stage(case: Case, mine: model.Model, context: Any, layouts: Any, documents: Any, options: Any) -> Any:
    total, imbalance = 0.0, 1.0
    for number, layout in enumerate(layouts):
        plan = distca.plan(layout, context.heads, **options)
        ids, labels, positions = model.tokens(number, context.rank, documents[number][context.rank])
        h = _layers(case, list(mine.layers), mine.embedding(ids), positions, plan, lambda h: h)
        loss = mine.loss(h, labels)
        loss.backward()
        total, imbalance = total + loss.item(), max(imbalance, plan.stats.imbalance_after)
    return total, imbalance


def _pipeline(case: Case, mine: model.Model, context: Any, layouts: Any, documents: Any, options: Any) -> Any:
    plans = pipeline.PipelinePlans(
        layouts,
        context.heads,
        stages=context.stages,
        layers=case.layers,
        chunks=case.chunks,
        halves=[distca.halves(layout) for layout in layouts] if case.ping_pong else None,
        **options,
    )
    ticks = Ticks(plans, context=context, recompute=case.recompute, save_attention=case.save_attention)

    def stage(work: Work, x: torch.Tensor | None) -> torch.Tensor:
        ids, labels, positions = model.tokens(work.microbatch, plans.index, documents[work.microbatch][plans.index])
        begin = sum(case.layers) * work.chunk + sum(case.layers[: plans.stage])
        layers = list(mine.layers[begin : begin + case.layers[plans.stage]])
        is_last = (work.chunk, plans.stage) == (case.chunks - 1, len(case.layers) - 1)
        x = mine.embedding(ids) if x is None else x
        if case.ping_pong:
            return _in_ping_pong(case, layers, mine if is_last else None, ticks, work, (x, positions, labels))
        h = _layers(case, layers, x, positions, ticks.plan, ticks.pad)
        return mine.loss(h, labels) if is_last else h

    losses = ticks.run(stage, like=torch.empty(0, model.HIDDEN))
    return float(sum(losses)), plans.stats.imbalance_after


def _in_ping_pong(
    case: Case, layers: list[Any], whole: model.Model | None, ticks: Ticks, work: Work, rows: Sequence[torch.Tensor]
) -> torch.Tensor:
    """A chunk of layers in ping-pong. `rows` are its input, positions and labels; `whole` makes the loss."""
    halved_case = halved_stages.Case(case.layers, recompute=case.recompute, save_attention=case.save_attention)
    run = distca.PingPong(halved_stages.Stage(halved_case, layers, whole))
    halves = zip(*(ticks.plans.split(work.microbatch, t) for t in rows), strict=True)
    outputs = run(*({"h": h, "positions": at, "labels": to, "plan": ticks.plan} for h, at, to in halves))
    return sum(outputs) if outputs[0].dim() == 0 else ticks.plans.join(work.microbatch, outputs)


def _layers(
    case: Case,
    layers: list[torch.nn.Module],
    h: torch.Tensor,
    positions: torch.Tensor,
    plan: Any,
    pad: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return distca.core_attention(q, k, v, plan)[0]

    def all_layers(h: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            h = layer(h, positions, attend)
        return pad(h)

    if case.recompute == "stage":
        return checkpoint(all_layers, h, use_reentrant=False)
    if case.recompute is None:
        return all_layers(h)
    extra: dict[str, Any] = {"context_fn": distca.save_core_attention} if case.save_attention else {}
    for layer in layers:
        h = checkpoint(layer, h, positions, attend, use_reentrant=False, **extra)
    return pad(h)


def _run_all(cases: Sequence[Case]) -> list[Result]:
    return [run(case) for case in cases]


def assert_exact(cases: Sequence[Case]) -> None:
    """Asserts that these cases, all of one number of processes, compute what one process computes in float64."""
    [ranks] = {case.ranks for case in cases}
    results = launch(_run_all, cases, ranks=ranks)
    for number, case in enumerate(cases):
        of_ranks = [result[number] for result in results]
        documents = [of_data[: case.data] for of_data in DOCUMENTS[: case.microbatches]]
        loss, gradients = model.alone(sum(case.layers) * case.chunks, documents, case.heads)
        assert sum(result.loss for result in of_ranks) == pytest.approx(loss, rel=1e-5), case
        assert {name for result in of_ranks for name in result.gradients} == set(gradients), case
        for name, expected in gradients.items():
            found = sum(result.gradients[name].double() for result in of_ranks if name in result.gradients)
            error = float((found - expected).abs().max() / expected.abs().max())
            assert error < 1e-5 and math.isfinite(error), (case, name, error)
        assert max(result.imbalance for result in of_ranks) < 1.05, case
        assert len({result.steps for result in of_ranks}) == 1, case
