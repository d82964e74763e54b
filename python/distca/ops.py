"""The operators with autograd: `core_attention` for a group of ranks, `attention` for one process."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType as EffectType

from distca.arguments import check_flag, is_whole
from distca.caller import Caller, forward_step_of, is_deterministic
from distca.context import Context, collective
from distca.errors import InvalidArgumentError, refusals_told, typed_errors
from distca.flops import register_formulas
from distca.inputs import (
    as_autocast,
    as_numbers,
    check_rows,
    check_sinks_done_again,
    check_tensors,
    finder_of,
    refuse_forward_mode,
    resolved,
    retained_bytes,
)
from distca.pingpong.turns import core_attention_in_parts, in_half
from distca.planner.plan import Plan
from distca.planner.plan_source import PlanSource, StepOfTick
from distca.registry import get_context
from distca.steps import without_derivative

_LAYER = "distca.layer"  # the key in a graph node's metadata under which backward finds the layer

torch.ops.load_library(str(files("distca") / "libdistca_torch.so"))


@collective
def core_attention(
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
) -> tuple[torch.Tensor, ...]:
    """Core attention of this rank's rows, ``softmax(scale * q k^T) v`` inside each document, computed by all ranks.

    This is a collective step. Every rank of the context makes the same calls in the same order, each with its own slice
    of the same plan. The same holds for backward. out and lse are differentiable once, in q, k, v and sinks: a second
    derivative and forward mode raise InvalidArgumentError. Where ATen's flash attention computes, so does a gradient of
    lse that is not zero.

    Under autocast, q, k and v are cast to its dtype, which must then be the plan's. In compiled code the errors below
    are ``RuntimeError("distca <Kind>: ...")``, without the layer.

    Args:
        q: ``[T, H, D]``, float32, bfloat16 or float16, on the context's device. The last dimension is contiguous; the
            other strides are free.
        k: ``[T, Hkv, D]``, same dtype and device.
        v: ``[T, Hkv, Dv]``, same dtype and device.
        plan: the plan of this step's layout; ``plan.rank`` is this rank.
        plan_backward: another plan for the backward pass, with the same layout and mask and without ``retain_bytes``.
            If both have labels, only this rank's rows must be the same.
        context: the context or its name.
        scale: factor on the logits; ``D ** -0.5`` by default.
        softcap: if positive, logits become ``softcap * tanh(scale * q k^T / softcap)`` (Gemma 2).
        sinks: ``[H]``, one more logit for every row of a head, with a value of zero (gpt-oss). It counts in lse. They
            are those of this rank's rows, and so is their gradient.
        deterministic: asks for deterministic backward of what this rank computes as a server: dq has the same bits
            whatever the plan, and dk and dv are the same from run to run. ``torch.use_deterministic_algorithms`` asks
            for it everywhere, and the CPU always computes so. The argument concerns distca's CUDA kernels; where ATen's
            flash attention computes, only torch's own switch counts.
        max_logits: also return the largest logits, which QK-Clip (MuonClip) needs; the same on all ranks. Where ATen's
            flash attention computes, that is an error.
        layer: number or name of the calling layer. Errors of this call and of its backward begin with it, and ranks
            compare it: another layer on a rank is a PlanMismatchError. A call without a layer, or in compiled code,
            goes with any, and so does a number with a name that does not begin with one.

    Returns:
        out ``[T, H, Dv]`` in q's dtype, and lse ``[T, H]`` float32, the natural log-sum-exp of each row's scaled
        logits. Padding rows have out 0 and lse -inf, and take no gradient. With ``max_logits`` also max_logits ``[H]``
        float32, not differentiable: for each head the largest logit, after scale and softcap, that a row of this rank
        sees; sinks do not count. It is -inf where the rank has no rows, NaN where a row's logits are no numbers, and
        has the same bits whatever the plan. ``torch.distributed.all_reduce`` with ``MAX`` over the ranks that have the
        same layer and heads, and other rows, gives that of the batch. Do not compute with it inside of a layer that
        `save_core_attention` checkpoints.

    Raises:
        InvalidArgumentError, PlanFormatError, CapacityError: before anything moves. If all ranks raise one of these,
            the context goes on. If only some do, the others raise PeerLeftError and the context is poisoned.
        PlanMismatchError, PeerDiedError, PeerLeftError, PeerTimeoutError: the context is poisoned, and later calls
            raise ContextPoisonedError.
    """
    call = resolved("core_attention", plan, plan_backward, layer)
    plan, plan_backward, layer, layer_backward = call
    check_tensors("core_attention", q, k, v, sinks)
    check_flag("core_attention", "max_logits", max_logits)
    check_flag("core_attention", "deterministic", deterministic)
    if torch.compiler.is_compiling():  # layers that differ in a constant would not share a graph
        layer = layer_backward = None
    else:
        check_rows("core_attention", q, plan)
        scale, softcap = as_numbers(scale, softcap)
    if plan.in_parts or in_half():
        asked: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "deterministic": deterministic}
        return core_attention_in_parts(q, k, v, call, context=context, max_logits=max_logits, **asked)
    finder = finder_of(context)
    finds = max_logits or finder is not None
    q, k, v = as_autocast(q, k, v, context)
    tables = plan.tensor, None if plan_backward is None else plan_backward.tensor
    caller = Caller.of(context, layer)
    options = caller.options(scale, softcap, deterministic)
    sinks = None if sinks is None else sinks.float().contiguous()
    with caller.calls("core_attention"):
        if plan.retains or finds:
            kept = retained_bytes(plan, plan_backward, q, k, v, sinks) if plan.retains else 0
            out, lse, _, largest = torch.ops.distca.core_attention_all(
                q, k, v, *tables, sinks, retained_bytes=kept, max_logits=finds, **options
            )
        else:
            out, lse = torch.ops.distca.core_attention(q, k, v, *tables, sinks, **options)
    caller.note()
    if layer_backward is not None and out.grad_fn is not None:
        out.grad_fn.metadata[_LAYER] = layer_backward
    if finder is not None:
        finder.take(layer, largest)
    return (out, lse, largest) if max_logits else (out, lse)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tasks: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    *,
    mask: str = "causal",
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    attention: str | None = None,
    max_logits: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Core attention over tasks in this process's own tensors. It needs no context.

    out and lse are differentiable once, in q, k, v and sinks. On CUDA dtypes are bfloat16 and float16. On compute
    capability 9.0 distca's own kernels compute by default. Under ``torch.use_deterministic_algorithms`` their dq has
    the same bits whatever the tasks, and their dk and dv are the same from run to run. On other GPUs, where these have
    not yet run, and with ``attention="flash"``, ATen's flash attention computes, unless ``attention="own"`` is given.
    It requires Dv = D, has no softcap and takes no gradient of lse. Under autocast, q, k and v are cast to its dtype.

    Args:
        q: ``[Tq, H, D]``, float32, bfloat16 or float16; the last dimension is contiguous.
        k: ``[Tk, Hkv, D]``, same dtype.
        v: ``[Tk, Hkv, Dv]``, same dtype.
        tasks: int64 CPU tensor ``[N, 4]`` with rows ``(q_begin, q_end, kv_begin, kv_end)``. A document starts at row
            ``kv_begin`` of the keys. With a causal mask the queries are its last ``q_end - q_begin`` rows before
            ``kv_end``, aligned at the end. With the full mask they see all keys ``[kv_begin, kv_end)``, which are the
            same ones for all tasks of a document, whose queries may be fewer or more (cross attention). With the full
            mask and a window a document has one task, and its queries are aligned at the end. The default is one
            document of all rows.
        sinks: ``[H]``, one more logit for every row of a head, with a value of zero (gpt-oss). It counts in lse.
        mask: ``"causal"`` or ``"full"``.
        window: a row sees keys that are less than ``window`` rows away: its own, the ``window - 1`` before it and,
            with the full mask, the ``window - 1`` after it.
        scale: factor on the logits; ``D ** -0.5`` by default.
        softcap: if positive, logits become ``softcap * tanh(scale * q k^T / softcap)`` (Gemma 2).
        attention: what computes on a GPU: ``"own"``, ``"flash"`` or ``"auto"``, as in `distca.init`.
        max_logits: also return the largest logits, which QK-Clip (MuonClip) needs. ATen's flash attention has none.

    Returns:
        out ``[Tq, H, Dv]`` in q's dtype, and lse ``[Tq, H]`` float32, the natural log-sum-exp of each row's scaled
        logits. A row of no task has out 0 and lse -inf, and takes no gradient. With ``max_logits`` also max_logits
        ``[H]``, as `core_attention` returns it for its rows, of the rows that have a task.

    Raises:
        InvalidArgumentError: an argument is wrong, or ``attention`` cannot compute these shapes on this device.
    """
    check_tensors("attention", q, k, v, sinks)
    q, k, v = as_autocast(q, k, v)
    check_flag("attention", "max_logits", max_logits)
    if not (isinstance(mask, str) and mask in ("causal", "full")):
        raise InvalidArgumentError(f'attention: mask = {mask!r}; "causal" and "full" are allowed')
    if not torch.compiler.is_compiling():  # a number may be symbolic there
        scale, softcap = as_numbers(scale, softcap)
        if not (window is None or is_whole(window, 1)):
            raise InvalidArgumentError(f"attention: window = {window!r}; a positive number of keys or None is expected")
        if tasks is None and (mask == "causal" or window is not None) and q.shape[0] > k.shape[0]:
            raise InvalidArgumentError(
                f"attention: q has {q.shape[0]} rows and k {k.shape[0]}; without tasks they are one document, which "
                "has no more queries than keys under a causal mask or a window"
            )
    if tasks is None:
        rows = [[0, q.shape[0], 0, k.shape[0]]] if q.shape[0] > 0 else []
        tasks = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, 4)
    if not isinstance(tasks, torch.Tensor):
        raise InvalidArgumentError(f"attention: tasks is a {type(tasks).__name__}; an int64 tensor [N, 4] is expected")
    operator = torch.ops.distca.attention_all if max_logits else torch.ops.distca.attention
    with typed_errors():
        return operator(
            q,
            k,
            v,
            tasks,
            None if sinks is None else sinks.float().contiguous(),
            scale=scale,
            softcap=softcap,
            deterministic=is_deterministic(False),
            attention=attention,
            mask=mask,
            window=window,
        )


