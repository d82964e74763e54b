"""Megatron-core on distca: core attention for the slot of a layer spec, micro-batches with plans, and a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from distca.arguments import check_type
from distca.connect.init import init as init_context
from distca.context import Context
from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.integrations import megatron_names as names
from distca.integrations.megatron_schedule import DataWithTicks, tick_schedule
from distca.ops import core_attention
from distca.pipeline import PipelinePlansAhead, Ticks
from distca.planner.exchange import Exchange

__all__ = ["DistcaCoreAttention", "DistcaPackedSeqParams", "PlannedBatches", "init", "tick_schedule", "use_distca"]

#: Fields of TransformerConfig and what they must be, for attention and for the schedule.
_ATTENTION = {
    "attention_dropout": 0,
    "context_parallel_size": 1,
    "multi_latent_attention": False,
    "softmax_type": "vanilla",
    "window_size": None,
    "apply_query_key_layer_scaling": False,
    "qk_clip": False,
    "log_max_attention_logit": False,
    "experimental_attention_variant": None,
    "fp8_dot_product_attention": False,
    "fp8_multi_head_attention": False,
    "cuda_graph_impl": "none",
}
_SCHEDULE = {
    "pipeline_model_parallel_layout": None,
    "heterogeneous_block_specs": False,
    "mtp_num_layers": None,
    "num_microbatches_with_partial_activation_checkpoints": None,
    "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False,
    "defer_embedding_wgrad_compute": False,
    "fine_grained_activation_offloading": False,
}


def _check_config(config: Any, allowed: dict[str, Any]) -> None:
    """Raises InvalidArgumentError for the first field of the configuration that is not as it must be."""
    for name, value in allowed.items():
        found = getattr(config, name, value)
        if found != value and (found or value):
            raise InvalidArgumentError(f"Megatron's {name} = {found!r} does not go with distca; {value!r} is allowed")


@dataclass
class DistcaPackedSeqParams(names.PackedSeqParams):  # type: ignore[misc]
    """Megatron's packed sequence parameters, with the plan of their rows.

    Attributes:
        plan: a `distca.Plan`, or what finds it while ticks are under way (`TickPlan`).
        context: the context that runs it, or its name.
    """

    plan: Any = None
    context: Context | str = "default"


class DistcaCoreAttention(names.MegatronModule):  # type: ignore[misc]
    """Core attention in the slot ``self_attention.submodules.core_attention`` of a layer spec. `use_distca` puts it in.

    Megatron calls it with q ``[T, H, D]``, k and v ``[T, Hkv, D]`` of this rank's rows and heads. Its
    ``packed_seq_params`` are `DistcaPackedSeqParams`.

    Raises:
        InvalidArgumentError: the configuration asks for what distca's attention does not do.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any = names.AttnMaskType.causal,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(config=config)
        _check_config(config, _ATTENTION)
        if attention_type != "self" or attention_dropout or options:
            raise InvalidArgumentError(
                f"DistcaCoreAttention: attention_type = {attention_type!r}, attention_dropout = {attention_dropout!r}, "
                f"other options {sorted(options)}; self attention without dropout and other options is allowed"
            )
        self.layer_number, self.softmax_scale = layer_number, softmax_scale
        self._check_mask(attn_mask_type)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attention of this rank's rows, ``[T, H, D]``."""
        if not isinstance(packed_seq_params, DistcaPackedSeqParams):
            raise InvalidArgumentError(
                f"DistcaCoreAttention: packed_seq_params is a {type(packed_seq_params).__name__}. What to change: pass "
                "data_iterator.packed_seq_params() of PlannedBatches, or DistcaPackedSeqParams(..., plan=plan)"
            )
        if attention_mask is not None or attention_bias is not None:
            raise InvalidArgumentError(
                "DistcaCoreAttention: attention_mask or attention_bias is given; the plan says what rows see. What to "
                "change: pass None (Megatron-LM: --no-create-attention-mask-in-dataloader)"
            )
        self._check_mask(attn_mask_type)
        plan, context = packed_seq_params.plan, packed_seq_params.context
        scale, layer = self.softmax_scale, self.layer_number
        return core_attention(query, key, value, plan, scale=scale, context=context, layer=layer)[0]

    def _check_mask(self, kind: Any) -> None:
        allowed = (None, names.AttnMaskType.causal, names.AttnMaskType.padding_causal)
        if kind not in allowed:
            raise InvalidArgumentError(f"DistcaCoreAttention: attn_mask_type = {kind}; causal is allowed")


