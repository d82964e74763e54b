"""Hugging Face transformers: importing this module registers `attn_implementation="distca"`.

    import distca.integrations.hf
    model = LlamaForCausalLM(LlamaConfig(..., attn_implementation="distca"))
    model(input_ids=ids, position_ids=plan.layout.position_ids(plan.rank)[None], plan=plan)

The model stays as it is: what its `forward` is given reaches every attention layer. Forward keywords:

- `plan`: the `distca.Plan` of this step, or the `distca.Plans` where layers differ in their sliding window. Tensors are
  packed, batch size 1, one row for each row of the layout on this rank. Documents are separated by the plan, so no
  [T, T] mask is built and no `attention_mask` is wanted; one of ones is accepted.
- `position_ids` [1, T]: must be those of the plan's layout, `plan.layout.position_ids(plan.rank)`. Left out,
  transformers counts the rows of the tensor, which is right for one unsplit document only; in both cases they are
  checked where the model hands them to its attention layers (Llama and its relatives do).
- `distca_context`: the context, or its name (default "default").

Without a plan attention is local, computed by transformers' own SDPA function: for evaluation and `generate()`. The
other ranks take no part in it, so this is also how one rank evaluates alone; with a plan all ranks must. In training
no plan is an error when the context has more than one rank. transformers cannot run a tensor of no rows: give a
rank without tokens one row of padding, the segment (-1, 0, 1).

`heads_of` and `windows_of` read from a model's configuration what `distca.plan` needs; `PlanInputs` lets a
`transformers.Trainer` make the plans itself. `ping_pong` and `plan_halves`: see hf_ping_pong.py.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from distca.context import Context, get_context
from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.integrations.hf_ping_pong import HalvedPlans, InHalves
from distca.integrations.hf_ping_pong import ping_pong as ping_pong
from distca.integrations.hf_ping_pong import plan_halves as plan_halves
from distca.layout import Layout
from distca.ops import core_attention
from distca.planning import Plan, Plans, plans

NAME = "distca"
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")  # the last is refused where it has chunks


class DeferredMask:
    """The mask that transformers asked for, built only if a layer needs it.

    transformers makes the mask before any layer runs, where the plan is not known. With a plan the layers ask only
    whether the request goes beyond what the plan expresses; without one, the first layer builds the mask and the
    others share it.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self._mask: torch.Tensor | None = None
        self._built = False
        self._objection: str | None = None
        self._examined = False

    def build(self) -> torch.Tensor | None:
        """The boolean mask [1, 1, q, kv] for SDPA, or None where SDPA's own causal flag says the same."""
        if not self._built:
            self._mask, self._built = sdpa_mask(**self._request), True
        return self._mask

    def objection(self) -> str | None:
        """Why a plan cannot stand in for this mask; None if it can."""
        if torch.compiler.is_compiling():  # costs nothing at run time, while the two flags would be guarded
            return self._examine()
        if not self._examined:
            self._objection, self._examined = self._examine(), True
        return self._objection

    def _examine(self) -> str | None:
        padding: torch.Tensor | None = self._request.get("attention_mask")
        if padding is not None and (torch.compiler.is_compiling() or not bool(padding.all())):
            return (
                "attention_mask marks padding, which would be dropped silently: pass no attention_mask; "
                "padding rows belong into the plan's layout, as segments of document -1"
            )
        if self._request.get("use_vmap"):
            return "the model lays a mask of its own (or_mask_function or and_mask_function) over the causal one"
        if not torch.compiler.is_compiling() and self._sees_future():
            return "the model asks for a mask that is not causal"
        return None

    def _sees_future(self) -> bool:
        """Whether any row may see the row after it: bidirectional models, blocks of image tokens."""
        rows = torch.arange(max(self._request["q_length"] - 1, 0), device=self._request.get("device"))
        batch = torch.zeros_like(rows)
        mask_function: Callable[..., torch.Tensor] = self._request["mask_function"]
        return bool(mask_function(batch, batch, rows, rows + 1).any())

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        """A model that computes with the mask itself does not let its attention be replaced."""
        _refuse(
            True,
            "the model adds the mask to its attention scores itself and bypasses transformers' AttentionInterface: its "
            "attention cannot be replaced; choose another attn_implementation",
        )

    @property
    def local_size(self) -> int | None:
        """The window or chunk size of a layer that does not see its whole document."""
        return self._request.get("local_size")


def distca_mask(**request: Any) -> DeferredMask | torch.Tensor | None:
    """The entry for AttentionMaskInterface: a mask request of transformers, deferred while a plan may still come."""
    whole = request["q_length"] == request["kv_length"] and isinstance(request.get("q_offset", 0), int)
    return DeferredMask(request) if whole else sdpa_mask(**request)


