"""The operators with autograd: `core_attention` for a group of ranks, `attention` for one process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.resources import files
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType as EffectType

from distca.context import Context, collective
from distca.errors import InvalidArgumentError, refusals_told, typed_errors
from distca.pingpong.turns import core_attention_in_parts, in_half
from distca.planner.plan import Plan
from distca.registry import find_context, get_context
from distca.steps import (
    as_autocast,
    check_plans,
    check_rows,
    check_tensors,
    is_deterministic,
    refuse_forward_mode,
    retained_bytes,
    without_derivative,
)
from distca.trace.nsys import operator_range

_LAYER = "distca.layer"  # the key in a graph node's metadata under which backward finds the layer

torch.ops.load_library(str(files("distca") / "libdistca_torch.so"))


@collective
def core_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    *,
    plan_backward: Plan | None = None,
    context: str | Context = "default",
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    layer: int | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Core attention of this rank's rows, ``softmax(scale * q k^T) v`` inside each document, computed by all ranks.

    This is a collective step. Every rank of the context makes the same calls in the same order, each with its own slice
    of the same plan. The same holds for backward. The result is differentiable once, in q, k, v and sinks: a second
    derivative and forward mode raise InvalidArgumentError.

    Under autocast, q, k and v are cast to its dtype, which must then be the plan's. In compiled code the errors below
    are ``RuntimeError("distca <Kind>: ...")``, without the layer.

    Args:
        q: ``[T, H, D]``, float32, bfloat16 or float16, on the context's device. The last dimension is contiguous; the
            other strides are free.
        k: ``[T, Hkv, D]``, same dtype and device.
        v: ``[T, Hkv, Dv]``, same dtype and device.
        plan: the plan of this step's layout; ``plan.rank`` is this rank.
        plan_backward: another plan for the backward pass, with the same layout and mask and without ``retain_bytes``.
        context: the context or its name.
        scale: factor on the logits; ``D ** -0.5`` by default.
        softcap: if positive, logits become ``softcap * tanh(scale * q k^T / softcap)`` (Gemma 2).
        sinks: ``[H]``, one more logit for every row of a head, with a value of zero (gpt-oss). It counts in lse. All
            ranks must pass the same sinks; the gradient is that of this rank's rows.
        deterministic: asks for deterministic backward of what this rank computes as a server: dq has the same bits
            whatever the plan, and dk and dv are the same from run to run. ``torch.use_deterministic_algorithms`` asks
            for it everywhere, and the CPU always computes so. The argument concerns distca's CUDA kernels; where ATen's
            flash attention computes, only torch's own switch counts.
        layer: number or name of the calling layer. Errors of this call and of its backward begin with it.

    Returns:
        out ``[T, H, Dv]`` in q's dtype, and lse ``[T, H]`` float32, the natural log-sum-exp of each row's scaled
        logits. lse is not differentiable. Padding rows have out 0 and lse -inf.

    Raises:
        InvalidArgumentError, PlanFormatError, CapacityError: before anything moves. If all ranks raise one of these,
            the context goes on. If only some do, the others raise PeerLeftError and the context is poisoned.
        PlanMismatchError, PeerDiedError, PeerLeftError, PeerTimeoutError: the context is poisoned, and later calls
            raise ContextPoisonedError.
    """
    check_plans("core_attention", plan, plan_backward)
    check_tensors("core_attention", q, k, v, sinks)
    if torch.compiler.is_compiling():  # layers that differ in a constant would not share a graph
        layer = None
    else:
        check_rows("core_attention", q, plan)
        if plan.in_parts or in_half():
            asked: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "deterministic": deterministic}
            asked |= {"plan_backward": plan_backward, "context": context, "layer": layer}
            return core_attention_in_parts(q, k, v, plan, **asked)
    q, k, v = as_autocast(q, k, v)
    tables = plan.tensor, None if plan_backward is None else plan_backward.tensor
    options = {"scale": scale, "softcap": softcap, "deterministic": is_deterministic(deterministic)}
    sinks = None if sinks is None else sinks.float()
    with typed_errors(layer), _range_of("core_attention", context):
        if plan.retains:
            kept = retained_bytes(plan, plan_backward, q, k, v, sinks)
            out, lse, _ = torch.ops.distca.core_attention_retain(
                q, k, v, *tables, sinks, retained_bytes=kept, context=_name_of(context), **options
            )
        else:
            out, lse = torch.ops.distca.core_attention(q, k, v, *tables, sinks, context=_name_of(context), **options)
    if layer is not None:
        _note_caller(_name_of(context), layer)
        if out.grad_fn is not None:
            out.grad_fn.metadata[_LAYER] = layer
    return out, lse


