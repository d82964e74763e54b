"""Ranks without rows of their own take part in the steps of the others: `serve`, `serve_ping_pong`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distca.arguments import check_flag, check_type
from distca.caller import Caller
from distca.calls import Call, calls_of_pass, groups_of
from distca.context import Context, collective
from distca.errors import InvalidArgumentError
from distca.inputs import finder_of
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
    deterministic: bool = False,
    max_logits: bool = False,
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
        scale, softcap, max_logits: the same as on the other ranks.
        deterministic: as in `core_attention`, for what this rank computes.
        layer: number or name of the layer that is served, the same as on the other ranks where they give one.

    Raises:
        InvalidArgumentError: the phase is another one, or this rank has rows.
        DistcaError: as in `core_attention`.
    """
    _check_phase("serve", phase)
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "deterministic": deterministic}
    calls = [Call("core_attention", phase, 0)]
    serve_calls("serve", calls, [[plan]], [[layer]], context=context, max_logits=max_logits, **options)


@collective
def serve_ping_pong(
    layers: Sequence[tuple[Plan, Plan]],
    phase: str,
    *,
    recompute: str | Sequence[int] | None = None,
    context: str | Context = "default",
    scale: float | None = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    max_logits: bool = False,
) -> None:
    """Takes part in a whole forward or backward pass of `distca.PingPong`, as `serve` does in one step.

    It makes the same calls in the same order as the other ranks, recomputation included.

    Args:
        layers: for each layer of the model, in order, the plans of the first and of the second half.
        phase: ``"forward"`` or ``"backward"``.
        recompute: what activation checkpointing (``use_reentrant=False``) runs again in backward on the other ranks:
            None (no layer, or with `distca.save_core_attention` no attention), ``"layer"`` (each layer by itself),
            ``"stage"`` (all layers at once), or the sizes of the groups of layers that are run again together, in which
            a 0 stands for a layer that is not run again.
        context: the context or its name.
        scale, softcap, max_logits: the same as on the other ranks.
        deterministic: as in `core_attention`, for what this rank computes.

    Raises:
        InvalidArgumentError: `recompute` does not fit the layers; otherwise as in `serve`.
        DistcaError: as in `serve`.
    """
    _check_phase("serve_ping_pong", phase)
    groups = groups_of("serve_ping_pong", recompute, len(layers))
    calls = calls_of_pass(phase, len(layers), groups=groups, halves=True)
    names = [[number] * 2 for number in range(len(layers))]
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "deterministic": deterministic}
    # The model may number its layers otherwise.
    more: dict[str, Any] = {"context": context, "max_logits": max_logits, "compares": False}
    serve_calls("serve_ping_pong", calls, layers, names, **more, **options)


def serve_calls(
    function: str,
    calls: Sequence[Call],
    plans: Sequence[Sequence[Plan]],
    names: Sequence[Sequence[int | str | StepOfTick | None]],
    *,
    context: str | Context,
    max_logits: bool,
    compares: bool = True,
    **options: Any,
) -> None:
    """Makes these calls on a rank without rows of its own.

    Args:
        function: the name of the caller, for messages.
        calls: the calls, in order.
        plans: for each layer its plan, in a ping-pong that of each half.
        names: for each of these plans the layer, or the step of a tick.
        context: the context or its name.
        compares: whether ranks compare the names.
        max_logits: whether the other ranks ask for them in forward.
        options: ``scale``, ``softcap`` and ``deterministic``, all of them.

    Raises:
        DistcaError: as in `serve`.
    """
    check_flag(function, "max_logits", max_logits)
    for of_layer in plans:
        for plan in of_layer:
            _check_serving(function, plan)
    max_logits = max_logits or finder_of(context) is not None  # with a finder all ranks ask
    steps: dict[tuple[str, int, int | None], int] = {}  # those under way, by (phase, layer, half)
    for call in calls:
        part, phase, layer, half = call
        caller = Caller.of(context, names[layer][half or 0], half)
        suffix = "" if phase == "forward" else "_backward"
        with caller.calls(part + suffix, compares=compares):
            if call.begins_step:
                steps[call[1:]] = _begin(call, plans[layer][half or 0], caller, max_logits, options)
            elif part == "attend":
                torch.ops.distca.attend(steps[call[1:]], context=caller.context)
            else:
                getattr(torch.ops.distca, f"collect{suffix}")(steps.pop(call[1:]), context=caller.context)
        if call.begins_step:
            caller.note()


def _begin(call: Call, plan: Plan, caller: Caller, max_logits: bool, options: dict[str, Any]) -> Any:
    """Begins a step. Returns its number if it has parts."""
    ops, keywords = torch.ops.distca, caller.options(**options)
    q, k, v, out, lse = _no_rows(plan, caller.context)
    if call.phase == "backward":
        backward = ops.dispatch_backward if call.part == "dispatch" else ops.core_attention_backward
        return backward(out, q, k, v, out, lse, plan.tensor, retained=_nothing_retained(plan, q), **keywords)
    if call.part == "dispatch":
        return ops.dispatch(q, k, v, plan.tensor, max_logits=max_logits, **keywords)
    return ops.core_attention_all(q, k, v, plan.tensor, retained_bytes=0, max_logits=max_logits, **keywords)


def _check_phase(function: str, phase: str) -> None:
    if phase not in ("forward", "backward"):
        raise InvalidArgumentError(f"{function}: phase = {phase!r}; 'forward' and 'backward' are allowed")


def _check_serving(function: str, plan: Plan) -> None:
    check_type(function, "plan", plan, Plan, "distca.plan")
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
    return q, k, v, out, torch.empty(0, heads.q, dtype=torch.float32, device=device)


def _nothing_retained(plan: Plan, like: torch.Tensor) -> torch.Tensor | None:
    """What a rank that retains nothing passes to backward: an empty tensor if the plan retains anywhere, or None."""
    return like.new_empty(0, dtype=torch.uint8) if plan.retains else None
