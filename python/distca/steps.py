"""Core attention in three parts, for loops that overlap two steps: `dispatch`, `attend`, `collect`.

Each part is a node of its own in autograd's graph, and backward mirrors forward: the backward of collect sends
gradients to the servers, the backward of attend computes, and the backward of dispatch brings dq, dk and dv home.
Autograd runs nodes in the reverse order of their creation. Therefore steps that overlap in forward also overlap in
backward.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from distca.arguments import check_flag, check_type
from distca.caller import Caller, forward_step_of
from distca.context import Context, collective
from distca.errors import InvalidArgumentError, refusals_told
from distca.inputs import (
    as_autocast,
    as_numbers,
    check_sinks_done_again,
    check_tensors,
    finder_of,
    in_compiled_code,
    refuse_forward_mode,
    resolved,
    retained_bytes,
)
from distca.planner.plan import Plan
from distca.planner.plan_source import PlanSource, Resolved, StepOfTick
from distca.registry import get_context


class _WithoutDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, number: int, *tensors: torch.Tensor) -> Any:
        ctx.name = name
        return tuple(t.view_as(t) for t in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise InvalidArgumentError(
            f"derivative for {ctx.name} is not implemented: core attention is differentiable once, as PyTorch's own "
            "fused attention is; leave out create_graph=True, or use attention made of plain operators"
        )


def without_derivative(name: str, results: Any, *inputs: Any) -> Any:
    """The results of an operator of backward, marked as depending on the inputs: differentiating them is an error."""
    sources = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    if not sources or not torch.is_grad_enabled():
        return results
    of_one = isinstance(results, torch.Tensor)
    grads = [results] if of_one else list(results)
    apply: Any = _WithoutDerivative.apply
    marked = apply(name, len(grads), *grads, *sources)
    return marked[0] if of_one else marked


class _UnderWay:
    """A step between dispatch and collect. If this object goes before the step is collected, it abandons the step.

    The other ranks would otherwise wait for rows that this rank will never send. Abandoning tells them.
    """

    def __init__(self, number: int, caller: Caller) -> None:
        self.number = number
        here = get_context(caller.context)
        self._context = None if here is None else weakref.ref(here)
        self._layer = caller.layer
        self.graph_task = torch._C._current_graph_task_id()  # -1 in forward
        self.dsinks: torch.Tensor | None = None  # the gradient of the sinks, in backward
        if here is not None and self.graph_task != -1:
            here.backward_steps.add(self)

    def over(self) -> Context | None:
        """Notes that the step is collected or abandoned. Returns its context at the first call, if it still exists."""
        context = self._context() if self._context is not None else None
        self._context = None
        if context is not None:
            context.backward_steps.discard(self)
        return context

    def abandon(self, why: str = "") -> None:
        """Tells the context that this step will not be collected."""
        context = self.over()
        if context is not None:
            where = "" if self._layer is None else f" (layer {self._layer})"
            context.abandon(self.number, where + why)

    def __del__(self) -> None:
        self.abandon()


def _abandon_broken_off(context: Context | None) -> None:
    """Abandons steps of backward passes that this thread has left. Autograd may keep alive what they left behind."""
    if context is not None and torch._C._current_graph_task_id() == -1:  # else a pass around this one may be alive
        for step in list(context.backward_steps):
            step.abandon(": its backward pass broke off")


class _Call:
    """What the three nodes of one call share. The graph owns it. Therefore it must not refer to the graph."""

    def __init__(
        self, plan: Plan, plan_backward: Plan | None, caller: Caller, options: dict[str, Any], max_logits: bool
    ) -> None:
        self.tables = (plan.tensor, None if plan_backward is None else plan_backward.tensor)
        self.retains = plan.retains
        self.returns_max_logits, self.finder = max_logits, finder_of(caller.context)
        self.caller = self.caller_backward = caller
        self.options = options
        self.number, self.forward_step = -1, 0
        self.inputs: list[torch.Tensor] = []  # q, k, v and, if given, sinks; until collect
        self._states: list[tuple[int, int]] = []

    @property
    def finds_max_logits(self) -> bool:
        return self.returns_max_logits or self.finder is not None

    def dispatch(self, retain: bool, *inputs: torch.Tensor) -> None:
        self.inputs = list(inputs)
        self._states = [_state_of(t) for t in inputs]
        q, k, v, *sinks = inputs
        with self.caller.calls("dispatch"):
            self.number = torch.ops.distca.dispatch(
                q, k, v, *self.tables, *sinks, **self.options, retain=retain, max_logits=self.finds_max_logits
            )
        self.forward_step = forward_step_of(get_context(self.caller.context), self.number)
        self.caller.note(self.number)

    def changed_input(self) -> str | None:
        """The name of an input that was written to, or given other memory, since dispatch; or None."""
        names = ("q", "k", "v", "sinks")
        now = (_state_of(t) for t in self.inputs)
        return next((n for n, a, b in zip(names, now, self._states, strict=False) if a != b), None)

    def attend(self) -> None:
        with self.caller.calls("attend"):
            torch.ops.distca.attend(self.number, context=self.caller.context)

    def collect(self) -> tuple[torch.Tensor, ...]:
        """out and lse; with a plan that retains, or where max_logits are asked for, also what is retained, and them."""
        collect = torch.ops.distca.collect_all if self.retains or self.finds_max_logits else torch.ops.distca.collect
        with self.caller.calls("collect"):
            return collect(self.number, context=self.caller.context)

    def take_inputs(self) -> list[torch.Tensor | None]:
        """q, k, v, and sinks or None. This object drops its references to them."""
        q, k, v, *sinks = self.inputs
        self.inputs = []
        return [q, k, v, sinks[0] if sinks else None]

    def dispatch_backward(self, dout: torch.Tensor, dlse: torch.Tensor | None, *saved: Any) -> _UnderWay:
        q, k, v, out, lse, table, sinks, *retained = saved
        if sinks is not None and sinks.requires_grad:
            check_sinks_done_again(self.caller_backward.context)
        with self.caller_backward.calls("dispatch_backward", forward_step=self.forward_step), torch.no_grad():
            number = torch.ops.distca.dispatch_backward(
                dout,
                *(q, k, v, out, lse, table, sinks),
                retained=retained[0] if retained else None,
                dlse=dlse,
                **self.options,
            )
            under_way = _UnderWay(number, self.caller_backward)
            if sinks is not None:
                under_way.dsinks = torch.ops.distca.sink_gradient(dout, out, lse, sinks, dlse)
        self.caller_backward.note(number)
        return under_way

    def attend_backward(self, under_way: _UnderWay) -> None:
        with self.caller_backward.calls("attend_backward"):
            torch.ops.distca.attend(under_way.number, context=self.caller_backward.context)

    def collect_backward(self, under_way: _UnderWay) -> tuple[torch.Tensor | None, ...]:
        with self.caller_backward.calls("collect_backward"):
            grads = torch.ops.distca.collect_backward(under_way.number, context=self.caller_backward.context)
        under_way.over()
        return (*grads, under_way.dsinks)


def _state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The tensor's counter of changes in place, and where its memory is, which `tensor.data = ...` changes uncounted.
    Tensors of inference mode have no counter: always 0.
    """
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, retain: bool, *inputs: Any) -> torch.Tensor:
        ctx.call, ctx.num_inputs = call, len(inputs)
        call.dispatch(retain, *inputs)
        return inputs[0].new_empty(0, dtype=torch.float32)  # the empty tensor that links the nodes

    @staticmethod
    def backward(ctx: Any, token: Any) -> tuple[Any, ...]:
        grads = ctx.call.collect_backward(token.under_way)[: ctx.num_inputs]
        return None, None, *without_derivative("distca::dispatch_backward", grads, *token.sources)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, token: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        call.attend()
        return torch.empty_like(token)

    @staticmethod
    def backward(ctx: Any, token: Any) -> tuple[Any, ...]:
        ctx.call.attend_backward(token.under_way)
        return None, token


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, token: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        out, lse, *others = call.collect()
        retained, max_logits = others[:-1], others[-1:] if call.finds_max_logits else []
        *rows, sinks = call.take_inputs()
        table, table_backward = call.tables
        # Save what the operator of the whole step saves, in the same order: activation checkpointing counts them.
        table = table if table_backward is None else table_backward
        ctx.save_for_backward(*rows, out, lse, table, sinks, *retained)
        ctx.mark_non_differentiable(*max_logits)
        return out, lse, *max_logits

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: None) -> tuple[Any, ...]:
        with refusals_told(get_context(ctx.call.caller.context)):
            return _Collect._backward(ctx, dout, dlse)

    @staticmethod
    def _backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        if dout is None:  # the other ranks take part in this step all the same
            dout = torch.zeros_like(saved[3])
        token: Any = dout.new_empty(0, dtype=torch.float32)
        # If backward breaks off, autograd drops the token and the step with it. The step is then abandoned.
        token.under_way = ctx.call.dispatch_backward(dout, dlse, *saved)
        token.sources = (dout, dlse, *saved) if torch.is_grad_enabled() else ()
        return None, token