@collective
def serve(
    plan: Plan,
    phase: str,
    *,
    context: str | Context = "default",
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
    layer: int | str | None = None,
) -> None:
    """Takes part in one step on a rank without rows of its own: a dedicated server or an idle pipeline stage.

    This is a collective step. It answers the call of `core_attention`, or the backward of that call, that the
    other ranks make. It needs no tensors and no autograd graph.

    Args:
        plan: the plan of the step. In it this rank has no rows (``plan.num_rows`` is 0) and retains nothing (its number
            in ``plan.retain_bytes`` is 0).
        phase: ``"forward"`` or ``"backward"``.
        context: the context or its name.
        scale, softcap, sinks: the same as on the other ranks.
        deterministic: as in `core_attention`, for what this rank computes.
        layer: number or name of the layer that is served, for error messages.

    Raises:
        InvalidArgumentError: the phase is another one, or this rank has rows.
        The errors of `core_attention` are raised too.
    """
    _check_serving("serve", phase, plan)
    name = _name_of(context)
    q, k, v, out, lse = _no_rows(plan, name)
    options: dict[str, Any] = {"context": name, "scale": scale, "softcap": softcap}
    options["deterministic"] = is_deterministic(deterministic)
    sinks = None if sinks is None else sinks.detach().float()
    operator = "core_attention" if phase == "forward" else "core_attention_backward"
    with typed_errors(layer), _range_of(operator, name):
        if phase == "forward":
            torch.ops.distca.core_attention_retain(q, k, v, plan.tensor, None, sinks, retained_bytes=0, **options)
        else:
            kept = _nothing_retained(plan, q)
            torch.ops.distca.core_attention_backward(
                out, q, k, v, out, lse, plan.tensor, sinks, retained=kept, **options
            )
    _note_caller(name, layer)


@collective
def serve_ping_pong(
    layers: Sequence[tuple[Plan, Plan]],
    phase: str,
    *,
    context: str | Context = "default",
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Sequence[torch.Tensor] | None = None,
    deterministic: bool = False,
) -> None:
    """Takes part in a whole forward or backward pass of `distca.PingPong`, as `serve` does in one step.

    It makes the same calls in the same order as the other ranks. It does not work with activation checkpointing, which
    adds forward steps to the backward pass; run the model with zero rows there.

    Args:
        layers: for each layer of the model, in order, the plans of the first and of the second half.
        phase: ``"forward"`` or ``"backward"``.
        context: the context or its name.
        scale, softcap: the same as on the other ranks.
        sinks: the sinks of each layer, if the model has sinks.
        deterministic: as in `core_attention`, for what this rank computes.

    Raises:
        The errors of `serve`.
    """
    for both in layers:
        for plan in both:
            _check_serving("serve_ping_pong", phase, plan)
    name, steps = _name_of(context), {}
    ops = torch.ops.distca
    options: dict[str, Any] = {"context": name, "scale": scale, "softcap": softcap}
    options["deterministic"] = is_deterministic(deterministic)
    suffix = "" if phase == "forward" else "_backward"
    for part, index, half in _calls_of_ping_pong(len(layers), phase):
        with typed_errors(index), _range_of(part + suffix, name):
            if part == "dispatch":
                plan = layers[index][half]
                q, k, v, out, lse = _no_rows(plan, name)
                own = None if sinks is None else sinks[index].detach().float()
                steps[index, half] = (
                    ops.dispatch(q, k, v, plan.tensor, None, own, **options)
                    if phase == "forward"
                    else ops.dispatch_backward(
                        out, q, k, v, out, lse, plan.tensor, own, retained=_nothing_retained(plan, q), **options
                    )
                )
                _note_caller(name, index, half)
            elif part == "attend":
                ops.attend(steps[index, half], context=name)
            else:
                (ops.collect if phase == "forward" else ops.collect_backward)(steps[index, half], context=name)


def _calls_of_ping_pong(num_layers: int, phase: str) -> list[tuple[str, int, int]]:
    """(part, layer, half) of each call, in order. Backward is the mirror image: dispatch and collect swap places."""
    calls = [("dispatch", 0, half) for half in range(2)]
    for layer in range(num_layers):
        calls += [("attend", layer, half) for half in range(2)]
        for half in range(2):
            calls.append(("collect", layer, half))
            if layer + 1 < num_layers:
                calls.append(("dispatch", layer + 1, half))
    if phase == "forward":
        return calls
    mirror = {"dispatch": "collect", "attend": "attend", "collect": "dispatch"}
    return [(mirror[part], layer, half) for part, layer, half in reversed(calls)]


