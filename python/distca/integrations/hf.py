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

A model that cannot use the plan, or can use it only in part, is refused by name (hf_models.py, hf_forward.py).

Without a plan attention is local: transformers' own SDPA function computes it, for evaluation and `generate()`. The
other ranks take no part in it. This is also how one rank evaluates alone; with a plan all ranks must take part. In
training, a missing plan is an error if the context has more than one rank. transformers cannot run a tensor without
rows: give a rank without tokens one row of padding, the segment (-1, 0, 1).

`heads_of` and `windows_of` read from a model's configuration what `distca.plan` needs. `PlanInputs` makes a
`transformers.Trainer` plan by itself, and `plan_inputs` plans a batch in any other loop. `ping_pong` and `plan_halves`
are described in hf_ping_pong.py.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

import distca.integrations.hf_version  # noqa: F401

# isort: split
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from distca.context import Context
from distca.current import current
from distca.errors import InvalidArgumentError, refusals_told
from distca.integrations.hf_forward import check_plan_not_needed, count_call, refuse_other_plan
from distca.integrations.hf_models import NAME as NAME
from distca.integrations.hf_models import check_model as check_model
from distca.integrations.hf_models import drops_keywords, refuse
from distca.integrations.hf_models import heads_of as heads_of
from distca.integrations.hf_models import windows_of as windows_of
from distca.integrations.hf_ping_pong import InHalves
from distca.integrations.hf_ping_pong import ping_pong as ping_pong
from distca.integrations.hf_ping_pong import plan_halves as plan_halves
from distca.integrations.hf_recurrent import refuse_recomputation
from distca.ops import core_attention
from distca.planner.exchange import gathered_lengths
from distca.planner.layout import Chunk, Layout, Window
from distca.planner.plan import Plan, Plans
from distca.planner.plan_source import PlanSource
from distca.planner.planning import plans
from distca.registry import find_context, get_context


class _Unions(TorchFunctionMode):
    """Notices whether a union of masks is computed inside. A graph cannot look into functions, but it can call them."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or func.__name__ in ("__or__", "bitwise_or", "logical_or")
        return func(*args, **(kwargs or {}))


class DeferredMask:
    """The mask that transformers asked for. It is built only if a layer needs it.

    transformers makes the mask before any layer runs, when the plan is not known. With a plan, layers only ask whether
    the request goes beyond what the plan expresses. Without a plan, the first layer builds the mask and the others
    share it.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._mask: torch.Tensor | None = None
        self._built = False
        self._objection: str | None = None
        self._examined = False

    def build(self) -> torch.Tensor | None:
        """The boolean mask [1, 1, q, kv] for SDPA, or None if SDPA's own causal flag says the same."""
        if not self._built:
            self._mask, self._built = sdpa_mask(**self._request), True
        return self._mask

    def objection(self) -> str | None:
        """Why a plan cannot take the place of this mask; None if it can."""
        if torch.compiler.is_compiling():  # this costs nothing at run time, while the two flags would be guarded
            return self._examine()
        if not self._examined:
            self._objection, self._examined = self._examine(), True
        return self._objection

    def _examine(self) -> str | None:
        padding: torch.Tensor | None = self._request.get("attention_mask")
        if padding is not None and (torch.compiler.is_compiling() or not bool(padding.all())):
            return (
                "attention_mask marks padding, which would be dropped silently: pass no attention_mask; "
                "padding rows belong in the plan's layout, as segments of document -1"
            )
        if self._request.get("use_vmap"):
            return "the model lays a mask of its own (or_mask_function or and_mask_function) over the causal one"
        if torch.compiler.is_compiling():
            # A graph cannot ask for values. Without vmap, transformers adds nothing but blocks to the causal mask.
            if self._is_union():
                return (
                    "the model may ask for a mask that is not causal (blocks of a prefix or an image), which a graph "
                    "cannot see: call it without torch.compile"
                )
        elif self._sees_future():
            return "the model asks for a mask that is not causal"
        return None

    def _sees_future(self) -> bool:
        """Whether any row may see the row after it, as in bidirectional models and blocks of image tokens."""
        rows = torch.arange(max(self._request["q_length"] - 1, 0), device=self._request.get("device"))
        batch = torch.zeros_like(rows)
        mask_function: Callable[..., torch.Tensor] = self._request["mask_function"]
        return bool(mask_function(batch, batch, rows, rows + 1).any())

    def _is_union(self) -> bool:
        """Whether something is added to the causal mask, which windows and documents only take from."""
        row, unions = torch.zeros(1, dtype=torch.long, device=self._request.get("device")), _Unions()
        with unions:
            self._request["mask_function"](row, row, row, row)
        return unions.found

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        """Refuses a model that computes with the mask itself: its attention cannot be replaced."""
        _refuse_mask("adds it to its attention scores")

    def __getitem__(self, _: Any) -> Any:
        _refuse_mask("takes parts of it")

    def to(self, *_: Any, **__: Any) -> DeferredMask:
        """The mask itself: hooks of accelerate move all arguments of a layer. The layer that builds it moves it."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and its libraries ask any object for these
            raise AttributeError(name)
        _refuse_mask(f"asks for .{name}")

    @property
    def local_size(self) -> int | None:
        """The window or chunk size of a layer that does not see its whole document; otherwise None."""
        return self._request.get("local_size")


def _refuse_mask(what: str) -> NoReturn:
    raise InvalidArgumentError(
        f'attn_implementation="{NAME}": the model works on the attention mask itself ({what}), and so bypasses '
        "transformers' AttentionInterface or goes beyond it: its attention cannot be replaced; choose another "
        "attn_implementation"
    )


def distca_mask(**request: Any) -> DeferredMask | torch.Tensor | None:
    """The entry for AttentionMaskInterface: defers a request for a mask if a plan may still be used."""
    whole = request["q_length"] == request["kv_length"] and isinstance(request.get("q_offset", 0), int)
    return DeferredMask(request) if whole else sdpa_mask(**request)


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
    """The model's own eager attention, with the additive mask that it takes."""
    num_rows, num_keys = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(num_rows, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_rows)[
            None, None
        ]
    added = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    added = added.masked_fill(~mask, torch.finfo(query.dtype).min)
    # fully_shard makes a class of its own, from a file of torch.
    files = (vars(sys.modules[kind.__module__]) for kind in type(module).__mro__)
    attend = next(file["eager_attention_forward"] for file in files if "eager_attention_forward" in file)
    return attend(module, query, key, value, added, **options)[0], None