def use_distca(spec: Any) -> Any:
    """Puts `DistcaCoreAttention` into every self attention of a spec of a layer or of a block of layers.

    The spec may be Megatron's local one or that of Transformer Engine. It is changed in place, and returned.

    Raises:
        InvalidArgumentError: there is no self attention with such a slot, or a layer has cross attention.
    """
    layers = getattr(spec, "layer_specs", None) or [spec]
    for layer in layers:
        submodules = getattr(layer, "submodules", None)
        attention: Any = getattr(getattr(submodules, "self_attention", None), "submodules", None)
        if getattr(getattr(submodules, "cross_attention", None), "submodules", None) is not None:
            raise InvalidArgumentError("use_distca: a layer has cross attention, which distca does not do")
        if not hasattr(attention, "core_attention"):
            raise InvalidArgumentError("use_distca: a layer has no self_attention.submodules.core_attention")
        attention.core_attention = DistcaCoreAttention
    return spec


def init(config: Any, *, max_tokens: int, **options: Any) -> Context:
    """`distca.init` with the groups of Megatron's `parallel_state` and the heads of its configuration.

    All processes make the call, after ``initialize_model_parallel``.

    Args:
        config: the model's TransformerConfig.
        max_tokens, options: as in `distca.init`.
    """
    heads = Heads(
        q=config.num_attention_heads, kv=config.num_query_groups, dim=config.kv_channels, dtype=config.params_dtype
    )
    groups = {"tensor_parallel": names.tensor_group(), "pipeline_parallel": names.pipeline_group()}
    return init_context(max_tokens=max_tokens, heads=heads, **groups, **options)


def document_lengths(batch: Any) -> list[int]:
    """The lengths of the documents of a batch with ``cu_seqlens``, as Megatron-LM's packed data sets have them."""
    return [length for length in batch["cu_seqlens"].flatten().diff().tolist() if length > 0]


class PlannedBatches(DataWithTicks):
    """A data iterator for `tick_schedule`: looks ahead at the micro-batches of an iteration, and makes their plans.

    It takes the place of Megatron's data iterator, also in the place of a list of them. All processes make it, those
    without data too, and use it in step. ``next`` gives ``forward_step_func`` the micro-batch of the current tick.
    The plans of the next iteration are made in a thread while the current one is computed.

    Args:
        batches: Megatron's data iterator, a list of them for virtual stages (all yield the same), or None. The first
            process of each tensor group of the first stage has one.
        config: the model's TransformerConfig.
        context: of `init`.
        num_microbatches: micro-batches of an iteration.
        lengths: the lengths of the documents in a batch, in the order of its rows. Rows of padding are a document.
        forward_only: whether it is for evaluation: makes plans without backward.
        options: the other arguments of `PipelinePlans`.

    Raises:
        InvalidArgumentError: the configuration asks for what cannot go together with ticks.
    """

    def __init__(
        self,
        batches: Any,
        config: Any,
        *,
        context: Context,
        num_microbatches: int,
        lengths: Callable[[Any], Sequence[int]] = document_lengths,
        forward_only: bool = False,
        **options: Any,
    ) -> None:
        check_type("PlannedBatches", "context", context, Context, "distca.integrations.megatron.init(config, ...)")
        _check_config(config, _ATTENTION | _SCHEDULE)
        batches = next((each for each in batches if each is not None), None) if isinstance(batches, list) else batches
        layers, chunks = _layers_of_stages(config, len(context.stages))
        self.context, self.num_microbatches, self.forward_only = context, num_microbatches, forward_only
        self._recompute = None if forward_only else _recomputed(config, max(layers))
        of_context, of_tensor = _private_groups(context)
        tensor_rank = dist.get_rank(of_tensor)
        has_data = [batches is not None]
        dist.broadcast_object_list(has_data, group=of_tensor, group_src=0)
        self._ahead = PipelinePlansAhead(
            _told(batches, lengths, num_microbatches, of_tensor, tensor_rank) if has_data[0] else None,
            heads=context.heads,
            stages=context.stages,
            lengths=lambda pair: pair[1],
            microbatches=num_microbatches,
            group=Exchange.over(of_context),
            layers=layers,
            chunks=chunks,
            backward=not forward_only,
            context=context,
            **options,
        )
        self._iterations = iter(self._ahead)
        self._batches: list[Any] | None = None
        self.ticks: Ticks | None = None

    def begin(self) -> Ticks:
        """The ticks of the next iteration. `tick_schedule` calls it. Raises StopIteration at the end of the data."""
        loaded, plans = next(self._iterations)
        self._batches = None if loaded is None else [batch for batch, _ in loaded]
        self.ticks = Ticks(plans, context=self.context, recompute=self._recompute)
        return self.ticks

    def __next__(self) -> Any:
        """The micro-batch of the current tick; None on a process without data."""
        microbatch = self._microbatch()
        return None if self._batches is None else self._batches[microbatch]

    def packed_seq_params(self) -> DistcaPackedSeqParams:
        """What ``forward_step_func`` passes to the model as packed_seq_params, on every process."""
        microbatch = self._microbatch()
        assert self.ticks is not None
        plans = self.ticks.plans
        sizes = [end - begin for _, begin, end in plans.layouts[microbatch].segments(plans.index)]
        ends = torch.tensor([0, *sizes]).cumsum(0).to(self.context.device, torch.int32)
        longest = max(sizes, default=0)
        return DistcaPackedSeqParams(
            "thd", ends, ends, None, None, longest, longest, plan=self.ticks.plan, context=self.context
        )

    def close(self) -> None:
        """Stops the thread. It is collective."""
        self._ahead.close()

    def _microbatch(self) -> int:
        """The number of the micro-batch of the current tick."""
        if self.ticks is None or self.ticks.current.work is None:
            raise InvalidArgumentError("PlannedBatches: no tick with work is under way; pass it to tick_schedule")
        return self.ticks.current.work.microbatch