def _check_serving(function: str, phase: str, plan: Plan) -> None:
    if phase not in ("forward", "backward"):
        raise InvalidArgumentError(f"{function}: phase = {phase!r}; 'forward' and 'backward' are allowed")
    if plan.num_rows:
        raise InvalidArgumentError(
            f"{function}: rank {plan.rank} has {plan.num_rows} rows in this plan; call core_attention"
        )
    if plan.retain_bytes[plan.rank]:
        raise InvalidArgumentError(
            f"{function}: the plan has retain_bytes = {plan.retain_bytes[plan.rank]} for rank {plan.rank}, which keeps "
            "nothing between forward and backward without an autograd graph: make the plan with retain_bytes=[...], 0 "
            "for this rank, or call core_attention with zero rows"
        )


def _no_rows(plan: Plan, context: str) -> tuple[torch.Tensor, ...]:
    """Empty q, k, v, out and lse, for a rank without rows."""
    heads, found = plan.heads, get_context(context)
    device = "cpu" if found is None else found.device  # the operator refuses an unknown context
    q, out = (torch.empty(0, heads.q, dim, dtype=heads.dtype, device=device) for dim in (heads.dim, heads.value_dim))
    k, v = (torch.empty(0, heads.kv, dim, dtype=heads.dtype, device=device) for dim in (heads.dim, heads.value_dim))
    return q, k, v, out, torch.empty(0, heads.q, device=device)


def _nothing_retained(plan: Plan, like: torch.Tensor) -> torch.Tensor | None:
    """What a rank that retains nothing passes to backward: an empty tensor if the plan retains anywhere, or None."""
    return like.new_empty(0, dtype=torch.uint8) if plan.retains else None


def _range_of(operator: str, context: str | Context) -> AbstractContextManager[object]:
    """An NVTX range for the operator if the context wants NVTX ranges; otherwise nothing."""
    if torch.compiler.is_compiling():
        return nullcontext()
    found = find_context(context)
    return operator_range(operator, found is not None and found.nsys)


def _name_of(context: str | Context) -> str:
    return context.name if isinstance(context, Context) else context


def _note_caller(context: str, layer: int | str | None, half: int | None = None) -> None:
    """Tells the trace which layer, and which half of ping-pong, began the last step."""
    here = get_context(context)
    if here is not None:
        here.note_caller(here.step, layer, half)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tasks: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    attention: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Core attention over tasks in this process's own tensors. It needs no context.

    The result is differentiable once, in q, k, v and sinks. On CUDA, which has not run on a GPU yet, dtypes are
    bfloat16 and float16. There ATen's flash attention computes by default; it requires Dv = D and has no softcap.
    ``attention="own"`` asks for distca's kernels for compute capability 9.0. Under
    ``torch.use_deterministic_algorithms`` their dq has the same bits whatever the tasks, and their dk and dv are the
    same from run to run.

    Args:
        q: ``[Tq, H, D]``, float32, bfloat16 or float16; the last dimension is contiguous.
        k: ``[Tk, Hkv, D]``, same dtype.
        v: ``[Tk, Hkv, Dv]``, same dtype.
        tasks: int64 CPU tensor ``[N, 4]`` with rows ``(q_begin, q_end, kv_begin, kv_end)``. A document starts at row
            ``kv_begin`` of the keys. The queries are its last ``q_end - q_begin`` rows before ``kv_end`` (causal,
            aligned at the end). The default is one causal document of all rows.
        sinks: ``[H]``, one more logit for every row of a head, with a value of zero (gpt-oss). It counts in lse.
        scale: factor on the logits; ``D ** -0.5`` by default.
        softcap: if positive, logits become ``softcap * tanh(scale * q k^T / softcap)`` (Gemma 2).
        attention: what computes on a GPU: ``"own"``, ``"flash"`` or ``"auto"``, as in `distca.init`.

    Returns:
        out ``[Tq, H, Dv]`` in q's dtype, and lse ``[Tq, H]`` float32, which is not differentiable. A row of no task has
        out 0 and lse -inf.

    Raises:
        InvalidArgumentError: an argument is wrong, or ``attention`` cannot compute these shapes on this device.
    """
    check_tensors("attention", q, k, v, sinks)
    if tasks is None:
        rows = [[0, q.shape[0], 0, k.shape[0]]] if q.shape[0] > 0 else []
        tasks = torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)
    if not isinstance(tasks, torch.Tensor):
        raise InvalidArgumentError(f"attention: tasks is a {type(tasks).__name__}; an int64 tensor [N, 4] is expected")
    with typed_errors():
        return torch.ops.distca.attention(
            q,
            k,
            v,
            tasks,
            None if sinks is None else sinks.float(),
            scale=scale,
            softcap=softcap,
            deterministic=is_deterministic(False),
            attention=attention,
        )


def _check_devices(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuses a mixture of devices. torch runs the fake kernels as soon as one input is a meta tensor."""
    if not q.device == k.device == v.device:
        raise InvalidArgumentError(f"q, k and v are on different devices: {q.device}, {k.device}, {v.device}")


