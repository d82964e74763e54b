"""Padded batches: a model computes their rows alone, packed and planned inside its own forward.

    model = distca.integrations.hf.unpad(model)
    model(input_ids, attention_mask=attention_mask)  # [B, L], on all ranks; the results are [B, L, ...] as ever

Trainers that build their batches themselves, such as TRL's for preferences and rewards, need no other change. What is
packed is the part of the model from tokens to the rows of the last layer. Heads, losses and pooling, which stand after
it, get padded rows.

Documents of a batch may begin alike, such as answers with their prompt. Their common first rows may be computed once:
a layout's branches say so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from distca.current import Current
from distca.errors import refusals_told
from distca.integrations.hf_batches import context_of_all, plan_of, without_adapters
from distca.integrations.hf_forward import (
    UNPADS,
    check_plan_not_needed,
    check_pooled,
    packed_part,
    parameters_of,
    with_plan,
)
from distca.integrations.hf_limits import check_model
from distca.integrations.hf_models import mask_of, refuse, takes_plans
from distca.integrations.hf_padded import CACHES, Batch, batch_of, layout_of, packed_arguments
from distca.integrations.hf_ping_pong import InHalves
from distca.planner.exchange import gathered_lengths
from distca.planner.layout import Layout
from distca.registry import get_context

Model = TypeVar("Model", bound=torch.nn.Module)


def unpad(model: Model, *, share_prompts: bool = False, distca_context: str = "default", **plan_options: Any) -> Model:
    """Lets a model of transformers take padded batches in each call, compute their rows alone, and balance attention.

    Every call of the model is then collective: the ranks exchange the lengths of their documents over a gloo group of
    their own, and plan. A call is as it was before where it gets a plan; it is local in `generate()`, inside of
    `local`, with a cache or ``use_cache=True``, and where no context of this name is open. The model stays as it is
    but for a mark, and a hook of its pooler if it has one; its class, weights and signature do not change.

    A batch has its documents in the rows of `input_ids` (or `inputs_embeds`) [B, L], and `attention_mask` [B, L], with
    padding on the left, on the right or on both sides. Without a mask all rows count. `position_ids` may tell several
    documents in a row apart, by counting each of them from 0; padding may have any. Those of four axes do so by their
    first, as in transformers. A document is counted from its first row if they count padding on its left, or are left
    out, as transformers would count then.

    Args:
        model: the model, made with ``attn_implementation="distca"``, or a PEFT model around it. Wrappers such as DDP go
            around the result.
        share_prompts: compute the first rows that documents of a rank's batch have in common once, such as a prompt
            with several answers. Such rows have the same tokens; at least 16 of them are shared.
        distca_context: the context's name. Heads come from the context: make it with those of `heads_of`.
        plan_options: further arguments of `distca.plan`: tolerance, min_rows, retain_bytes.

    Returns:
        The model itself.

    Raises:
        InvalidArgumentError: here, if no plan can express the model. In a call, on all ranks, if a batch of one has
            another form.
        PeerLeftError: in a call, if another rank's raised another error, which the message repeats.
        PeerDiedError, PeerTimeoutError: in a call, if a rank has ended, or makes no further one.
    """
    base = without_adapters(model)
    refuse(
        not isinstance(base, PreTrainedModel) or not takes_plans(base.config),
        f"unpad takes a model of transformers that was made with this attn_implementation, not {type(model).__name__}: "
        'model.set_attn_implementation("distca") may set it later; wrap the model by DDP or FSDP after unpad',
    )
    assert isinstance(base, PreTrainedModel)
    refuse(
        isinstance(base, InHalves),
        "the model is in ping-pong, whose halves are of packed rows: use PlanInputs with packed batches, or leave out "
        "hf.ping_pong",
    )
    refuse(
        share_prompts and mask_of(base) == "full",
        "share_prompts is for causal models: here rows see those after them, and a prompt's rows differ by the answer",
    )
    unknown = next((name for name in plan_options if name not in _PLAN_OPTIONS), None)
    refuse(unknown is not None, f"unpad has no option {unknown!r}: beside its own it takes {', '.join(_PLAN_OPTIONS)}")
    part = packed_part(base)
    check_model(part, 1, Layout.from_documents([[1]]))
    if UNPADS not in part.__dict__ and isinstance(pooler := getattr(part, "pooler", None), torch.nn.Module):
        pooler.register_forward_pre_hook(_before_pooler)
    part.__dict__[UNPADS] = _Unpads(distca_context, share_prompts, plan_options)
    return model


#: What `plan_options` may have.
_PLAN_OPTIONS = ("tolerance", "min_rows", "retain_bytes")


@contextlib.contextmanager
def local() -> Iterator[None]:
    """Inside, models that went through `unpad` compute as they do without it, and no other rank takes part::

        if rank == 0:
            with torch.no_grad(), distca.integrations.hf.local():
                logits = model.eval()(ids, attention_mask=attention_mask).logits

    A rank may so evaluate alone, whatever the others do.
    """
    before = _is_local.set(True)
    try:
        yield
    finally:
        _is_local.reset(before)


_is_local: ContextVar[bool] = ContextVar("distca.local", default=False)
_generate: Any = GenerationMixin.generate


@functools.wraps(_generate)
def _generate_locally(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `GenerationMixin.generate`: ranks generate different numbers of tokens."""
    with local():
        return _generate(self, *args, **kwargs)


