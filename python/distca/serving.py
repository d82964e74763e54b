"""Ranks without rows of their own take part in the steps of the others: `serve`, `serve_ping_pong`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distca.caller import Caller
from distca.context import Context, collective
from distca.errors import InvalidArgumentError
from distca.planner.plan import Plan
from distca.planner.plan_source import StepOfTick
from distca.registry import get_context


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
    layer: int | str | StepOfTick | None = None,
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
        layer: number or name of the layer that is served, the same as on the other ranks where they give one.

    Raises:
        InvalidArgumentError: the phase is another one, or this rank has rows.
        DistcaError: as in `core_attention`.
    """
    _check_serving("serve", phase, plan)
    caller = Caller.of(context, layer)
    q, k, v, out, lse = _no_rows(plan, caller.context)
    options = caller.options(scale, softcap, deterministic)
    sinks = None if sinks is None else sinks.detach().float()
    with caller.calls("core_attention" if phase == "forward" else "core_attention_backward"):
        if phase == "forward":
            torch.ops.distca.core_attention_retain(q, k, v, plan.tensor, None, sinks, retained_bytes=0, **options)
        else:
            kept = _nothing_retained(plan, q)
            torch.ops.distca.core_attention_backward(
                out, q, k, v, out, lse, plan.tensor, sinks, retained=kept, **options
            )
    caller.note()


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
        DistcaError: as in `serve`.
    """
    for both in layers:
        for plan in both:
            _check_serving("serve_ping_pong", phase, plan)
    ops, steps = torch.ops.distca, {}
    suffix = "" if phase == "forward" else "_backward"
    for part, index, half in _calls_of_ping_pong(len(layers), phase):
        caller = Caller.of(context, index, half)
        name = caller.context
        with caller.calls(part + suffix, compares=False):  # the model may number its layers otherwise
            if part == "dispatch":
                options = caller.options(scale, softcap, deterministic)
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
                caller.note()
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