def _told(
    batches: Any, lengths: Callable[[Any], Sequence[int]], count: int, group: dist.ProcessGroup, rank: int
) -> Iterator[tuple[Any, list[int]]]:
    """Batches with the lengths that the first process of the tensor group tells the others, an iteration at a time."""
    while True:
        told: list[Any] = [None]
        try:
            mine = [] if batches is None else list(islice(batches, count))
            told = [[list(lengths(batch)) for batch in mine]] if rank == 0 else told
        finally:  # the others hear of an error as of the end
            dist.broadcast_object_list(told, group=group, group_src=0)
        of_first = told[0] or []
        if len(of_first) < count:
            return
        yield from zip(mine or [None] * count, of_first, strict=True)


def _private_groups(context: Context) -> list[dist.ProcessGroup]:
    """Gloo groups of the context's processes and of this one's tensor group. All processes make those of all."""
    mine = [context.global_ranks, dist.get_process_group_ranks(names.tensor_group())]
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    groups = {
        ranks: dist.new_group(list(ranks), backend="gloo")
        for ranks in sorted({tuple(r) for one in of_all for r in one})
    }
    return [groups[tuple(ranks)] for ranks in mine]


def _layers_of_stages(config: Any, stages: int) -> tuple[list[int], int]:
    """The layers of each stage's chunks, and the number of chunks."""
    chunks = config.virtual_pipeline_model_parallel_size or 1
    virtual = [None] if chunks == 1 else range(chunks)
    layers = [[names.get_num_layers_to_build(config, chunk, stage) for chunk in virtual] for stage in range(stages)]
    if any(len(set(of_stage)) > 1 for of_stage in layers):
        raise InvalidArgumentError(
            f"PlannedBatches: Megatron gives the chunks of the stages {layers} layers; as many in all chunks of a "
            "stage are allowed (account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split = False)"
        )
    return [of_stage[0] for of_stage in layers], chunks


def _recomputed(config: Any, depth: int) -> str | list[int] | None:
    """What activation checkpointing runs again, as `Ticks` takes it."""
    if config.recompute_granularity == "selective":
        return "layer" if "core_attn" in config.recompute_modules else None
    if config.recompute_granularity is None:
        return None
    if config.recompute_method != "uniform":
        raise InvalidArgumentError(
            f"Megatron's recompute_method = {config.recompute_method!r} does not go with distca; 'uniform' is allowed"
        )
    size = config.recompute_num_layers
    return [min(size, depth - begin) for begin in range(0, depth, size)]
