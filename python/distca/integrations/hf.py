"""Hugging Face transformers: importing this module registers `attn_implementation="distca"`.

    import distca.integrations.hf
    model = LlamaForCausalLM(LlamaConfig(..., attn_implementation="distca"))
    model(input_ids=ids, position_ids=plan.layout.position_ids(plan.rank)[None], plan=plan)

The model itself stays unmodified. Its forward takes these keywords:

- `plan`: the `distca.Plan` of this step, or the `distca.Plans` if layers differ in their sliding window. Tensors are
  packed: batch size 1, and one row for each row of the layout on this rank. The plan separates documents. Therefore no
  [T, T] mask is built, and no `attention_mask` is needed; a mask of ones is accepted. `with distca.using(plan)` does
  the same where the caller cannot pass the keyword.
- `position_ids` [1, T]: those of the plan's layout, `plan.layout.position_ids(plan.rank)`. Without them transformers
  counts the rows of the tensor. That is refused unless it gives every document on every rank its positions.
- `distca_context`: the context, or its name (default "default").

A model that cannot use the plan, or can use it only in part, is refused by name (hf_limits.py, hf_forward.py).

Without a plan attention is local: transformers' own SDPA function computes it, for evaluation and `generate()`. The
other ranks take no part in it. This is also how one rank evaluates alone; with a plan all ranks must take part. In
training, a missing plan is an error if the context has more than one rank. transformers cannot run a tensor without
rows: give a rank without tokens one row of padding, the segment (-1, 0, 1).

`heads_of`, `windows_of` and `mask_of` read from a model what `distca.plan` needs. `PlanInputs` makes a
`transformers.Trainer` plan by itself, and `plan_inputs` plans a batch in any other loop. `unpad` lets a model take
padded batches and plan them itself (hf_unpad.py). `ping_pong` and `plan_halves` are described in hf_ping_pong.py.
"""

from __future__ import annotations

import sys
from typing import Any

import distca.integrations.hf_version  # noqa: F401

# isort: split
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from distca.context import Context
from distca.current import current
from distca.errors import refusals_told
from distca.inputs import dtype_under_autocast
from distca.integrations.hf_batches import PlanInputs as PlanInputs
from distca.integrations.hf_batches import plan_inputs as plan_inputs
from distca.integrations.hf_bidirectional import makes_blocks
from distca.integrations.hf_forward import check_plan_not_needed, count_call, refuse_other_plan
from distca.integrations.hf_limits import check_model as check_model
from distca.integrations.hf_limits import drops_keywords
from distca.integrations.hf_masks import DeferredMask, distca_mask
from distca.integrations.hf_models import NAME as NAME
from distca.integrations.hf_models import check_rows, refuse
from distca.integrations.hf_models import heads_of as heads_of
from distca.integrations.hf_models import mask_of as mask_of
from distca.integrations.hf_models import windows_of as windows_of
from distca.integrations.hf_ping_pong import ping_pong as ping_pong
from distca.integrations.hf_ping_pong import plan_halves as plan_halves
from distca.integrations.hf_recurrent import refuse_recomputation
from distca.integrations.hf_unpad import local as local
from distca.integrations.hf_unpad import unpad as unpad
from distca.ops import core_attention
from distca.planner.layout import Chunk, Window
from distca.planner.plan import Plan, Plans
from distca.planner.plan_source import PlanSource
from distca.registry import find_context

_ENCODER_BESIDE = (
    "Beside an encoder of images or sound, say which part is for distca: "
    'attn_implementation={"text_config": "distca", "vision_config": "sdpa"}'
)


