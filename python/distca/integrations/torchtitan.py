"""torchtitan: an override that has distca compute core attention of every layer.

    apply_overrides(OverrideConfig(imports=["distca.integrations.torchtitan.use_distca"]), config)

It takes the place of torchtitan's varlen attention (``attn_backend="varlen"``). A layer gets a `BatchPlan` as its
``attention_masks``. `plan_batches` makes a model do that by itself, and `distca.integrations.torchtitan_trainer` does
all of this for torchtitan's Trainer. What a plan cannot express is refused by name.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from distca.context import Context
from distca.errors import InvalidArgumentError, refusals_told
from distca.integrations.torchtitan_config import (
    WITH_SINKS,
    SelectiveAC,
    VarlenAttention,
    attention_layers,
    derive,
    is_type_checking,
    override,
    refuse,
    window_of,
)
from distca.integrations.torchtitan_config import heads_of as heads_of
from distca.integrations.torchtitan_config import windows_of as windows_of
from distca.ops import core_attention
from distca.planner.exchange import gathered_lengths
from distca.planner.layout import Layout
from distca.planner.plan import Plan, Plans
from distca.planner.plan_source import PlanSource
from distca.planner.planning import plans
from distca.registry import find_context


@dataclass(frozen=True)
class BatchPlan:
    """What layers get in the place of ``attention_masks``: the plan of the batch, and the context of its steps.

    To pytree it is one leaf. Therefore FSDP and pipelines pass it on as it is.

    Attributes:
        plan: a `distca.Plan`, a `distca.Plans` if layers differ in their window, or the ``plan`` of
            `distca.pipeline.Ticks`.
        context: the context or its name.
    """

    plan: Plan | Plans | PlanSource
    context: Context | str = "default"

    def __deepcopy__(self, memo: dict[int, Any]) -> BatchPlan:
        return self  # there is one context, and ticks go on in one place


class DistcaAttention(VarlenAttention):
    """Core attention of one layer, computed by all ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    layer: str | None = None
    """The name in error messages. `plan_batches` sets it."""

    def __init__(self, config: Config) -> None:
        torch.nn.Module.__init__(self)  # VarlenAttention's chooses a flash attention for the whole process
        self.window = window_of(config)

    def forward(
        self,
        q_BLNH: torch.Tensor,  # torchtitan's tensor parallelism finds the arguments by these names
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: BatchPlan,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Any = None,
    ) -> torch.Tensor:
        """Attention by the batch's plan, in the plan's dtype.

        Args:
            q_BLNH, k_BLNH, v_BLNH: ``[B, L, heads, dim]``, this rank's rows.
            attention_masks: the plan of the batch.
            scale: factor on the logits; ``dim ** -0.5`` by default.
            enable_gqa: ignored, because the numbers of heads say it.
            out_transform: what makes the result of out ``[B, L, heads, v_dim]`` and lse ``[B, L, heads]`` float32, or
                None. In the place of gpt-oss's, core attention takes its sinks.

        Returns:
            ``[B, L, heads, v_dim]`` in q's dtype.

        Raises:
            InvalidArgumentError: the plan cannot express what the layer asks for.
        """
        compiling, context = torch.compiler.is_compiling(), getattr(attention_masks, "context", "default")
        with refusals_told(None if compiling else find_context(context)):
            plan, found = self._plan(attention_masks)
            sinks = _sinks(out_transform)
        q, k, v = (x.flatten(0, 1).to(found.heads.dtype) for x in (q_BLNH, k_BLNH, v_BLNH))
        out, lse = core_attention(
            q,
            k,
            v,
            plan,
            context=context,
            scale=scale,
            sinks=sinks,
            layer=None if compiling else self.layer,  # layers that differ in a name would not share a graph
        )
        out, lse = out.unflatten(0, q_BLNH.shape[:2]).to(q_BLNH.dtype), lse.unflatten(0, q_BLNH.shape[:2])
        return out if out_transform is None or sinks is not None else out_transform(out, lse)

    def _plan(self, masks: Any) -> tuple[Plan | PlanSource, Plan]:
        """What finds the plan of this call, and the plan. Raises if it is not of this layer."""
        if not isinstance(masks, BatchPlan):
            refuse(f"attention_masks is a {type(masks).__name__}, a BatchPlan is expected: call plan_batches(model)")
        if is_type_checking():
            refuse("debug.spmd_typechecking is not supported yet: leave it off")
        plan = masks.plan.for_window(self.window) if isinstance(masks.plan, Plans) else masks.plan
        found = plan.upcoming() if isinstance(plan, PlanSource) else plan
        if not found.has_documents:
            return plan, found
        if isinstance(plan, PlanSource) and (chunk := plan.chunk()) is not None:
            refuse(f"the layer's window is {self.window}, the plan is for chunks of {chunk.rows} rows")
        if not found.same_window(self.window):
            refuse(
                f"the layer's window is {self.window}, the plan's mask {found.mask} and its window {found.window}: "
                "make the plan with distca.plans(layout, heads, windows=windows_of(model.config))"
            )
        return plan, found


