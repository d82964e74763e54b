"""A model's whole forward pass with its plan: the checks before it, and the count of its attention calls after it.

Importing this module lets `PreTrainedModel.__call__` take a plan. If models are nested, the plan goes to the outermost
one whose configuration asks for this attention. Its call does three things:

- It makes the plan current. Layers that no keyword reaches find it there.
- Before any step it refuses what no plan can express.
- Afterwards it checks that attention was called as often as the model's attention layers call it.

A model without a plan is called as always.

torch.compile of the whole model does not trace this. The plan then reaches layers as a keyword. Models for which the
keyword is not enough are called outside of graphs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from distca.context import Context
from distca.current import Current, current, may_be_open, using
from distca.errors import InvalidArgumentError, refusals_told
from distca.integrations.hf_bidirectional import has_marks
from distca.integrations.hf_limits import check_model, examine, goes_another_way
from distca.integrations.hf_models import NAME, num_attention_calls, refuse, takes_plans, text_model
from distca.integrations.hf_recurrent import had_no_plan, ran_by_document
from distca.integrations.hf_results import has_labels_of_rows, has_own_loss, rank_of_several_documents
from distca.integrations.hf_rope import depends_on_longest
from distca.pingpong.turns import calls_of_half
from distca.planner.layout import PADDING, Layout
from distca.planner.pieces import cut_document
from distca.planner.plan import Plan, Plans
from distca.planner.plan_source import PlanSource
from distca.registry import find_context, open_contexts


@dataclasses.dataclass
class _Forward:
    """A forward pass of a model with a plan.

    Attributes:
        calls: how often it has called attention.
    """

    calls: int = 0


_forward: ContextVar[_Forward | None] = ContextVar("distca.forward", default=None)


def count_call() -> None:
    """Counts one call of attention with a plan, if a forward pass is under way."""
    here = _forward.get()
    if here is not None:
        here.calls += 1


def check_plan_not_needed(training: bool, distca_context: Context | str, instead: str = "") -> None:
    """Raises InvalidArgumentError in a training step of several ranks, because attention would be local. `instead` is
    what to do, if it is not to pass a plan.
    """
    if not (training and torch.is_grad_enabled()):
        return
    context = find_context(distca_context)
    if context is None:  # the step may be of another one
        others = [one for one in open_contexts.values() if one.num_ranks > 1]
        context = others[0] if len({one.rank for one in others}) == 1 else None  # else ranks are threads
    if context is not None and context.num_ranks > 1:
        with refusals_told(context):
            refuse(
                True,
                f"no plan in a training step of rank {context.rank} of {context.num_ranks}: {instead or _PASS_PLAN}",
            )


_PASS_PLAN = (
    "pass plan=distca.plan(layout, heads, context=context) to the model's forward on every rank (distca.PlanAhead "
    "makes them; for a Trainer hf.PlanInputs does, which stands before it in the bases: class Balanced(hf.PlanInputs, "
    "Trainer); hf.unpad(model) for padded batches), or call model.eval() for local attention"
)


def refuse_other_plan(plan: object) -> NoReturn:
    """Raises InvalidArgumentError for what is no plan."""
    refuse(
        hasattr(plan, "halves"),
        "the plan is one of halves, the model is not in ping-pong: hf.ping_pong(model). A forward that was replaced "
        "since then (model.forward = ..., as TRL's trainers do) has no halves: train without ping-pong there",
    )
    raise InvalidArgumentError(
        f'attn_implementation="{NAME}": plan is a {type(plan).__name__}, must be a distca.Plan, distca.Plans or the '
        "plan of distca.pipeline.Ticks"
    )


@torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
def with_plan(
    model: PreTrainedModel,
    run: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    here: Current,
    is_whole: bool = True,
) -> Any:
    """Runs the model's forward with this plan.

    `run` is the model's forward. The result is what it returns for these arguments. Where it `is_whole`, losses and
    what is pooled are checked, too; a part of a model, whose results are padded again, leaves these to the caller.

    Raises:
        InvalidArgumentError: the plan does not express what the model asks for. It is raised before any step if that
            can be known then. The peers are told.
    """
    plan, context = here
    found = find_context(context)
    with refusals_told(found):
        _check(model, here, args, kwargs, is_whole)
    takes_keywords = parameters_of(type(model).forward)[1]
    _keep_plan_in_checkpoints(model)
    kwargs = {name: value for name, value in kwargs.items() if name not in ("plan", "distca_context")}
    if takes_keywords:  # the plan then also reaches compiled layers
        kwargs |= {"plan": plan, "distca_context": context}
    forward = _Forward()
    before, before_in_half = 0 if found is None else found.step, calls_of_half() or 0
    with using(plan, context=context):
        token = _forward.set(forward)
        try:
            with ran_by_document() as ran:
                output = run(*args, **kwargs)
        finally:
            _forward.reset(token)
    missed = next((name for name, m in examine(model).recurrent.items() if m not in ran), None)
    refuse(
        missed is not None,
        f"the model's module {missed} carries a state from row to row, and did not run on each document by itself: its "
        "forward was replaced after the model's first call with a plan, or it was left out (layerdrop)",
    )
    # Compiled layers cannot count. But in a half of a ping-pong the context's steps are those of both halves, and in a
    # tick those of the deepest stage.
    if (of_half := calls_of_half()) is not None:
        calls = of_half - before_in_half
    else:
        calls = forward.calls if found is None or isinstance(plan, PlanSource) else found.step - before
    _check_calls(model, calls)
    if is_whole:
        check_pooled(model, here.rows[0], output)
    return output


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _check(
    model: PreTrainedModel, here: Current, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_whole: bool
) -> None:
    layout, rank = here.rows
    names, takes_keywords = parameters_of(type(model).forward)
    inner = parameters_of(type(model.get_decoder()).forward)[0] if takes_keywords else []
    arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
    check_model(model, layout.num_ranks, layout)
    _check_axes(model, arguments)
    _check_positions(model, layout, rank, arguments, "position_ids" in (*names, *inner))
    _check_checkpoints(model)
    if is_whole:
        check_loss(model, layout, arguments)


@functools.cache
def parameters_of(forward: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of the parameters of a model's forward without self, and whether it takes any keyword."""
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return [p.name for p in parameters], any(p.kind == p.VAR_KEYWORD for p in parameters)


