"""The small model of `staged_model` in the schedule of ticks of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import distca
from distca.integrations.torch_pipelining import ScheduleTicks
from distca.pipeline import PipelinePlans, Ticks
from support import staged_model as model

ROWS = 300


class Case(NamedTuple):
    """A pipeline: layers of each stage's chunks, chunks, and what is checkpointed; and the data parallelism."""

    layers: Sequence[int]
    chunks: int = 1
    microbatches: int = 4
    recompute: str | None = None
    save_attention: bool = False
    wrap: str = ""
    mean: bool = False  # whether the loss is the mean over the micro-batches, so that PyTorch scales gradients
    in_flight: int | None = None
    ping_pong: bool = False

    @property
    def depth(self) -> int:
        """Layers of the model."""
        return sum(self.layers) * self.chunks

    def lengths(self, step: int, data: int) -> list[list[list[int]]]:
        """The documents of a step: other ones in each."""
        return [model.DOCUMENTS[(step + i) % len(model.DOCUMENTS)][:data] for i in range(self.microbatches)]


class Stage(torch.nn.Module):
    """Some layers of the model, and what is at its ends."""

    def __init__(self, case: Case, begin: int, num_layers: int) -> None:
        super().__init__()
        whole = model.Model(case.depth)
        self.case = case
        self.layers = torch.nn.ModuleDict({str(n): whole.layers[n] for n in range(begin, begin + num_layers)})
        if begin == 0:
            self.embedding = whole.embedding
        if begin + num_layers == case.depth:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return distca.core_attention(q, k, v, plan)[0]

        saved: dict[str, Any] = {"context_fn": distca.save_core_attention} if self.case.save_attention else {}
        h = self.embedding(x) if hasattr(self, "embedding") else x
        for layer in self.layers.values():
            if self.case.recompute == "layer":
                h = checkpoint(layer, h, positions, attend, use_reentrant=False, **saved)
            else:
                h = layer(h, positions, attend)
        h = plan.pad(h)
        return self.head(self.norm(h)) if hasattr(self, "head") else h


class Halved(torch.nn.Module):
    """A stage in ping-pong. It is told the ticks of each step."""

    ticks: Ticks

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.run = distca.PingPong(stage)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        plans, work = self.ticks.plans, self.ticks.current.work
        assert work is not None
        halves = zip(*(plans.split(work.microbatch, whole) for whole in (x, positions)), strict=True)
        outputs = self.run(*({"x": h, "positions": at, "plan": plan} for h, at in halves))
        return plans.join(work.microbatch, outputs)


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


class Pipeline:
    """One rank's schedule, and its inputs.

    Args:
        case: the pipeline.
        context: the context of all ranks.
        seconds: how long PyTorch waits for the tensors of a neighbour.
        changes: other arguments for the first `PipelineStage` of this rank.
    """

    def __init__(self, case: Case, context: distca.Context, seconds: float = 60.0, **changes: Any) -> None:
        self.case, self.context = case, context
        num_stages = len(case.layers)
        self.data = dist.get_world_size() // num_stages
        self.stages = [[stage * self.data + r for r in range(self.data)] for stage in range(num_stages)]
        self.stage, self.index = divmod(dist.get_rank(), self.data)
        limit = timedelta(seconds=seconds)
        pipelines = [dist.new_group([ranks[r] for ranks in self.stages], timeout=limit) for r in range(self.data)]
        groups = [dist.new_group(ranks) for ranks in self.stages]
        mesh = dist.DeviceMesh.from_group(groups[self.stage], "cpu") if case.wrap == "fsdp" else None
        self.modules, self.made = [], []
        for chunk in range(case.chunks):
            begin = sum(case.layers) * chunk + sum(case.layers[: self.stage])
            module: Any = Stage(case, begin, case.layers[self.stage])
            if case.ping_pong:
                module = Halved(module)
            if case.wrap == "ddp":
                module = DistributedDataParallel(module, process_group=groups[self.stage])
            elif case.wrap == "fsdp":
                for layer in module.layers.values():
                    fully_shard(layer, mesh=mesh)
                fully_shard(module, mesh=mesh)
            self.modules.append(module)
            position = num_stages * chunk + self.stage
            hidden = torch.empty(ROWS, model.HIDDEN, requires_grad=True)
            is_last = position == num_stages * case.chunks - 1
            arguments: dict[str, Any] = {
                "submodule": module,
                "stage_index": position,
                "num_stages": num_stages * case.chunks,
                "device": torch.device("cpu"),
                "input_args": torch.zeros(ROWS, dtype=torch.int64) if position == 0 else hidden,
                "output_args": torch.empty(ROWS, model.VOCABULARY, requires_grad=True) if is_last else hidden,
                "group": pipelines[self.index],
            }
            self.made.append(PipelineStage(**(arguments | changes if chunk == 0 else arguments)))
        self.schedule = self.scheduled(self.made)

    def scheduled(self, stages: list[PipelineStage], microbatches: int | None = None) -> ScheduleTicks:
        """A schedule of these stages."""
        number = microbatches or self.case.microbatches
        return ScheduleTicks(stages, number, loss_fn=summed_loss, scale_grads=self.case.mean)

    def ticks(self, step: int, **options: Any) -> Ticks:
        """The ticks of a step."""
        given: dict[str, Any] = {
            "layouts": [distca.Layout.from_documents(lengths) for lengths in self.case.lengths(step, self.data)],
            "stages": self.stages,
            "layers": self.case.layers,
            "chunks": self.case.chunks,
            "in_flight": self.case.in_flight,
        }
        if self.case.ping_pong:
            given["halves"] = [distca.halves(layout) for layout in given["layouts"]]
        plans = PipelinePlans(heads=model.HEADS, context=self.context, tolerance=0.02, min_rows=8, **(given | options))
        return Ticks(
            plans, context=self.context, recompute=self.case.recompute, save_attention=self.case.save_attention
        )

    def run(
        self, step: int, ticks: Ticks | None = None, *, evaluate: bool = False, collect: bool = True
    ) -> tuple[float, dict[str, Any]]:
        """The losses of a step and this rank's gradients so far, as parts of the sums over all ranks.

        If they are not collected, they stay where they are.
        """
        batches = [
            model.tokens(number, self.index, lengths[self.index])
            for number, lengths in enumerate(self.case.lengths(step, self.data))
        ]
        tokens, labels, positions = (torch.cat(parts) for parts in zip(*batches, strict=True))
        losses: list[torch.Tensor] = []
        ticks = ticks or self.ticks(step, backward=not evaluate)
        for module in self.modules:
            module.ticks = ticks  # type: ignore[assignment]
        run = self.schedule.eval if evaluate else self.schedule.step
        is_last = self.stage == len(self.case.layers) - 1
        run(
            *((tokens,) if self.stage == 0 else ()),
            positions=positions,
            ticks=ticks,
            **({"target": labels, "losses": losses} if is_last else {}),
        )
        return sum(loss.item() for loss in losses), self._gradients() if collect else {}

    def _gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for module in self.modules:
            for name, parameter in module.named_parameters():
                gradient, parameter.grad = parameter.grad, None
                if gradient is None:
                    continue
                if isinstance(module, FSDPModule):
                    gradient = gradient.full_tensor()
                found[name.removeprefix("module.").removeprefix("run.model.")] = gradient * (
                    self.case.microbatches if self.case.mean else 1
                )
        return found