def _name_of_layer(module: torch.nn.Module) -> str | None:
    """The layer's name in error messages. None under torch.compile, where reading it would part layers' graphs."""
    if torch.compiler.is_compiling() or (index := getattr(module, "layer_idx", None)) is None:
        return None
    return f"{index} ({type(module).__name__})"


def _plan_of_layer(plan: Plan | Plans | PlanSource, window: Window) -> Plan:
    """The plan for a layer. transformers' window W lets row q see key k if q - k < W, and so does a plan's window."""
    if isinstance(plan, Plans):
        return plan.for_window(window)
    chunk, longest = None, 0
    if isinstance(plan, PlanSource):
        chunk, longest, plan = plan.chunk(), plan.longest_document(), plan.upcoming()
    if not isinstance(plan, Plan):
        refuse_other_plan(plan)
    if not plan.has_documents:
        return plan
    refuse(plan.mask != "causal", f"the plan's mask is {plan.mask}; a causal one is needed")
    longest = longest or max(plan.layout.document_lengths, default=0)
    # Chunks that no document is longer than are its documents.
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
        not plan.same_window(window),
        f"this layer has a sliding window of {window}, the plan one of {plan.window}: pass "
        f"plan=distca.plan(layout, heads, window={window}, context=context), or distca.plans(layout, heads, "
        "windows=[...], context=context) where layers differ",
    )
    return plan


def _window_of(module: torch.nn.Module, mask: DeferredMask | torch.Tensor | None, kwargs: dict[str, Any]) -> Window:
    """The layer's window. Layers that attend in chunks do not say so; their mask and the type of the layer do."""
    window: int | None = kwargs.get("sliding_window")
    size = mask.local_size if isinstance(mask, DeferredMask) else None
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
    ratio = (factor(positions) / factor(torch.arange(len(positions)))).to(query.device)
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
    found = _plan_of_layer(plan, _window_of(module, attention_mask, kwargs))
    _check_call(module, query, key, found, dropout, kwargs)
    _check_mask(attention_mask)
    return plan if isinstance(plan, PlanSource) else found


def _check_call(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, plan: Plan, dropout: float, kwargs: dict[str, Any]
) -> None:
    batch, _, num_rows, _ = query.shape
    refuse(
        batch != 1,
        f"batch size is {batch}, must be 1: pack the documents of this rank one after the other into one row, "
        "input_ids [1, T], and give their lengths to the plan",
    )
    expected = plan.num_rows
    refuse(
        num_rows != expected,
        f"the input has {num_rows} rows but the plan was made for {expected} rows on rank {plan.rank}: "
        "make a plan of this batch's layout",
    )
    refuse(
        key.shape[2] != num_rows,
        f"{key.shape[2]} keys for {num_rows} rows: a plan covers whole documents, so pass use_cache=False and no "
        "past_key_values",
    )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    refuse(not causal, "this layer is not causal; only causal attention is supported yet")
    refuse(
        dropout > 0,
        f"attention dropout is {dropout:g}, must be 0: set attention_dropout=0.0 in the model's config "
        "(attn_pdrop in GPT-2's)",
    )
    refuse(kwargs.get("position_bias") is not None, "a position bias is not supported yet")