def distca_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: DeferredMask | torch.Tensor | None,
    *,
    plan: Plan | Plans | PlanSource | None = None,
    distca_context: Context | str = "default",
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The entry for AttentionInterface: attention by the plan, or local attention without one.

    Args:
        module: the attention layer.
        query: [1, H, T, D], this rank's rows.
        key: [1, Hkv, T, D].
        value: [1, Hkv, T, Dv].
        attention_mask: the result of `distca_mask`.
        plan: the plan or plans, or the ``plan`` of `distca.pipeline.Ticks`; by default the current one.
        distca_context: the context or its name.
        dropout: attention dropout, which must be 0 with a plan.
        scaling: factor on the logits; ``D ** -0.5`` by default.
        kwargs: what the layer passes besides: sliding_window, softcap, s_aux (sinks), is_causal, position_bias.

    Returns:
        out [1, T, H, Dv], and None in place of attention weights.

    Raises:
        InvalidArgumentError: the layer asks for what the plan does not express. The message says what to do instead.
    """
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if plan is None:
        plan, distca_context = _current_plan(module, distca_context)
    if plan is None:
        check_plan_not_needed(module.training, distca_context)
        mask = attention_mask.build() if isinstance(attention_mask, DeferredMask) else attention_mask
        mask = None if mask is None else mask.to(query.device)
        if softcap is not None or sinks is not None:  # SDPA would drop them silently
            return _eager(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    query = _by_position(module, query, plan)
    if torch.compiler.is_compiling():
        plan = _checked_plan(module, query, key, plan, attention_mask, dropout, kwargs)
    else:
        count_call()
        with refusals_told(find_context(distca_context)):
            plan = _checked_plan(module, query, key, plan, attention_mask, dropout, kwargs)
    q, k, v = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    out, _ = core_attention(
        q,
        k,
        v,
        plan,
        context=distca_context,
        scale=scaling,
        softcap=softcap or 0.0,
        sinks=sinks,
        layer=_name_of_layer(module),
    )
    return out.unsqueeze(0), None


def _current_plan(
    module: torch.nn.Module, distca_context: Context | str
) -> tuple[Plan | Plans | PlanSource | None, Context | str]:
    """The current plan and its context, for layers that no keyword reaches."""
    if torch.compiler.is_compiling() and not drops_keywords(module):  # the next line would break a compiler's graph
        return None, distca_context
    here = current()
    if here is not None:
        module.__dict__["_distca_had_plan"] = True
        return here.plan, here.context
    refuse_recomputation(module)
    return None, distca_context


def _eager(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The model's own eager attention, with the additive mask that it takes, or none."""
    num_rows, num_keys = query.shape[2], key.shape[2]
    if mask is None and _is_causal(module, options):
        mask = torch.ones(num_rows, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_rows)[
            None, None
        ]
    if mask is not None and mask.dtype == torch.bool:
        hidden, mask = ~mask, torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
        mask = mask.masked_fill(hidden, torch.finfo(query.dtype).min)
    # fully_shard makes a class of its own, from a file of torch.
    files = (vars(sys.modules[kind.__module__]) for kind in type(module).__mro__)
    attend = next(file["eager_attention_forward"] for file in files if "eager_attention_forward" in file)
    return attend(module, query, key, value, mask, **options)[0], None


def _is_causal(module: torch.nn.Module, options: dict[str, Any]) -> bool:
    """Whether a layer is causal: what it says in the call, or else its module, counts."""
    causal = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if causal is None else causal)


def _name_of_layer(module: torch.nn.Module) -> str | None:
    """The layer's name in error messages. None under torch.compile, where reading it would part layers' graphs."""
    if torch.compiler.is_compiling() or (index := getattr(module, "layer_idx", None)) is None:
        return None
    return f"{index} ({type(module).__name__})"


def _plan_of_layer(plan: Plan | Plans | PlanSource, window: Window, mask: str) -> Plan:
    """The plan for a layer. transformers' window W lets row q see key k if q - k < W, and so does a plan's window."""
    found = _plan_of_window(plan, window)
    refuse(
        found.has_documents and found.mask != mask,
        f"the plan's mask is {found.mask}, and this layer asks for the {mask} mask: give distca.plan, or distca.plans, "
        f"mask={mask!r} (hf.mask_of knows it of most models), or PipelinePlans scores with it"
        + (f". {_ENCODER_BESIDE}" if mask == "full" else ""),
    )
    return found


def _plan_of_window(plan: Plan | Plans | PlanSource, window: Window) -> Plan:
    if isinstance(plan, Plans):
        return plan.for_window(window)
    chunk, longest = None, 0
    if isinstance(plan, PlanSource):
        chunk, longest, plan = plan.chunk(), plan.longest_document(), plan.upcoming()
    if not isinstance(plan, Plan):
        refuse_other_plan(plan)
    if not plan.has_documents:
        return plan
    if isinstance(window, Chunk) or chunk is not None:  # chunks that no document is longer than are its documents
        longest = longest or plan.layout.longest_document
        window = None if isinstance(window, Chunk) and window.rows >= longest else window
        chunk = None if chunk is not None and chunk.rows >= longest else chunk
    if isinstance(window, Chunk) or chunk is not None:
        asked = f"attends in chunks of {window.rows} rows" if isinstance(window, Chunk) else f"has a window of {window}"
        refuse(
            window != chunk,
            f"this layer {asked}, the plan is for a window of {chunk or plan.window}: pass plan=distca.plans(layout, "
            "heads, windows=hf.windows_of(config), context=context); in a pipeline give PipelinePlans the windows of "
            "all layers in their order",
        )
        return plan
    refuse(
        not plan.same_window(window, plan.mask),
        f"this layer has a sliding window of {window}, the plan one of {plan.window}: pass "
        f"plan=distca.plan(layout, heads, window={window}, context=context), or distca.plans(layout, heads, "
        "windows=[...], context=context) where layers differ",
    )
    return plan