def _fake_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    _check_devices(q, k, v)
    tokens, heads, _dim = q.shape
    return q.new_empty(tokens, heads, v.shape[2]), q.new_empty(tokens, heads, dtype=torch.float32)


def _fake_retain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *tables: Any, retained_bytes: int, **options: Any
) -> tuple[torch.Tensor, ...]:
    return (*_fake_forward(q, k, v, *tables, **options), q.new_empty(retained_bytes, dtype=torch.uint8))


def _fake_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, ...]:
    _check_devices(q, k, v)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    q, k, v, table, *optional, sinks = inputs
    out, lse, *retained = output
    table_backward = optional[0] if optional and optional[0] is not None else table
    ctx.save_for_backward(q, k, v, out, lse, table_backward, sinks, *retained)
    ctx.options = {name: value for name, value in keyword_only_inputs.items() if name != "retained_bytes"}
    ctx.num_inputs = len(inputs)
    ctx.set_materialize_grads(False)


def _backward(operator: Any, range_name: str) -> Any:
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        name = ctx.options.get("context", "")  # the context's name; an operator that is not collective has none
        with refusals_told(get_context(name)):
            return one_step(ctx, name, *grads)

    def one_step(
        ctx: Any, name: str, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: None
    ) -> tuple[Any, ...]:
        if dlse is not None:
            raise InvalidArgumentError("distca: lse is not differentiable; use lse.detach()")
        q, k, v, out, lse, table, sinks, *kept = ctx.saved_tensors
        retained = {"retained": kept[0]} if kept else {}
        if dout is None:  # the other ranks take part in this step all the same
            dout = torch.zeros_like(out)
        layer = ctx.metadata.get(_LAYER)
        with typed_errors(layer), _range_of(range_name, name):
            grads = operator(dout, q, k, v, out, lse, table, sinks, **ctx.options, **retained)
            dsinks = None
            if sinks is not None and ctx.needs_input_grad[ctx.num_inputs - 1]:
                dsinks = torch.ops.distca.sink_gradient(dout, out, lse, sinks)
        if layer is not None:
            _note_caller(name, layer)
        return (*grads, *[None] * (ctx.num_inputs - len(grads) - 1), dsinks)

    return backward


class _Library(torch.library.Library):
    """A library whose autograd kernels refuse forward mode. Without the check they would drop tangents silently."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: Any = "", **options: Any) -> None:
        def checked(keyset: Any, *inputs: Any, **named: Any) -> Any:
            refuse_forward_mode(f"distca::{op_name}", *inputs, *named.values())
            return fn(keyset, *inputs, **named)

        base: Any = super()
        base.impl(op_name, checked, dispatch_key, **options)


_make_library: Any = _Library
_library = _make_library("distca", "FRAGMENT")


def _register(*forwards: str, backward: str, collective: bool) -> None:
    """Registers fake kernels and autograd for forward operators that share one backward operator."""
    operator = getattr(torch.ops.distca, backward)
    torch.library.register_fake(f"distca::{backward}")(_fake_backward)
    _differentiate_once(backward)
    for forward in forwards:
        retains = forward == "core_attention_retain"
        torch.library.register_fake(f"distca::{forward}")(_fake_retain if retains else _fake_forward)
        torch.library.register_autograd(
            f"distca::{forward}", _backward(operator, backward), setup_context=_save_for_backward, lib=_library
        )
    if collective:  # compiled graphs then keep all calls and their order
        for name in (*forwards, backward):
            torch.library._register_effectful_op(f"distca::{name}", EffectType.ORDERED)


def _differentiate_once(name: str) -> None:
    """Registers an operator of backward for autograd, with a derivative that raises InvalidArgumentError."""
    operator = getattr(torch.ops.distca, name).default

    def kernel(keyset: Any, *inputs: Any, **options: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            results = operator.redispatch(keyset & torch._C._after_autograd_keyset, *inputs, **options)
        return without_derivative(f"distca::{name}", results, *inputs, *options.values())

    _library.impl(name, kernel, "Autograd", with_keyset=True)


def _fake_sink_gradient(dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    return sinks.new_empty(sinks.shape)


for _name in ("sink_gradient", "sink_gradient_by_aten"):
    torch.library.register_fake(f"distca::{_name}")(_fake_sink_gradient)
    _differentiate_once(_name)
_register("core_attention", "core_attention_retain", backward="core_attention_backward", collective=True)
_register("attention", backward="attention_backward", collective=False)
_register("attention_by_flash", backward="attention_by_flash_backward", collective=False)