def distca_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: DeferredMask | torch.Tensor | None,
    *,
    plan: Plan | Plans | None = None,
    distca_context: Context | str = "default",
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The entry for AttentionInterface.

    query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] of this rank's rows; returns out [1, T, H, Dv] and
    None. Raises InvalidArgumentError for what the plan does not express, and says what to do instead.
    """
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if plan is None:
        _check_plan_not_needed(module, distca_context)
        mask = attention_mask.build() if isinstance(attention_mask, DeferredMask) else attention_mask
        if softcap is not None or sinks is not None:  # SDPA would drop them silently
            return _eager(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    plan = _plan_of_layer(plan, kwargs.get("sliding_window"))
    _check_call(module, query, key, plan, dropout, kwargs)
    _check_mask(attention_mask, kwargs.get("sliding_window"))
    _check_position_ids(module, kwargs.get("position_ids"), plan)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
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


def _eager(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The model's own attention, with the mask that it takes."""
    num_rows, num_keys = query.shape[2], key.shape[2]
    if mask is None:
        mask = torch.ones(num_rows, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_rows)[
            None, None
        ]
    added = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
    added = added.masked_fill(~mask, torch.finfo(query.dtype).min)
    attend = sys.modules[type(module).__module__].eager_attention_forward
    return attend(module, query, key, value, added, **options)[0], None


def _name_of_layer(module: torch.nn.Module) -> str | None:
    """What error messages call the layer; not under torch.compile, where reading it would keep layers' graphs apart."""
    if torch.compiler.is_compiling() or (index := getattr(module, "layer_idx", None)) is None:
        return None
    return f"{index} ({type(module).__name__})"


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise InvalidArgumentError(f'attn_implementation="distca": {message}')


def _check_plan_not_needed(module: torch.nn.Module, distca_context: Context | str) -> None:
    if not (module.training and torch.is_grad_enabled()):
        return
    context = get_context(distca_context) if isinstance(distca_context, str) else distca_context
    if context is not None and context.num_ranks > 1:
        _refuse(
            True,
            f"no plan in a training step of rank {context.rank} of {context.num_ranks}: pass "
            "plan=distca.plan(layout, heads) to the model's forward on every rank (distca.PlanAhead makes them), "
            "or call model.eval() for local attention",
        )


def _plan_of_layer(plan: Plan | Plans, sliding_window: int | None) -> Plan:
    """transformers' window W lets row q see key k where q - k < W, as ours does."""
    if isinstance(plan, Plans):
        return plan.for_window(sliding_window)
    _refuse(
        isinstance(plan, HalvedPlans), "the plan is one of halves, the model is not in ping-pong: hf.ping_pong(model)"
    )
    _refuse(not isinstance(plan, Plan), f"plan is a {type(plan).__name__}, must be a distca.Plan or distca.Plans")
    _refuse(plan.mask != "causal", f"the plan's mask is {plan.mask}; a causal one is needed")
    _refuse(
        not plan.same_window(sliding_window),
        f"this layer has a sliding window of {sliding_window}, the plan one of {plan.window}: pass "
        f"plan=distca.plan(layout, heads, window={sliding_window}), or distca.plans(layout, heads, windows=[...]) "
        "where layers differ",
    )
    return plan


def _check_call(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, plan: Plan, dropout: float, kwargs: dict[str, Any]
) -> None:
    batch, _, num_rows, _ = query.shape
    _refuse(
        batch != 1,
        f"batch size is {batch}, must be 1: pack the documents of this rank one after the other into one row, "
        "input_ids [1, T], and give their lengths to the plan",
    )
    expected = plan.num_rows
    _refuse(
        num_rows != expected,
        f"the input has {num_rows} rows but the plan was made for {expected} rows on rank {plan.rank}: "
        "make a plan of this batch's layout",
    )
    _refuse(
        key.shape[2] != num_rows,
        f"{key.shape[2]} keys for {num_rows} rows: a plan covers whole documents, so pass use_cache=False and no "
        "past_key_values",
    )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    _refuse(not causal, "this layer is not causal; only causal attention is supported yet")
    _refuse(
        dropout > 0,
        f"attention dropout is {dropout:g}, must be 0: set attention_dropout=0.0 in the model's config "
        "(attn_pdrop in GPT-2's)",
    )
    _refuse(kwargs.get("position_bias") is not None, "a position bias is not supported yet")
    kinds = getattr(getattr(module, "config", None), "layer_types", None) or ()
    other = next((kind for kind in kinds if kind not in _LAYER_TYPES), None)
    _refuse(
        other is not None,
        f"the model has layers of type {other}, which know no borders of documents or ranks: not supported yet",
    )


def _check_mask(mask: DeferredMask | torch.Tensor | None, sliding_window: int | None) -> None:
    if isinstance(mask, DeferredMask):
        _refuse(
            sliding_window is None and mask.local_size is not None,
            f"attention in chunks of {mask.local_size} is not supported yet",
        )
        objection = mask.objection()
        _refuse(objection is not None, str(objection))
    else:
        _refuse(
            mask is not None,
            "attention_mask is a ready-made mask: pass none, the plan separates the documents",
        )