def _check_devices(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor | None) -> None:
    """Refuses a mixture of devices. torch runs the fake kernels as soon as one input is a meta tensor."""
    if not q.device == k.device == v.device:
        raise InvalidArgumentError(f"q, k and v are on different devices: {q.device}, {k.device}, {v.device}")
    if not q.is_meta and any(t is not None and t.is_meta for t in others):
        raise InvalidArgumentError(f"q, k and v are on {q.device}; another input is on meta, which has no data")


def _fake_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor | None, **_: Any
) -> tuple[torch.Tensor, ...]:
    _check_devices(q, k, v, *others)
    tokens, heads, _dim = q.shape
    return q.new_empty(tokens, heads, v.shape[2]), q.new_empty(tokens, heads, dtype=torch.float32)


def _fake_core_attention_all(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *tables: Any,
    retained_bytes: int,
    max_logits: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    retained = q.new_empty(retained_bytes, dtype=torch.uint8)
    largest = q.new_empty(q.shape[1] if max_logits else 0, dtype=torch.float32)
    return (*_fake_forward(q, k, v, *tables, **options), retained, largest)


def _fake_attention_all(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any, **options: Any
) -> tuple[torch.Tensor, ...]:
    return (*_fake_forward(q, k, v, *others, **options), q.new_empty(q.shape[1], dtype=torch.float32))


def _fake_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *others: torch.Tensor | None,
    dlse: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    _check_devices(q, k, v, *others, dlse)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any) -> None:
    q, k, v, table, *optional, sinks = inputs
    out, lse, *others = output
    # Of others that the operator returns, the last one is max_logits, and what is before it is retained for backward.
    retained = others[:-1]
    ctx.mark_non_differentiable(*others)
    table_backward = optional[0] if optional and optional[0] is not None else table
    ctx.save_for_backward(q, k, v, out, lse, table_backward, sinks, *retained)
    ctx.options = {
        name: value for name, value in keyword_only_inputs.items() if name not in ("retained_bytes", "max_logits")
    }
    ctx.num_inputs = len(inputs)
    ctx.forward_step = forward_step_of(get_context(ctx.options.get("context", "")))
    ctx.set_materialize_grads(False)


