"""Ping-pong with transformers: two halves of a packed row at once, inside the forward of an otherwise unmodified model.

Example::

    model = distca.integrations.hf.ping_pong(LlamaForCausalLM(...))
    plan = distca.integrations.hf.plan_halves(layout, heads, windows=windows_of(model.config))
    model(input_ids=ids, position_ids=positions, labels=labels, plan=plan).loss.backward()
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from distca.current import Current
from distca.errors import InvalidArgumentError
from distca.heads import LayerHeads
from distca.integrations.hf_forward import UNPADS, with_plan
from distca.integrations.hf_models import refuse
from distca.integrations.hf_results import has_labels_of_rows, has_own_loss
from distca.pingpong.ping_pong import greenlet_module, prepare, refuse_compiled, run_halves
from distca.planner.halves import Half, halves, join_halves
from distca.planner.layout import Layout, Window
from distca.planner.plan import Plans
from distca.planner.planning import plans

Model = TypeVar("Model", bound=torch.nn.Module)
_NO_TARGET = -100  # transformers' label of a row without a target


class HalvedPlans:
    """The halves of a layout and their plans, for the forward of a model in ping-pong. `plan_halves` makes it.

    Attributes:
        layout: the layout of the whole batch.
        rank: the rank that the plans are seen from.
        halves: the two halves.
        plans: the plans of each half.
    """

    def __init__(self, layout: Layout, rank: int, parts: tuple[Half, Half], plans: tuple[Plans, Plans]) -> None:
        self.layout = layout
        self.rank = rank
        self.halves = parts
        self.plans = plans


def plan_halves(
    layout: Layout, heads: LayerHeads, *, windows: Iterable[Window] = (None,), **options: Any
) -> HalvedPlans:
    """Deals a layout's documents out to two halves, and plans each half.

    Args:
        layout: the layout of the whole batch.
        heads: head shape and dtype, as in `distca.plans`.
        windows: the windows of the model's layers (`windows_of`).
        options: further arguments of `distca.plan` (`context`, ...). ``overlap`` is True by default.

    Returns:
        The `plan` for the forward of a model that went through `ping_pong`.

    Raises:
        DistcaError: as in `distca.plan`.
    """
    windows, options = list(windows), {"overlap": True} | options
    parts = halves(layout, window=windows[0] if len(set(windows)) == 1 else None, idle_rows=1)
    first, second = (plans(half.layout, heads, windows=windows, **options) for half in parts)
    return HalvedPlans(layout, first.rank, parts, (first, second))


class InHalves:
    """The base class of a model that `ping_pong` has changed."""

    takes_halves = True


def ping_pong(model: Model) -> Model:
    """Makes a language model run in halves whenever its forward is given ``plan=plan_halves(...)``.

    Tensors ``[1, T, ...]`` among its arguments are the rank's whole packed row. Labels are those of
    DataCollatorWithFlattening: in a causal model a document's first label is -100. The loss is that of the whole row. A
    model in training that is given labels returns no logits. DDP and FSDP2 go around the model. torch.compile is
    refused. Other forward passes of the model are as before.

    Returns:
        The same model, whose class has a new forward.

    Raises:
        ImportError: the package greenlet is missing.
        InvalidArgumentError: the model went through `unpad`, and its batches have no halves.
    """
    greenlet_module()
    refuse(
        any(UNPADS in part.__dict__ for part in model.modules()),
        "the model went through hf.unpad, and padded batches have no halves: leave out one of both",
    )
    kind = type(model)
    if not issubclass(kind, InHalves):
        model.__class__ = type(kind.__name__, (InHalves, kind), {"forward": _forward_of(kind), "__doc__": kind.__doc__})
    return model


def _forward_of(kind: type[torch.nn.Module]) -> Any:
    whole: Any = kind.forward

    @functools.wraps(whole)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        plan = kwargs.get("plan")
        if not isinstance(plan, HalvedPlans):
            return whole(self, *args, **kwargs)
        refuse_compiled("a model in ping-pong is")
        if args:
            raise InvalidArgumentError("ping-pong: a model in halves takes keyword arguments only")
        refuse(
            has_own_loss(self) and kwargs.get("labels") is not None,
            f"ping-pong adds the losses of both halves, but that of {type(self).__name__} is a mean: leave out "
            "labels=, and compute the loss from the logits",
        )
        if not self.__dict__.get("_distca_prepared"):
            prepare(self)
            self.__dict__["_distca_prepared"] = True
        first, second = _calls(plan, kwargs, has_labels_of_rows(self))
        outputs = run_halves(functools.partial(_run_half, self, functools.partial(whole, self)), first, second)
        return _joined(plan, outputs, with_logits=not (self.training and kwargs.get("labels") is not None))

    return forward


def _run_half(model: Any, run: Any, *, plan: Plans, distca_context: Any = "default", **kwargs: Any) -> Any:
    return with_plan(model, run, (), kwargs, Current(plan, distca_context))


def _calls(plan: HalvedPlans, kwargs: dict[str, Any], labels_of_rows: bool) -> list[dict[str, Any]]:
    """The arguments of the model for each half."""
    num_rows = plan.layout.num_rows(plan.rank)
    calls = []
    for half, own in zip(plan.halves, plan.plans, strict=True):
        call = {**kwargs, "plan": own}
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[:2] == (1, num_rows):
                fill = _NO_TARGET if "labels" in name else 1 if name == "attention_mask" else 0
                call[name] = half.take(value, plan.rank, dim=1, fill=fill)
            elif name == "position_ids" and isinstance(value, torch.Tensor) and value.shape[1:] == (1, num_rows):
                call[name] = half.take(value, plan.rank, dim=2, fill=0)  # of several axes
        calls.append(call)
    if kwargs.get("labels") is not None and kwargs.get("num_items_in_batch") is None:
        # The losses of both halves, divided by the targets of both, add up to the loss of the whole row.
        targets = sum(int((_targets(call, labels_of_rows) != _NO_TARGET).sum()) for call in calls)
        for call in calls:
            call["num_items_in_batch"] = max(targets, 1)
    return calls


def _targets(call: dict[str, Any], labels_of_rows: bool) -> torch.Tensor:
    shifted = call.get("shift_labels")
    if shifted is not None:
        return shifted
    return call["labels"] if labels_of_rows else call["labels"][:, 1:]


def _joined(plan: HalvedPlans, outputs: tuple[Any, Any], *, with_logits: bool) -> Any:
    if getattr(outputs[0], "aux_loss", None) is not None:
        raise InvalidArgumentError(
            "ping-pong: the model adds a loss of its routers, which is not a sum over rows: set "
            "output_router_logits=False in its config"
        )
    refuse(
        with_logits and getattr(outputs[0], "logits", None) is None,
        "ping-pong joins the logits of both halves, and the model returns none: call a model with a head",
    )
    joined: dict[str, Any] = {}
    if outputs[0].loss is not None:
        joined["loss"] = outputs[0].loss + outputs[1].loss
    if with_logits:
        joined["logits"] = join_halves([output.logits for output in outputs], plan.halves, plan.rank, dim=1)
    return type(outputs[0])(**joined)