def _check_calls(model: PreTrainedModel, calls: int) -> None:
    expected = num_attention_calls(model.config)
    if calls == expected:
        return
    why = (
        "it bypasses transformers' AttentionInterface, and therefore each rank computed alone; choose another "
        "attn_implementation"
        if calls == 0
        else "layers were left out (layerdrop), or some of them do not call transformers' AttentionInterface"
        if calls < expected
        else "layers run several times, or call attention several times: this model is not supported yet"
    )
    layers = model.config.get_text_config().num_hidden_layers
    refuse(
        True,
        f"{type(model).__name__} has {layers} layers and calls attention {expected} times in a forward pass, but the "
        f"plan was used {calls} times: {why}",
    )


def check_pooled(model: PreTrainedModel, layout: Layout, output: Any) -> None:
    """Refuses a pooler's result of all rows of a rank where these are not one whole document."""
    if isinstance(output, Mapping):
        pooled = next((name for name in ("pooler_output", "text_embeds") if output.get(name) is not None), None)
    else:
        pooled = "a tuple with pooler_output" if getattr(model, "pooler", None) is not None else None
    refuse(
        pooled is not None and rank_of_several_documents(layout) is not None,
        f"{type(model).__name__} returns {pooled}, one result of all rows of a rank, which are not one whole document: "
        "make the model without it (BERT and others: add_pooling_layer=False), and pool the rows of each document "
        "yourself",
    )