def _backward(operator: Any, range_name: str) -> Any:
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        name = ctx.options.get("context", "")  # the context's name; an operator that is not collective has none
        with refusals_told(get_context(name)):
            return one_step(ctx, name, *grads)

    def one_step(
        ctx: Any, name: str, dout: torch.Tensor | None, dlse: torch.Tensor | None, *_: None
    ) -> tuple[Any, ...]:
        q, k, v, out, lse, table, sinks, *kept = ctx.saved_tensors
        retained = {"retained": kept[0]} if kept else {}
        if dout is None:  # the other ranks take part in this step all the same
            dout = torch.zeros_like(out)
        caller = Caller(name, ctx.metadata.get(_LAYER))
        has_dsinks = sinks is not None and ctx.needs_input_grad[ctx.num_inputs - 1]
        if has_dsinks:
            check_sinks_done_again(name)
        with caller.calls(range_name, forward_step=ctx.forward_step):
            grads = operator(dout, q, k, v, out, lse, table, sinks, **ctx.options, **retained, dlse=dlse)
            dsinks = None
            if has_dsinks:
                dsinks = torch.ops.distca.sink_gradient(dout, out, lse, sinks, dlse)
        caller.note()
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
    fakes = {"core_attention_all": _fake_core_attention_all, "attention_all": _fake_attention_all}
    for forward in forwards:
        torch.library.register_fake(f"distca::{forward}")(fakes.get(forward, _fake_forward))
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


def _fake_sink_gradient(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, dlse: torch.Tensor | None = None
) -> torch.Tensor:
    return sinks.new_empty(sinks.shape)


for _name in ("sink_gradient", "sink_gradient_by_aten"):
    torch.library.register_fake(f"distca::{_name}")(_fake_sink_gradient)
    _differentiate_once(_name)
_register("core_attention", "core_attention_all", backward="core_attention_backward", collective=True)
_register("attention", "attention_all", backward="attention_backward", collective=False)
_register("attention_by_flash", backward="attention_by_flash_backward", collective=False)
register_formulas()