def _check_position_ids(module: torch.nn.Module, position_ids: Any, plan: Plan) -> None:
    """Checked once a forward, in the first layer; positions of several axes ([3, 1, T]) are left to the model."""
    if torch.compiler.is_compiling() or getattr(module, "layer_idx", 0) != 0:
        return
    if not isinstance(position_ids, torch.Tensor) or position_ids.dim() > 2:
        return
    expected = plan.layout.position_ids(plan.rank)
    positions = position_ids.reshape(-1).cpu()
    if positions.shape == expected.shape:
        wrong = (positions != expected) & _document_rows(plan)
        if not bool(wrong.any()):
            return
        row = int(wrong.nonzero()[0])
        found = f"row {row} has position {int(positions[row])}, its document has {int(expected[row])} there"
    else:
        found = f"they have shape {list(position_ids.shape)}"
    _refuse(
        True,
        f"position_ids are not those of the plan ({found}): pass "
        "position_ids=plan.layout.position_ids(plan.rank).unsqueeze(0)",
    )


def _document_rows(plan: Plan) -> torch.Tensor:
    """Boolean [T]: the rows that are not padding, whose positions mean something."""
    rows = [torch.full((end - begin,), document >= 0) for document, begin, end in plan.layout.segments(plan.rank)]
    return torch.cat(rows) if rows else torch.ones(0, dtype=torch.bool)


def heads_of(config: PreTrainedConfig, dtype: torch.dtype) -> Heads:
    """The head shape of a language model's attention layers; `dtype` is that of q, k and v."""
    config = config.get_text_config()
    q = config.num_attention_heads
    kv = getattr(config, "num_key_value_heads", None) or q
    if getattr(config, "v_head_dim", None) is not None:  # multi-head latent attention
        return Heads(q, kv, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim, dtype)
    return Heads(q=q, kv=kv, dim=getattr(config, "head_dim", None) or config.hidden_size // q, dtype=dtype)


def windows_of(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of every layer; None for a layer whose rows see all of their document before them."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    windows: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    for layer, kind in enumerate(kinds):
        _refuse(
            kind not in windows, f"layer {layer} of the model is of type {kind}, must be one of {', '.join(windows)}"
        )
    return [windows[kind] for kind in kinds]


class PlanInputs:
    """Makes the plan of every batch, in training and in evaluation, when put before a Trainer::

        class Trainer(distca.integrations.hf.PlanInputs, transformers.Trainer):
            pass

    A rank's batch is whole documents packed into one row, with their position_ids, as transformers'
    DataCollatorWithFlattening makes it of documents of any length. The ranks exchange the lengths over
    torch.distributed's default group, which must be that of the context. Heads come from the context, windows from the
    model. A model that went through `ping_pong` gets a plan for each half.
    """

    distca_context: ClassVar[str] = "default"
    """Name of the context, made by `distca.init` once the TrainingArguments have begun `torch.distributed`."""
    plan_options: ClassVar[dict[str, Any]] = {}
    """Options of `distca.plan`: tolerance, min_rows, retain_bytes."""

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)  # type: ignore[misc]
        context = get_context(self.distca_context)
        if context is None:
            raise InvalidArgumentError(f"no context {self.distca_context!r}: call distca.init before training")
        lengths = _packed_lengths(inputs.get("position_ids"))
        of_ranks: list[Any] = [lengths] * context.num_ranks
        if context.num_ranks > 1:
            dist.all_gather_object(of_ranks, lengths)
        make = plan_halves if isinstance(self.model, InHalves) else plans  # type: ignore[attr-defined]
        made = make(
            Layout.from_documents(of_ranks),
            context.heads,
            windows=windows_of(self.model.config),  # type: ignore[attr-defined]
            rank=context.rank,
            **self.plan_options,
        )
        return {**inputs, "plan": made, "distca_context": self.distca_context}


def _packed_lengths(position_ids: Any) -> list[int]:
    """The lengths of whole documents packed into one row, from their positions [1, T]."""
    asked = "use DataCollatorWithFlattening, which packs a batch's documents into one row"
    _refuse(not isinstance(position_ids, torch.Tensor), f"the batch has no position_ids: {asked}")
    _refuse(position_ids.dim() != 2 or len(position_ids) != 1, f"position_ids are {list(position_ids.shape)}: {asked}")
    starts = [*(position_ids[0] == 0).nonzero().flatten().tolist(), position_ids.shape[1]]
    lengths = [end - begin for begin, end in itertools.pairwise(starts)]
    whole = torch.cat([torch.arange(length) for length in (starts[0], *lengths)])
    _refuse(
        starts[0] != 0 or not torch.equal(whole, position_ids[0].cpu()),
        f"position_ids do not count each document from 0: {asked}",
    )
    return lengths


AttentionInterface.register(NAME, distca_attention)
AttentionMaskInterface.register(NAME, distca_mask)