def _check_axes(model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
    """Refuses positions of one axis beside images in models whose images have positions of three."""
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    images = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw")
    if "mrope_section" not in parameters or all(arguments.get(name) is None for name in images):
        return
    position_ids = arguments.get("position_ids")
    refuse(
        not isinstance(position_ids, torch.Tensor) or position_ids.dim() < 3,
        f"{type(model).__name__} gives images positions of three axes: pass position_ids [3, 1, T], as the model's "
        "get_rope_index makes them for each document",
    )


def _check_positions(
    model: PreTrainedModel, layout: Layout, rank: int, arguments: Mapping[str, Any], taken: bool
) -> None:
    """Refuses positions that are not the layout's. Positions of several axes ([3, 1, T]) are left to the model."""
    first, position_ids = examine(model).first_position, arguments.get("position_ids")
    wanted = "position_ids=plan.layout.position_ids(plan.rank).unsqueeze(0)" + (f" + {first}" if first else "")
    if position_ids is None or not taken:
        wrong = _not_counted_by_rows(layout)
        if wrong is None:
            return
        if not taken:
            refuse(
                True,
                f"{type(model).__name__} takes no position_ids: it counts the rows of the tensor, which are not the "
                f"positions in the documents ({wrong})",
            )
        refuse(True, f"position_ids are left out, and are not the numbers of the rows ({wrong}): pass {wanted}")
    if not isinstance(position_ids, torch.Tensor) or position_ids.dim() > 2:
        return
    expected = layout.position_ids(rank) + first
    positions = position_ids.reshape(-1).cpu()
    if positions.shape == expected.shape:
        wrong_rows = (positions != expected) & _document_rows(layout, rank)
        if not bool(wrong_rows.any()):
            return
        row = int(wrong_rows.nonzero()[0])
        found = f"row {row} has position {int(positions[row])}, its document has {int(expected[row])} there"
    elif position_ids.shape[-1] == _num_input_rows(arguments):
        return  # the plan is of another batch, and the first layer says so
    else:
        found = f"they have shape {list(position_ids.shape)}, the plan has {len(expected)} rows on rank {rank}"
    refuse(True, f"position_ids are not those of the plan ({found}): pass {wanted}")


def _num_input_rows(arguments: Mapping[str, Any]) -> int | None:
    found = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
    return next((tensor.shape[1] for tensor in found if tensor is not None), None)


def _not_counted_by_rows(layout: Layout) -> str | None:
    """The first place, on any rank, where a document's position is not the number of its row; None if there is none."""
    for rank in range(layout.num_ranks):
        row = 0
        for document, begin, end in layout.segments(rank):
            if document != PADDING and begin != row:
                return f"row {row} of rank {rank} has position {begin} in document {document}"
            row += end - begin
    return None


def _document_rows(layout: Layout, rank: int) -> torch.Tensor:
    """Boolean [T], True for rows of documents. The positions of padding rows mean nothing."""
    rows = [torch.full((end - begin,), document >= 0, device="cpu") for document, begin, end in layout.segments(rank)]
    return torch.cat(rows) if rows else torch.ones(0, dtype=torch.bool, device="cpu")


def check_loss(model: PreTrainedModel, layout: Layout, arguments: Mapping[str, Any], in_halves: bool = False) -> None:
    """Raises InvalidArgumentError, on all ranks, if the model's own loss would not be the loss of the documents."""
    own = has_own_loss(model)
    shifts = not has_labels_of_rows(model)
    if arguments.get("labels") is not None and shifts and (own or arguments.get("shift_labels") is None):
        found = cut_document(layout)
        cut = None if found is None else found[0]
        refuse(
            own and cut is not None,
            f"document {cut} is cut, and {type(model).__name__} ignores shift_labels: leave out labels=, and compute "
            "the loss from the logits",
        )
        refuse(
            cut is not None,
            f"the model shifts labels by one row, but document {cut} is cut, and the target of a cut's last row is not "
            "in the next row: pass shift_labels=, the labels shifted before documents are cut, beside labels=, or "
            "compute the loss from the logits",
        )
    refuse(
        any(arguments.get(name) is not None for name in ("start_positions", "end_positions"))
        and rank_of_several_documents(layout) is not None,
        "start_positions and end_positions ask for a softmax over all rows of a rank, which are not one whole "
        "document: leave them out, and compute the loss of each document from the logits",
    )
    text = model.config.get_text_config()
    refuse(
        arguments.get("labels") is not None
        and (getattr(text, "z_loss_coefficient", None) or 0) > 0
        and (layout.num_ranks > 1 or in_halves),
        "z_loss_coefficient adds a mean over the rows of the tensor, and not a sum over those of all ranks and halves: "
        "set z_loss_coefficient=0.0 in the model's config",
    )
    refuse(
        wants_routers(model, arguments) and layout.num_ranks > 1,
        "output_router_logits adds a loss of the routers, which is not a sum over rows, and sees those of this rank "
        "alone: set output_router_logits=False in the model's config (in TRL: router_aux_loss_coef=0.0)",
    )


def wants_routers(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Whether a call asks for the logits of the routers, of which a loss is made."""
    asked = arguments.get("output_router_logits")
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False) if asked is None else asked)


def _check_checkpoints(model: PreTrainedModel) -> None:
    """Refuses reentrant checkpointing where layers take keys from earlier ones: autograd would not see these."""
    if not model.training or not getattr(model.config.get_text_config(), "num_kv_shared_layers", 0):
        return
    refuse(
        any(m.gradient_checkpointing and _is_reentrant(m) for m in examine(model).checkpointed),
        "layers take keys from earlier ones (num_kv_shared_layers), which get no gradient from them under reentrant "
        'checkpointing, also without distca: gradient_checkpointing_kwargs={"use_reentrant": False}',
    )


def _is_reentrant(module: torch.nn.Module) -> bool:
    """Whether the module's checkpointing is reentrant, as transformers keeps it."""
    checkpoint = getattr(module, "_gradient_checkpointing_func", None)
    if isinstance(checkpoint, _KeepsPlan):
        checkpoint = checkpoint.checkpoint
    return isinstance(checkpoint, functools.partial) and bool(checkpoint.keywords.get("use_reentrant"))


class _KeepsPlan:
    """A model's activation checkpointing, wrapped so that its recomputation in backward has the forward pass's plan."""

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint

    def __call__(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            run = functools.partial(_run, current(), run)
        return self.checkpoint(run, *args, **kwargs)


def _run(here: Current | None, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with had_no_plan() if here is None else using(here.plan, context=here.context):
        return run(*args, **kwargs)


def _keep_plan_in_checkpoints(model: PreTrainedModel) -> None:
    for module in examine(model).checkpointed:
        checkpoint = getattr(module, "_gradient_checkpointing_func", None)
        if checkpoint is not None and not isinstance(checkpoint, _KeepsPlan):
            module._gradient_checkpointing_func = _KeepsPlan(checkpoint)  # type: ignore[assignment]


UNPADS = "_distca_unpads"  # the mark of a module that packs padded batches (hf_unpad.py)
_IN_GRAPHS = "_distca_in_graphs"  # whether keywords alone make a model right; known when it is made
_call_module: Any = PreTrainedModel.__call__
_implementation_of: Any = PreTrainedModel.get_correct_attn_implementation


def _call(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Replaces `PreTrainedModel.__call__`."""
    if torch.compiler.is_compiling():
        if UNPADS in self.__dict__ and kwargs.get("plan") is None:
            raise InvalidArgumentError(
                "the ranks tell each other their rows outside of graphs (hf.unpad): torch.compile(..., fullgraph=False)"
            )
        pools = getattr(self, "pooler", None) is not None
        if kwargs.get("plan") is not None and (pools or not self.__dict__.get(_IN_GRAPHS, False)):
            # In one graph this is an error. Otherwise torch.compile runs this very call without a graph.
            raise InvalidArgumentError(
                "the model needs its plan outside of graphs (RoPE of the types dynamic and longrope, layers that no "
                "keyword reaches, results of whole documents), or is refused there: torch.compile(..., fullgraph=False)"
            )
        if kwargs.get("plan") is None and _IN_GRAPHS in self.__dict__ and may_be_open():
            raise InvalidArgumentError(
                "a graph cannot see the plan of distca.using: pass plan= to the model, or torch.compile(..., "
                "fullgraph=False)"
            )
        return _call_module(self, *args, **kwargs)
    plan = kwargs.get("plan")
    if _forward.get() is not None or (plan is None and current() is None):
        unpads: Any = self.__dict__.get(UNPADS) if _forward.get() is None else None
        if unpads is not None and unpads.takes(self, args, kwargs):
            return unpads.run(self, functools.partial(_call_module, self), args, kwargs)
        if (
            self.training
            and _forward.get() is None
            and takes_plans(self.config)
            and UNPADS not in packed_part(self).__dict__
        ):
            check_plan_not_needed(True, kwargs.get("distca_context", "default"))
        return _call_module(self, *args, **kwargs)
    run = functools.partial(_call_module, self)
    if not takes_plans(self.config):
        if isinstance(plan, Plan | Plans | PlanSource):
            refuse(
                True,
                f"the model was given a plan, but its attn_implementation is {self.config._attn_implementation!r}, "
                f'which takes none: model.set_attn_implementation("{NAME}")',
            )
        return run(*args, **kwargs)
    if plan is None:
        here = current()
        assert here is not None
    elif isinstance(plan, Plan | Plans | PlanSource):
        here = Current(plan, kwargs.get("distca_context", "default"))
    elif hasattr(plan, "halves") and hasattr(self, "takes_halves"):  # each half calls again with its plan
        check_loss(self, plan.layout, kwargs, in_halves=True)
        return run(*args, **kwargs)
    else:
        refuse_other_plan(plan)
    return with_plan(self, run, args, kwargs, here)


def packed_part(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that packs padded batches if it is to: the text model, or what makes its masks for it."""
    return model.base_model if has_marks(model.config) else text_model(model)


def _rope_types(model: PreTrainedModel) -> dict[str, Any]:
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = {name: of.get("rope_type") for name, of in parameters.items() if isinstance(of, dict)}
    return {"": parameters.get("rope_type"), **kinds}


def _correct_implementation(self: PreTrainedModel, requested: str | None, *args: Any, **kwargs: Any) -> Any:
    """Replaces `PreTrainedModel.get_correct_attn_implementation`, which runs before a model's layers are made."""
    if requested == NAME:
        in_graphs = not (
            depends_on_longest(_rope_types(self))
            or goes_another_way(self)
            or "position_ids" not in parameters_of(type(self).forward)[0]
        )
        for part in self.modules():  # there are others if the model is not just being made
            if isinstance(part, PreTrainedModel):
                part.__dict__[_IN_GRAPHS] = in_graphs
        file = vars(sys.modules[type(self).__module__])
        table = next((name for name in file if name.endswith("_ATTENTION_CLASSES")), None)
        refuse(
            table is not None and NAME not in file[table],
            f"{type(self).__name__} takes its attention from a table of its own ({table}) and not from transformers' "
            "AttentionInterface: its attention cannot be replaced; choose another attn_implementation",
        )
    return _implementation_of(self, requested, *args, **kwargs)


PreTrainedModel.__call__ = _call
PreTrainedModel.get_correct_attn_implementation = _correct_implementation
