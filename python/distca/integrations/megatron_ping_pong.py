"""Ping-pong in Megatron-core: the layers of a chunk run on two halves of a micro-batch in turns."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from distca.errors import InvalidArgumentError, refusals_told
from distca.integrations import megatron_names as names
from distca.integrations.megatron_config import check_fields
from distca.pingpong.ping_pong import greenlet_module, prepare, run_halves
from distca.pipeline import PipelinePlans, Ticks
from distca.pipeline.tick_plan import TickPlan
from distca.planner.halves import Half, halves
from distca.planner.layout import Layout

#: What these fields of TransformerConfig must be in ping-pong. Random numbers would be other ones, a router of experts
#: would see each half apart, and buffers have room for a whole micro-batch.
ALLOWED = {
    "hidden_dropout": 0,
    "num_moe_experts": None,
    "distribute_saved_activations": False,
    "tp_comm_overlap": False,
}


def halves_for(config: Any, windows: list[int | None]) -> Callable[[Layout], tuple[Half, Half]]:
    """What makes the halves of a micro-batch, with rows that sequence parallelism can share out.

    Args:
        config: the model's TransformerConfig.
        windows: the windows of the model's layers.

    Raises:
        InvalidArgumentError: the configuration asks for what cannot go together with ping-pong.
        ImportError: the package greenlet is missing.
    """
    greenlet_module()
    check_fields(config, ALLOWED, "ping-pong")
    modules = config.recompute_modules or []
    if config.recompute_granularity == "selective" and "layernorm" in modules:
        raise InvalidArgumentError(
            f"Megatron's recompute_modules = {modules!r} do not go together with ping-pong: a layer keeps its norm's "
            "output for one half at a time. What to change: leave out 'layernorm'"
        )
    return functools.partial(
        halves,
        window=windows[0] if len(set(windows)) == 1 else None,
        idle_rows=1,
        multiple_of=config.tensor_model_parallel_size if config.sequence_parallel else 1,
    )


@contextlib.contextmanager
def in_halves(chunks: list[Any], ticks: Ticks) -> Iterator[None]:
    """In `with`, the layers of these chunks run in halves if the plans have them.

    Raises:
        InvalidArgumentError: a chunk has no TransformerBlock, or something in one rules ping-pong out.
    """
    blocks: list[Any] = []
    if ticks.plans.halves is not None:
        with refusals_told(ticks.context):
            for chunk in chunks:
                blocks += _blocks_of(chunk)
    own = [vars(block).get("forward") for block in blocks]  # what somebody has put on the block itself
    try:
        for block in blocks:
            block.forward = functools.partial(_forward, block, block.forward, ticks)
        yield
    finally:
        for block, before in zip(blocks, own, strict=True):
            vars(block).pop("forward", None)
            if before is not None:
                block.forward = before


def _blocks_of(chunk: Any) -> list[Any]:
    blocks = [module for module in chunk.modules() if isinstance(module, names.TransformerBlock)]
    if not blocks:
        raise InvalidArgumentError(
            f"ping-pong: there is no TransformerBlock of Megatron in a {type(chunk).__name__}. What to change: "
            "PlannedBatches(..., ping_pong=False)"
        )
    for block in blocks:
        _refuse_compiled_layers(block)
        prepare(block)
    return blocks


def _refuse_compiled_layers(block: Any) -> None:
    for name, module in block.named_modules():
        is_compiled = isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
        if is_compiled or hasattr(module.forward, "_torchdynamo_orig_callable"):
            raise InvalidArgumentError(
                f"ping-pong: {name} ({type(module).__name__}) is compiled, and compiled code cannot give the turn to "
                "the other half inside of a tick; leave out torch.compile, or ping_pong=True"
            )


def _forward(
    block: Any,
    forward: Callable[..., torch.Tensor],
    ticks: Ticks,
    hidden_states: Any,
    attention_mask: Any,
    packed_seq_params: Any = None,
    **options: Any,
) -> torch.Tensor:
    """Forward of a TransformerBlock in halves. Stages hand over whole micro-batches."""
    if getattr(packed_seq_params, "plan", None) is not ticks.plan:  # attention says what is wrong
        return forward(hidden_states, attention_mask, packed_seq_params=packed_seq_params, **options)
    plans, work = ticks.plans, ticks.current.work
    assert plans.halves is not None and work is not None
    is_shared = block.config.sequence_parallel

    def run(hidden: torch.Tensor, layout: Layout, plan: TickPlan, rotary: Any) -> torch.Tensor:
        block.set_input_tensor(hidden)  # what it takes in all stages but the first
        packed = packed_seq_params.of_rows(layout, plans.index, plan)
        given = options | {"rotary_pos_emb": rotary}
        return plan.pad(forward(hidden, attention_mask, packed_seq_params=packed, **given))

    whole = hidden_states if block.pre_process else block.input_tensor
    parts = plans.split(work.microbatch, names.gather_rows(whole) if is_shared else whole)
    rotaries = rotaries_of_halves(options.get("rotary_pos_emb"), plans, work.microbatch)
    first, second = (
        {
            "hidden": _own_rows(part) if is_shared else part,
            "layout": half.layout,
            "plan": ticks.plan,
            "rotary": of_half,
        }
        for part, half, of_half in zip(parts, plans.halves[work.microbatch], rotaries, strict=True)
    )
    before = block.input_tensor
    try:
        with names.taking_turns(_checkpoint):
            outputs = run_halves(run, first, second)
    finally:
        # A half that stayed would keep its graph and, by the hooks of the weights in it, the model for good.
        block.set_input_tensor(before)
    if not is_shared:
        return plans.join(work.microbatch, outputs)
    return _own_rows(plans.join(work.microbatch, [names.gather_rows(output) for output in outputs]))


def rotaries_of_halves(rotary: Any, plans: PipelinePlans, microbatch: int) -> Sequence[Any]:
    """What RoPE of each half gets for a micro-batch's ``rotary_pos_emb``.

    A table of positions is that of both halves. What has an entry for each row (`rotate_by_row`, mRoPE) is split. A
    table is as long as the micro-batch only if one document fills it. Its rows are then those of its positions.
    """
    if rotary is None or len(rotary) != plans.layouts[microbatch].num_rows(plans.index):
        return [rotary] * 2
    return plans.split(microbatch, rotary)


def _own_rows(whole: torch.Tensor) -> torch.Tensor:
    """The rows of this tensor rank in sequence parallelism."""
    group = names.tensor_group()
    return whole.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


def _checkpoint(function: Callable[..., Any], _distribute: bool, *given: Any) -> Any:
    """Activation checkpointing by saved tensors. In Megatron's own, backward of a layer gives no turns away."""
    return checkpoint(function, *given, use_reentrant=False)