class Step:
    """A step of core attention under way. `dispatch` makes it, `attend` and `collect` go on with it.

    Dropping a step before it is collected is a fault. This rank's context is poisoned, and the other ranks, which wait
    for the step, raise an error that names it.

    Attributes:
        number: the context's number of this step.
    """

    def __init__(self, call: _Call, token: torch.Tensor) -> None:
        self.number = call.number
        self._call = call
        self._token: torch.Tensor | None = token
        self._under_way = _UnderWay(call.number, call.caller)
        here = get_context(call.caller.context)
        self._context = None if here is None else weakref.ref(here)

    def abandon(self, why: str) -> None:
        """Says that this step will not be collected, and why. The other ranks then do not wait for it."""
        self._under_way.abandon(f": {why}")

    def _next(self, node: Any, part: str) -> Any:
        with refusals_told(get_context(self._call.caller.context)):
            return self._go_on(node, part)

    def _go_on(self, node: Any, part: str) -> Any:
        if self._token is None:
            raise InvalidArgumentError(f"{part}: step {self.number} has been collected")
        if self._context is not None and self._context() is not get_context(self._call.caller.context):
            raise InvalidArgumentError(f"{part}: the context of step {self.number} was closed")
        if (name := self._call.changed_input()) is not None:
            message = (
                f"{part}: {name} was changed in place, or given other memory, after its dispatch, when some of its "
                "rows may have left"
            )
            self.abandon(message)
            raise InvalidArgumentError(f"{message}; step {self.number} is abandoned")
        if self._token.requires_grad and not torch.is_grad_enabled():
            with torch.inference_mode(False), torch.enable_grad():  # dispatch has decided on it
                return node.apply(self._call, self._token)
        return node.apply(self._call, self._token)