GenerationMixin.generate = _generate_locally


@dataclasses.dataclass(frozen=True)
class _Unpads:
    """The mark of a model's part that computes packed rows in the place of padded ones."""

    context: str
    share_prompts: bool
    plan_options: dict[str, Any]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def takes(self, model: PreTrainedModel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is one of a batch to be planned.

        Raises:
            InvalidArgumentError: it has the cache of one that was. Or it is a training step of several ranks, and none.
        """
        if not takes_plans(model.config) or get_context(self.context) is None:
            return False
        given = _arguments(model, args, kwargs)
        caches = [given[name] for name in CACHES if given.get(name) is not None]
        refuse(
            any(isinstance(cache, _NoCache) for cache in caches),
            "the cache is of a call that planned a padded batch, which makes none: pass use_cache=True to that call, "
            "too, or make both in distca.integrations.hf.local()",
        )
        if torch.is_grad_enabled():  # some models make an empty cache in training, too
            makes_cache = not all(_is_empty(cache) for cache in caches)
        else:
            makes_cache = bool(caches) or given.get("use_cache") is True
        if not makes_cache and not _is_local.get():
            return True
        instead = (
            "this call has a cache, or is inside of hf.local(): leave it out, and pass use_cache=False, or call "
            "model.eval() for local attention"
        )
        check_plan_not_needed(model.training, self.context, instead)
        return False

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def run(
        self, model: PreTrainedModel, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The results of the model for a padded batch. `run` is its forward."""
        given = _arguments(model, args, kwargs)
        batch, packed, current = self._planned(model, given)
        asked = given.get("return_dict")
        as_tuple = not (getattr(model.config, "return_dict", True) if asked is None else asked)
        if as_tuple:  # the names of results tell which are of rows
            packed["return_dict"] = True
        pooling = _Pooling(batch)
        token = _pooling.set(pooling)
        try:
            output = with_plan(model, run, (), packed, current, is_whole=False)
        finally:
            _pooling.reset(token)
        if not pooling.is_done:
            check_pooled(model, current.rows[0], output)
        output = batch.padded(output)
        if not isinstance(output, ModelOutput):
            return output
        if not torch.is_grad_enabled() and _would_make_cache(model, given):
            output = _with_no_cache(output)
        return output.to_tuple() if as_tuple else output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _planned(self, model: PreTrainedModel, given: Mapping[str, Any]) -> tuple[Batch, dict[str, Any], Current]:
        """The rows of a padded batch, the arguments of the model for them, and the plan of all ranks."""
        context = context_of_all(self.context)
        found: list[Batch] = []

        def told() -> list[int]:
            found.append(batch_of(model, given, self.share_prompts))
            return [int(torch.is_grad_enabled()), *found[0].told]

        of_ranks = gathered_lengths(told, context.lengths_exchange)
        _check_gradients([bool(words[0]) for words in of_ranks])
        with refusals_told(context):
            layout = layout_of([words[1:] for words in of_ranks])
            plan, (batch,) = plan_of(model, layout, context, self.plan_options), found
            packed = packed_arguments(model, given, batch, layout.position_ids(context.rank))
            return batch, packed, Current(plan, self.context)


class _NoCache:
    """Stands in results for the cache that a call without a plan would have made."""


def _is_empty(cache: Any) -> bool:
    layers = getattr(cache, "layers", None)
    return layers is not None and not any(layer.is_initialized for layer in layers)


def _would_make_cache(model: PreTrainedModel, given: Mapping[str, Any]) -> bool:
    by_default = bool(getattr(model.config.get_text_config(), "use_cache", False)) and "use_cache" in _parameters(model)
    return by_default and given.get("use_cache") is None and mask_of(model) == "causal"


def _with_no_cache(output: ModelOutput) -> ModelOutput:
    values = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return type(output)(**values | {name: _NoCache() for name in CACHES if name in values})


def _check_gradients(of_ranks: Sequence[bool]) -> None:
    if len(set(of_ranks)) == 1:
        return
    refuse(
        True,
        f"rank {of_ranks.index(True)} calls the model for gradients, and rank {of_ranks.index(False)} under "
        "torch.no_grad(): all ranks make the same calls. One evaluates alone in distca.integrations.hf.local()",
    )


@dataclasses.dataclass
class _Pooling:
    """A call that plans a padded batch, as the hook of the model's pooler sees it.

    Attributes:
        is_done: whether the pooler has got the rows of the padded batch.
    """

    batch: Batch
    is_done: bool = False


_pooling: ContextVar[_Pooling | None] = ContextVar("distca.pooling", default=None)


def _before_pooler(_: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A forward hook: gives the pooler of a model the rows of the padded batch in the place of packed ones."""
    here = _pooling.get()
    if here is None or not args or not isinstance(args[0], torch.Tensor) or args[0].dim() != 3:
        return None  # Albert's gets the first row alone
    here.is_done = True
    return here.batch.padded(args[0]), *args[1:]


def _arguments(model: PreTrainedModel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(_parameters(model), args, strict=False)) | dict(kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _parameters(model: PreTrainedModel) -> list[str]:
    return parameters_of(type(model).forward)[0]
