"""A model that processes share, by stages of a pipeline and by tensor ranks, and the steps of its training."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from distca.apps.common.memory_log import Watch
from distca.apps.common.packing import NO_TARGET
from distca.apps.train.checkpoint import Trained
from distca.apps.train.config import TrainConfig
from distca.apps.train.data import Batch
from distca.apps.train.iterations import Shape
from distca.apps.train.metrics import AttentionLoads
from distca.apps.train.split import Split, ranges_of
from distca.apps.train.stages import Chunk, norm_of, with_head
from distca.apps.train.tensor_parallel import add_up
from distca.context import Context
from distca.pingpong.ping_pong import PingPong
from distca.pipeline import CurrentTick, PipelinePlans, Ticks, TickTime, Work
from distca.planner.layout import Layout


@dataclass
class PipelinedModel:
    """This process's part of a model, as the ticks of an iteration call it.

    Attributes:
        model: the model of transformers without what other stages have.
        split: how the processes share the work.
        shape: what plans need to know of the model.
        config: the options of the run.
        partial: names of the parameters of whose gradient each tensor rank has a part.
        tied: whether embedding and head have the same weights.
        scale, softcap: those of all layers.
    """

    model: PreTrainedModel
    split: Split
    shape: Shape
    config: TrainConfig
    partial: list[str]
    tied: bool
    scale: float
    softcap: float

    def __post_init__(self) -> None:
        if self.config.fsdp:
            self._shard()
        split, last = self.split, self.split.stages * self.split.chunks - 1
        self._chunks: list[Any] = []
        for number, layers in enumerate(self.ranges):
            position = number * split.stages + split.stage
            chunk = Chunk(self.model, layers, last=position == last)
            called = with_head(self.model, chunk) if position == last else chunk
            self._chunks.append(PingPong(called) if self.config.ping_pong else called)

    def _shard(self) -> None:
        """Shards each module over the data ranks of the stage. All of them have the whole weights before."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # half a second, for runs with --fsdp

        # FSDP2 warns that what a sharded embedding or head returns must not be changed in place. Nobody does so.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        config, mesh = self.config, self.split.mesh["dp"]
        policy = MixedPrecisionPolicy()
        if config.master_weights:
            policy = MixedPrecisionPolicy(param_dtype=config.torch_dtype, reduce_dtype=torch.float32)
        for chunk in range(self.split.chunks):
            for module in self.modules_of(chunk):
                fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        if self.is_tied and self.split.has_last:  # it has the embedding's weights, and does not call it
            self.model.get_input_embeddings().weight = self.model.lm_head.weight

    @property
    def ranges(self) -> list[range]:
        """The layers of each chunk of this stage."""
        return ranges_of(self.shape.layers, self.split.stage, self.split.chunks)

    def modules_of(self, chunk: int) -> list[Any]:
        """The modules of a chunk that FSDP2 shards, each by itself.

        Embedding and head that are tied in one stage are not among them: FSDP2 cannot shard what two modules share.
        """
        base: Any = self.model.base_model
        found = [base.layers._modules[str(layer)] for layer in self.ranges[chunk]]
        first, last = self.split.has_first and chunk == 0, self.split.has_last and chunk == self.split.chunks - 1
        shares = self.split.stages == 1 and self.tied
        found += [base.embed_tokens] if first and not shares else []
        found += [getattr(base, norm_of(base))] if last else []
        return found + ([self.model.lm_head] if last and not shares else [])

    @property
    def is_tied(self) -> bool:
        """Whether the first and the last stage have the same weights."""
        return self.split.stages > 1 and self.tied

    def run(
        self, plans: PipelinePlans, batches: Sequence[Batch], context: Context, loss_scale: float, watch: Watch
    ) -> tuple[torch.Tensor, list[TickTime]]:
        """Runs the ticks of the plans. Gradients are those of the losses times `loss_scale`.

        Returns:
            The sum of the losses of this process, which is 0 on all but one process for each row; and the times.
        """
        checkpoints = self.config.checkpoint_activations and self.model.training
        ticks = _TrainingTicks(
            plans,
            context=context,
            recompute="layer" if checkpoints else None,
            save_attention=checkpoints,
            scale=self.scale,
            softcap=self.softcap,
        )
        ticks.watch, ticks.part = watch, self
        loss_sum = torch.zeros(())

        def stage(work: Work, x: torch.Tensor | None) -> torch.Tensor:
            nonlocal loss_sum
            with self._autocast():
                outputs = self._call(work, self._inputs(plans, batches[work.microbatch], work, x), ticks, context)
            if not (self.split.has_last and work.chunk == self.split.chunks - 1):
                return self._joined(plans, work, [output.last_hidden_state.squeeze(0) for output in outputs])
            labels = self._rows(plans, work, batches[work.microbatch].labels[0], NO_TARGET)
            loss = torch.stack(
                [
                    F.cross_entropy(output.logits.squeeze(0).float(), of_part, reduction="sum")
                    for output, of_part in zip(outputs, labels, strict=True)
                ]
            ).sum()
            if self.split.place[2] == 0:
                loss_sum = loss_sum + loss.detach()
            return loss * loss_scale

        like = torch.empty(0, self.model.config.get_text_config().hidden_size, dtype=self.config.weights_dtype)
        ticks.run(stage, like=like)
        return loss_sum, ticks.times

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", self.config.torch_dtype) if self.config.master_weights else nullcontext()

    def _call(self, work: Work, inputs: list[dict[str, Any]], ticks: Ticks, context: Context) -> list[Any]:
        common = {"use_cache": False, "plan": ticks.plan, "distca_context": context}
        chunk = self._chunks[work.chunk]
        if self.config.ping_pong:
            return list(chunk(*({**of_half, **common} for of_half in inputs)))
        return [chunk(**inputs[0], **common)]

    def _inputs(self, plans: PipelinePlans, batch: Batch, work: Work, x: torch.Tensor | None) -> list[dict[str, Any]]:
        """The inputs of a chunk; with ping-pong of both halves."""
        name, rows = ("input_ids", batch.input_ids[0]) if x is None else ("inputs_embeds", x)
        parts = self._rows(plans, work, rows, 0)
        of_halves = None if plans.halves is None else plans.halves[work.microbatch]
        layouts: list[Layout] = [batch.layout] if of_halves is None else [half.layout for half in of_halves]
        return [
            {name: part.unsqueeze(0), "position_ids": layout.position_ids(plans.index).unsqueeze(0)}
            for part, layout in zip(parts, layouts, strict=True)
        ]

    @staticmethod
    def _rows(plans: PipelinePlans, work: Work, rows: torch.Tensor, fill: int) -> Sequence[torch.Tensor]:
        return [rows] if plans.halves is None else plans.split(work.microbatch, rows, fill=fill)

    @staticmethod
    def _joined(plans: PipelinePlans, work: Work, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return parts[0] if plans.halves is None else plans.join(work.microbatch, parts)

    def add_up_gradients(self) -> None:
        """Adds up what processes have of the gradient of the same parameter."""
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        for one in parameters:  # DTensor may leave the gradient of a shard whole
            if isinstance(one, DTensor) and isinstance(one.grad, DTensor) and one.grad.placements != one.placements:
                one.grad = one.grad.redistribute(placements=one.placements)
        if self.partial:
            of_names = dict(self.model.named_parameters())
            add_up([of_names[name] for name in self.partial], self.split.mesh.get_group("tp"))
        if self.split.data > 1:
            whole = [one for one in parameters if not _is_sharded_over_data(one)]
            add_up(whole, self.split.mesh.get_group("dp"))
            for one in whole if self.config.fsdp else []:  # as FSDP2 averages the others
                _local(one.grad).div_(self.split.data)
        if self.is_tied and (ends := self.split.ends) is not None:
            add_up([self.model.get_input_embeddings().weight], ends)

    def total_norm(self) -> float:
        """The norm of the gradients of the whole model. It is collective over all processes."""
        tied = self.model.get_input_embeddings() if self.is_tied and self.split.has_last else None
        square = torch.zeros((), dtype=torch.float64)
        for one in self.model.parameters():
            if one.grad is not None and not (tied is not None and one is tied.weight):
                square += _local(one.grad).double().square().sum() / self._copies(one)
        dist.all_reduce(square)
        return square.sqrt().item()

    def _copies(self, parameter: torch.Tensor) -> int:
        """How many processes of this stage have the same entries of a parameter."""
        shards = 1
        if isinstance(parameter, DTensor):
            for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
                shards *= 1 if isinstance(placement, Replicate) else size
        return self.split.data * self.split.tensor // shards

    def clip(self, largest: float) -> float:
        """Scales the gradients down to this norm of all together. Returns the norm before."""
        norm = self.total_norm()
        factor = min(1.0, largest / (norm + 1e-6))
        for one in self.model.parameters():
            if one.grad is not None and factor < 1:
                _local(one.grad).mul_(factor)
        return norm


class _TrainingTicks(Ticks):
    """Ticks that tell an observer when each is over. FSDP2 adds gradients up in the last backward of each chunk."""

    watch: Watch
    part: PipelinedModel

    def __iter__(self) -> Generator[CurrentTick]:
        last = len(self.plans.layouts) - 1
        for tick in super().__iter__():
            if self.part.config.fsdp and tick.work is not None and tick.phase == "backward":
                for module in self.part.modules_of(tick.work.chunk):
                    module.set_requires_gradient_sync(tick.work.microbatch == last)
            yield tick
            self.watch.note(tick.phase)


@dataclass
class Iteration:
    """The micro-batches of a step with the plans of all ticks, on one process.

    Attributes:
        part: this process's part of the model.
        batches: the micro-batches.
        plans: their plans.
        context: the context that runs them.
        times: the times of the ticks, once they were run.
    """

    part: PipelinedModel
    batches: list[Batch]
    plans: PipelinePlans
    context: Context
    times: Sequence[TickTime] = ()

    def forward_backward(self, trained: Trained, watch: Watch) -> tuple[torch.Tensor, int]:
        """As `Work.forward_backward`."""
        trained.optimizer.zero_grad()
        num_targets = sum(batch.num_targets for batch in self.batches)
        watch.begin(self.arenas)
        part = self.part
        # FSDP2 averages gradients, but the loss is the mean over targets, and ranks have different numbers of targets.
        loss_scale = (part.split.data if part.config.fsdp else 1) / max(num_targets, 1)
        loss_sum, self.times = part.run(self.plans, self.batches, self.context, loss_scale, watch)
        self.part.add_up_gradients()
        watch.note("backward")
        return loss_sum, num_targets

    def wait(self) -> None:
        """As `Work.wait`."""

    @property
    def layouts(self) -> list[Layout]:
        return self.plans.layouts

    def loads(self) -> AttentionLoads:
        return AttentionLoads.of_ticks(self.plans)

    def arenas(self, rank: int) -> dict[str, int]:
        """The largest arena of the plans on a rank, in forward and in backward."""
        found = {"forward": 0, "backward": 0}
        for tick in self.plans.stats.ticks:
            for step in tick.steps:
                found[tick.phase] = max(found[tick.phase], step.arena_bytes[tick.phase][rank].total)
        return found


def _is_sharded_over_data(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and "dp" in (parameter.device_mesh.mesh_dim_names or ())


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
