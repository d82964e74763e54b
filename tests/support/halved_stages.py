"""The small model of `staged_model` in a pipeline whose stages run in ping-pong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import distca
from distca import pipeline
from distca.pipeline import TickPlan, Work
from support import staged_model as model
from support.ranks import launch

#: [micro-batch][rank of a stage]: the first has a half without rows on rank 0, the last one on all ranks.
DOCUMENTS = [
    [[300], [30] * 10],
    [[100, 200], [150, 150]],
    [[60] * 5, [120, 180]],
    [[10] * 30, [290, 10]],
    [[299, 1], [20] * 15],
    [[200], []],
]


class Case(NamedTuple):
    """A pipeline: layers of each stage's chunks, micro-batches, chunks, and what is checkpointed."""

    layers: Sequence[int]
    microbatches: Sequence[int] = (0, 1, 2)
    chunks: int = 1
    recompute: str | tuple[int, ...] | None = None
    save_attention: bool = False

    @property
    def sizes(self) -> list[int]:
        """The sizes of the groups of layers that are run again together."""
        if self.recompute is None or self.recompute == "stage":
            return []
        return [1] * max(self.layers) if isinstance(self.recompute, str) else list(self.recompute)


class Stage(torch.nn.Module):
    """A chunk of layers of one stage, padded to the depth of the deepest."""

    def __init__(self, case: Case, layers: Iterable[torch.nn.Module], whole: model.Model | None) -> None:
        super().__init__()
        self.case, self.layers = case, torch.nn.ModuleList(layers)
        self._last = [] if whole is None else [whole]  # in a list, because it is no part of this module

    def forward(self, h: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor, plan: TickPlan) -> torch.Tensor:
        """The output of the last layer, ``[rows, hidden]``, or at the end of the model the loss."""

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return distca.core_attention(q, k, v, plan)[0]

        def run(h: torch.Tensor, begin: int, end: int) -> torch.Tensor:
            for layer in self.layers[begin:end]:
                h = layer(h, positions, attend)
            return h

        if self.case.recompute == "stage":
            h = checkpoint(lambda h: plan.pad(run(h, 0, len(self.layers))), h, use_reentrant=False)
        else:
            extra: dict[str, Any] = {"context_fn": distca.save_core_attention} if self.case.save_attention else {}
            sizes, begin = self.case.sizes, 0
            while sizes and begin < len(self.layers):
                end = begin + sizes.pop(0)
                h, begin = checkpoint(run, h, begin, end, use_reentrant=False, **extra), end
            h = plan.pad(run(h, begin, len(self.layers)))
        return self._last[0].loss(h, labels) if self._last else h


def run(case: Case) -> tuple[float, dict[str, torch.Tensor], float, int]:
    """One rank's losses, gradients, imbalance and number of steps."""
    num_stages = len(case.layers)
    data = dist.get_world_size() // num_stages
    documents = [DOCUMENTS[number][:data] for number in case.microbatches]
    layouts = [distca.Layout.from_documents(lengths) for lengths in documents]
    with distca.init(max_tokens=512, heads=model.HEADS, timeout=20) as context:
        plans = pipeline.PipelinePlans(
            layouts,
            model.HEADS,
            stages=[[stage * data + r for r in range(data)] for stage in range(num_stages)],
            layers=case.layers,
            chunks=case.chunks,
            halves=[distca.halves(layout) for layout in layouts],
            context=context,
            tolerance=0.02,
            min_rows=8,
        )
        ticks = pipeline.Ticks(plans, context=context, recompute=case.recompute, save_attention=case.save_attention)
        whole, per_chunk, mine = model.Model(sum(case.layers) * case.chunks), sum(case.layers), plans.stage
        halved = []
        for chunk in range(case.chunks):
            begin = per_chunk * chunk + sum(case.layers[:mine])
            is_last = (chunk, mine) == (case.chunks - 1, num_stages - 1)
            layers = whole.layers[begin : begin + case.layers[mine]]
            halved.append(distca.PingPong(Stage(case, layers, whole if is_last else None)))

        def stage(work: Work, x: torch.Tensor | None) -> torch.Tensor:
            ids, labels, positions = model.tokens(work.microbatch, plans.index, documents[work.microbatch][plans.index])
            x = whole.embedding(ids) if x is None else x
            rows = zip(*(plans.split(work.microbatch, t) for t in (x, positions, labels)), strict=True)
            outputs = halved[work.chunk](
                *({"h": h, "positions": at, "labels": to, "plan": ticks.plan} for h, at, to in rows)
            )
            return sum(outputs) if outputs[0].dim() == 0 else plans.join(work.microbatch, outputs)

        losses = ticks.run(stage, like=torch.empty(0, model.HIDDEN))
        steps = context.step
        dist.barrier()
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    return float(sum(losses)), gradients, plans.stats.imbalance_after, steps


def run_all(cases: Sequence[Case]) -> list[Any]:
    """What `run` returns for each case."""
    return [run(case) for case in cases]


def assert_exact(cases: Sequence[Case], ranks: int) -> None:
    """Asserts that these pipelines compute what one process does in float64, and that all ranks take as many steps."""
    results = launch(run_all, cases, ranks=ranks)
    for case, *of_ranks in zip(cases, *results, strict=True):
        documents = [DOCUMENTS[number][: ranks // len(case.layers)] for number in case.microbatches]
        found = [(loss, gradients) for loss, gradients, _, _ in of_ranks]
        model.assert_as_alone(found, sum(case.layers) * case.chunks, documents, case)
        assert len({steps for _, _, _, steps in of_ranks}) == 1, case
        steps_of_pass = 2 * max(case.layers) * (len(case.microbatches) * case.chunks + len(case.layers) - 1)
        passes = 3 if case.recompute is not None and not case.save_attention else 2
        assert of_ranks[0][3] == passes * steps_of_pass, case