@collective
def dispatch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan | PlanSource,
    *,
    plan_backward: Plan | None = None,
    context: str | Context = "default",
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    max_logits: bool = False,
    layer: int | str | StepOfTick | None = None,
) -> Step:
    """Sends this rank's rows to the servers that compute with them: the first part of a step.

    `attend` and `collect` are the other two parts. Together the three do what `distca.core_attention`
    does with the same arguments. All three are collective: every rank makes the same calls in the same order. Parts of
    another step may come in between; at most two steps are under way. q, k, v and sinks must not change until collect.
    On a GPU the parts are queued on the stream that is current; if that is another one for each, the caller orders
    them, as for every operator of PyTorch. Backward needs no calls of its own: autograd runs the three parts in
    reverse, overlapped as forward was.

    It works in eager mode only, because a compiler could move the calls, or free rows that are still being sent.

    Args:
        q, k, v, plan, plan_backward, context, scale, softcap, sinks, deterministic, max_logits, layer: as in
            `distca.core_attention`.

    Returns:
        The step under way, for `attend`.

    Raises:
        InvalidArgumentError: as in `core_attention`; also if two steps are under way (the message names them), or under
            torch.compile. Nothing has moved then.
        PlanMismatchError, PeerDiedError, PeerLeftError, PeerTimeoutError: the context is poisoned.
    """
    if in_compiled_code():
        raise InvalidArgumentError(
            "dispatch: a compiler could move the parts of a step, or free rows that are still being sent; call it "
            "outside of torch.compile, or core_attention inside"
        )
    call = resolved("dispatch", plan, plan_backward, layer)
    check_tensors("dispatch", q, k, v, sinks)
    check_flag("dispatch", "max_logits", max_logits)
    check_flag("dispatch", "deterministic", deterministic)
    scale, softcap = as_numbers(scale, softcap)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "deterministic": deterministic}
    return begin(q, k, v, call, context=context, sinks=sinks, max_logits=max_logits, **options)


def begin(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    of_call: Resolved,
    *,
    context: str | Context,
    sinks: torch.Tensor | None,
    max_logits: bool,
    **options: Any,
) -> Step:
    """What `dispatch` does once the plans `of_call` are known. `options` are its scale, softcap and deterministic."""
    refuse_forward_mode("dispatch", q, k, v, sinks)
    plan, plan_backward, layer, layer_backward = of_call
    inputs = as_autocast(q, k, v, context)
    caller = Caller.of(context, layer, plan.half)
    _abandon_broken_off(get_context(caller.context))
    call = _Call(plan, plan_backward, caller, caller.options(**options), max_logits)
    call.caller_backward = caller._replace(layer=layer_backward)
    apply: Any = _Dispatch.apply
    inputs = (*inputs, *([] if sinks is None else [sinks.float().contiguous()]))
    retain = plan.retains and retained_bytes(plan, plan_backward, *inputs) > 0
    return Step(call, apply(call, retain, *inputs))


def attend(step: Step) -> None:
    """Computes this rank's tasks of a dispatched step, as soon as their rows are here, and sends the results home.

    Raises:
        InvalidArgumentError: the call is out of order, or an input was changed since dispatch.
        PlanMismatchError, PeerDiedError, PeerLeftError, PeerTimeoutError: the context is poisoned.
    """
    check_type("attend", "step", step, Step, "distca.dispatch(q, k, v, plan)")
    step._token = step._next(_Attend, "attend")


def collect(step: Step) -> tuple[torch.Tensor, ...]:
    """Takes in the results of this rank's rows: the last part of a step.

    Returns:
        out and lse, and max_logits if `dispatch` was asked for them, as `distca.core_attention` returns them.

    Raises:
        DistcaError: as in `attend`.
    """
    check_type("collect", "step", step, Step, "distca.dispatch(q, k, v, plan)")
    results = step._next(_Collect, "collect")
    if torch.is_grad_enabled() and not results[0].requires_grad:
        # Activation checkpointing recomputes up to the last tensor that forward saved. This saves one, so that it does
        # not end between dispatch and collect, where a step would stay under way.
        torch.empty(0, requires_grad=True).sin()
    step._token = None
    step._under_way.over()
    call = step._call
    if call.finder is not None:
        call.finder.take(call.caller.layer, results[2])
    return results if call.returns_max_logits else results[:2]