def _window_of(module: torch.nn.Module, mask: DeferredMask | torch.Tensor | None, kwargs: dict[str, Any]) -> Window:
    """The layer's window. Layers that attend in chunks do not say so; their mask and the type of the layer do."""
    window: int | None = kwargs.get("sliding_window")
    size = mask.local_size if isinstance(mask, DeferredMask) else None
    if isinstance(mask, DeferredMask) and mask.is_full:  # decoders made into encoders say another window in the call
        return size
    if window is not None or size is None:
        return window
    kinds, layer = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    refuse(
        kinds is None or layer is None or kinds[layer] != "chunked_attention",
        f"the model asks for a mask with a window or chunks of {size}, and the layer does not say which",
    )
    return Chunk(size)


def _by_position(module: torch.nn.Module, query: torch.Tensor, plan: Plan | Plans | PlanSource) -> torch.Tensor:
    """The queries [1, H, T, D] of a layer that has scaled them by the number of the row (Llama 4's without RoPE), as if
    scaled by its position. A row whose position is its number keeps its bits.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    layout, rank = plan.rows() if isinstance(plan, PlanSource) else (plan.layout, plan.rank)
    floor_scale: Any = module.floor_scale
    attn_scale: Any = module.attn_scale

    def factor(rows: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.floor((rows.float() + 1.0) / floor_scale)) * attn_scale + 1.0

    positions = layout.position_ids(rank)
    if len(positions) != query.shape[2]:  # said by the check of the call
        return query
    ratio = (factor(positions) / factor(torch.arange(len(positions), device="cpu"))).to(query.device)
    return (query * ratio[:, None]).to(query.dtype)


def _checked_plan(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    plan: Plan | Plans | PlanSource,
    attention_mask: DeferredMask | torch.Tensor | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> Plan | PlanSource:
    """The layer's plan, or what finds it. Raises InvalidArgumentError if it lacks what the layer asks for."""
    asked = attention_mask if isinstance(attention_mask, DeferredMask) else None
    objection = None if asked is None else asked.objection()
    refuse(objection is not None, str(objection))
    is_full = asked is not None and asked.is_full
    found = _plan_of_layer(plan, _window_of(module, attention_mask, kwargs), "full" if is_full else "causal")
    compared = None if torch.compiler.is_compiling() else asked
    refuse(
        not is_full and not _is_causal(module, kwargs) and (compared is None or not compared.has_blocks()),
        f"this layer is not causal, and its model does not ask for the full mask. {_ENCODER_BESIDE}",
    )
    refuse(
        is_full and found.has_branches,
        "documents begin with rows of others, and this layer's rows see those after them: of shared rows each document "
        "by itself would make others. Give each document rows of its own",
    )
    refuse(
        asked is not None and asked.is_part,
        "the model leaves rows out before its last layers (logits_to_keep), and a plan covers all rows: leave out "
        "logits_to_keep, or give the rows whose logits you want as a tensor",
    )
    _check_call(query, key, found, dropout, kwargs)
    refuse(
        attention_mask is not None and asked is None,
        "attention_mask is a ready-made mask: pass none, the plan separates the documents",
    )
    refuse(
        torch.compiler.is_compiling() and found.has_bidirectional and makes_blocks(module),
        "the plan's layout has rows that see those after them; whether the model asks for the same ones a graph cannot "
        "see: call it without torch.compile",
    )
    if compared is not None and not is_full:
        layout, rank = plan.rows() if isinstance(plan, PlanSource) else (found.layout, found.rank)
        differs = compared.difference(layout, rank, found.window, not makes_blocks(module))
        refuse(differs is not None, str(differs))
    return plan if isinstance(plan, PlanSource) else found


def _check_call(query: torch.Tensor, key: torch.Tensor, plan: Plan, dropout: float, kwargs: dict[str, Any]) -> None:
    batch, _, num_rows, _ = query.shape
    check_rows(batch, num_rows, plan.num_rows, plan.rank)
    if not torch.compiler.is_compiling():  # of compiled layers the core tells
        dtype, planned = dtype_under_autocast(query), plan.heads.dtype
        refuse(
            dtype != planned,
            f"the layer's tensors are {dtype}, and the plan was made for heads of {planned}: give "
            f"heads=distca.integrations.hf.heads_of(model.config, {dtype}) to distca.init, from whose context "
            "hf.PlanInputs takes them, and to distca.plan where you call it",
        )
    if key.shape[2] != num_rows:
        refuse(
            True,
            f"{key.shape[2]} keys for {num_rows} rows: a plan covers whole documents, so pass use_cache=False and no "
            "past_key_values",
        )
    refuse(
        dropout > 0,
        f"attention dropout is {dropout:g}, must be 0: set attention_dropout=0.0 in the model's config "
        "(attn_pdrop in GPT-2's, attention_probs_dropout_prob in BERT's)",
    )
    refuse(kwargs.get("position_bias") is not None, "a position bias is not supported yet")


AttentionInterface.register(NAME, distca_attention)
AttentionMaskInterface.register(NAME, distca_mask)