def _check_mask(mask: DeferredMask | torch.Tensor | None) -> None:
    if isinstance(mask, DeferredMask):
        objection = mask.objection()
        refuse(objection is not None, str(objection))
    else:
        refuse(
            mask is not None,
            "attention_mask is a ready-made mask: pass none, the plan separates the documents",
        )


class PlanInputs:
    """A base class that makes a Trainer plan every batch, in training and in evaluation. Put it first::

        class Trainer(distca.integrations.hf.PlanInputs, transformers.Trainer):
            pass

    `plan_inputs` says what a batch must be, and what is refused.
    """

    distca_context: ClassVar[str] = "default"
    """Name of the context. Make it by `distca.init` once the TrainingArguments have initialised `torch.distributed`."""
    plan_options: ClassVar[dict[str, Any]] = {}
    """Further arguments of `distca.plan`: tolerance, min_rows, retain_bytes."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)  # type: ignore[misc]
        model = self.model  # type: ignore[attr-defined]
        return plan_inputs(inputs, model, distca_context=self.distca_context, **self.plan_options)


def plan_inputs(
    inputs: Mapping[str, Any], model: Any, *, distca_context: str = "default", **plan_options: Any
) -> dict[str, Any]:
    """The keyword arguments of a model for a batch: those of the collator, and the plan of all ranks' batches::

        loss = model(**distca.integrations.hf.plan_inputs(batch, model), use_cache=False).loss

    It is for training loops other than a transformers.Trainer, which `PlanInputs` serves. All ranks call it for each
    batch. They exchange the lengths over torch.distributed's default group, which must be the context's.

    Args:
        inputs: a rank's batch: whole documents packed into one row, with their position_ids [1, T], as transformers'
            DataCollatorWithFlattening makes it from documents of any length.
        model: the model of transformers, or a PEFT model around it, without wrappers such as DDP. Windows come from its
            configuration. A model that went through `ping_pong` gets a plan for each half.
        distca_context: the context's name. Heads come from the context.
        plan_options: further arguments of `distca.plan`: tolerance, min_rows, retain_bytes.

    Returns:
        `inputs`, with `plan` and `distca_context` for the model's forward.

    Raises:
        InvalidArgumentError: on all ranks, if one rank's batch is packed in another way; there is no such context, or
            it does not have all processes.
        PeerDiedError: a rank has ended, or has no further batch.
    """
    context = get_context(distca_context)
    if context is None:
        raise InvalidArgumentError(f"no context {distca_context!r}: call distca.init before training")
    num_processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if context.global_ranks != [*range(num_processes)]:
        raise InvalidArgumentError(
            f"context {context.name!r} has the processes {context.global_ranks} of {num_processes}; all are expected, "
            "because the ranks exchange lengths over the default group: call distca.init in each process, once "
            "torch.distributed is initialised, and without group="
        )
    of_ranks = gathered_lengths(lambda: _packed_lengths(inputs.get("position_ids")), context.num_ranks)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # what PEFT goes around
    make = plan_halves if isinstance(base, InHalves) else plans
    options = {"context": context} | plan_options
    made = make(Layout.from_documents(of_ranks), context.heads, windows=windows_of(model.config), **options)
    return {**inputs, "plan": made, "distca_context": distca_context}


def _packed_lengths(position_ids: Any) -> list[int]:
    """The lengths of whole documents that are packed into one row, from their positions [1, T]."""
    asked = (
        "use DataCollatorWithFlattening, which packs a batch's documents into one row (in TRL: packing=True or "
        "padding_free=True)"
    )
    refuse(not isinstance(position_ids, torch.Tensor), f"the batch has no position_ids: {asked}")
    refuse(position_ids.dim() != 2 or len(position_ids) != 1, f"position_ids are {list(position_ids.shape)}: {asked}")
    starts = [*(position_ids[0] == 0).nonzero().flatten().tolist(), position_ids.shape[1]]
    lengths = [end - begin for begin, end in itertools.pairwise(starts)]
    whole = torch.cat([torch.arange(length) for length in (starts[0], *lengths)])
    refuse(
        starts[0] != 0 or not torch.equal(whole, position_ids[0].cpu()),
        f"position_ids do not count each document from 0: {asked}",
    )
    return lengths


AttentionInterface.register(NAME, distca_attention)
AttentionMaskInterface.register(NAME, distca_mask)