def _sinks(out_transform: Any) -> torch.Tensor | None:
    """The sinks that a layer of gpt-oss adds, or None for any other function."""
    if getattr(out_transform, "__func__", None) is not WITH_SINKS:
        return None
    sinks = out_transform.__self__.sinks
    return sinks.to_local(grad_placements=sinks.placements) if hasattr(sinks, "to_local") else sinks


class TickStage(torch.nn.Module):
    """A part of a model as a stage of `distca.integrations.torch_pipelining.ScheduleTicks`.

    Args:
        part: a part that torchtitan's pipeline has cut off, or any of its models. All parts have as many layers.
        context: the context or its name.
    """

    def __init__(self, part: torch.nn.Module, context: Context | str = "default") -> None:
        super().__init__()
        self.part, self.context = part, context

    def forward(self, x: torch.Tensor, positions: torch.Tensor, plan: PlanSource) -> torch.Tensor:
        """What the part makes of tokens ``[B, L]``, or of what the stage before has made."""
        return self.part(x, positions=positions, attention_masks=BatchPlan(plan, self.context))


@override(target=VarlenAttention.Config, exact=True, description="core attention by distca")
def use_distca(config: VarlenAttention.Config) -> DistcaAttention.Config:
    """The override of attention, for ``override.imports``."""
    return derive(config, DistcaAttention.Config)


class SavingAC(SelectiveAC):
    """torchtitan's selective activation checkpointing, which also saves what core attention returned."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        """Returns torchtitan's operators, and core attention."""
        ops = torch.ops.distca
        return super().get_save_ops() | {ops.core_attention.default, ops.core_attention_all.default}


@override(target=SelectiveAC.Config, exact=True, description="saves core attention by distca")
def save_distca(config: SelectiveAC.Config) -> SavingAC.Config:
    """An override, with which selective activation checkpointing does not run core attention again in backward."""
    return derive(config, SavingAC.Config)


def plan_batches(
    model: Any, *, context: Context | str = "default", group: dist.ProcessGroup | None = None, **options: Any
) -> None:
    """Makes a model plan every batch: its ``get_attention_masks``, which trainer and validator call, returns a plan.

    That call is collective over the group, whose ranks exchange the lengths of their documents.

    Args:
        model: a model of torchtitan whose configuration went through `use_distca`.
        context: the open context or its name.
        group: the ranks of the context, in its order; by default all ranks.
        options: further arguments of `distca.plan`, such as tolerance.

    Raises:
        InvalidArgumentError: now, if a plan cannot compute a layer; later and on all ranks, if a rank's batch is not
            packed as torchtitan's loaders pack.
    """
    windows, here = windows_of(model.config), find_context(context)
    for name, attention in attention_layers(model.config):
        if not isinstance(attention.inner_attention, DistcaAttention.Config):
            refuse(f"{name} has torchtitan's attention: add {__name__}.{use_distca.__name__} to override.imports")
    if here is None:
        refuse(f"there is no context {context!r}: call distca.init first")
    if here.num_ranks > 1 and (ranks := dist.get_process_group_ranks(group)) != here.global_ranks:
        refuse(f"the context has global ranks {here.global_ranks}, the group {ranks}: give group= the context's ranks")
    for name, module in model.named_modules():
        if isinstance(module, DistcaAttention):
            module.layer = name

    def get_attention_masks(positions: torch.Tensor) -> BatchPlan:
        of_ranks = gathered_lengths(lambda: _lengths(positions), lambda: here.lengths_exchange(group))
        made = plans(Layout.from_documents(of_ranks), here.layer_heads, windows=windows, **{"context": here} | options)
        return BatchPlan(made, here)

    model.get_attention_masks = get_attention_masks


def _lengths(positions: torch.Tensor) -> list[int]:
    """The lengths of the documents of ``[B, L]`` positions, row by row.

    A document starts at position 0. torchtitan's loaders cut documents at the end of a row and count on from 0.
    """
    starts = positions == 0
    if positions.dim() != 2 or not bool(starts[:, 0].all()):
        raise InvalidArgumentError(
            f"torchtitan: positions {list(positions.shape)} must be [B, L] and begin with 0 in every row, because a "
            "document does not go on in the next row"
        )
    borders = [*starts.flatten().nonzero().flatten().tolist(), positions.numel()]
    return [end - begin for begin, end in itertools.pairwise(borders)]
