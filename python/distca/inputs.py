"""What the functions of core attention do with their inputs before anything moves: checks, autocast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
from torch.autograd import forward_ad

from distca.errors import InvalidArgumentError
from distca.heads import DTYPE_NUMBERS
from distca.planner.plan import Plan
from distca.planner.plan_source import PlanSource, Resolved, StepOfTick
from distca.registry import find_context

if TYPE_CHECKING:
    from distca.context import Context
    from distca.max_logits import MaxLogits

_DEVICES = ("cpu", "cuda")  # other devices (meta) may lack autocast; torch 2.10 cannot compile the question


def resolved(function: str, plan: Any, plan_backward: Any, layer: int | str | StepOfTick | None) -> Resolved:
    """The plans of a call that begins now, and its layer.

    Raises:
        InvalidArgumentError: these are no plans; `plan` is a PlanSource in compiled code or beside a `plan_backward`.
    """
    if isinstance(plan, PlanSource):
        source = type(plan).__name__
        if plan_backward is not None:
            raise InvalidArgumentError(f"{function}: {source} gives the plan of backward; leave out plan_backward")
        if in_compiled_code():
            raise InvalidArgumentError(
                f"{function}: {source} in compiled code, which would keep the plan of its first call; leave out "
                "torch.compile, or let it end before attention"
            )
        return plan.resolve(layer.layer if isinstance(layer, StepOfTick) else layer)
    for name, value in (("plan", plan), ("plan_backward", plan_backward)):
        if not isinstance(value, Plan) and not (name == "plan_backward" and value is None):
            raise InvalidArgumentError(f"{function}: {name} is a {type(value).__name__}; a distca.Plan is expected")
    return Resolved(plan, plan_backward, layer, layer)


def check_tensors(function: str, q: Any, k: Any, v: Any, sinks: Any) -> None:
    """Raises InvalidArgumentError unless these are tensors that backward can keep, of three dimensions but for sinks,
    which may be None.
    """
    for name, value in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        if not isinstance(value, torch.Tensor) and not (name == "sinks" and value is None):
            raise InvalidArgumentError(f"{function}: {name} is a {type(value).__name__}; a torch.Tensor is expected")
        if hasattr(value, "device_mesh"):
            raise InvalidArgumentError(
                f"{function}: {name} is a DTensor; pass this rank's part of it, {name}.to_local()"
            )
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            raise InvalidArgumentError(f"{function}: {name} is sparse; pass a dense tensor, {name}.to_dense()")
    if sinks is not None and sinks.is_complex():
        raise InvalidArgumentError(f"{function}: sinks has dtype {sinks.dtype}; real numbers are expected")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 3:
            raise InvalidArgumentError(
                f"{function}: {name} has shape {list(tensor.shape)}; [tokens, heads, dim] is expected, all documents "
                "of the rank one after another"
            )
    if not torch.compiler.is_compiling():
        _check_kept(function, q, k, v, sinks)


def _check_kept(function: str, *inputs: torch.Tensor | None) -> None:
    """Raises InvalidArgumentError if backward would keep a tensor of inference mode. PyTorch says so after the step."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        for name, t in zip(("q", "k", "v", "sinks"), inputs, strict=True):
            if t is not None and t.is_inference():
                raise InvalidArgumentError(
                    f"{function}: {name} was made in torch.inference_mode, and backward cannot keep it; pass "
                    f"{name}.clone()"
                )


def check_rows(function: str, q: torch.Tensor, plan: Plan) -> None:
    """Raises InvalidArgumentError if q's heads come before its tokens, as in PyTorch's own attention."""
    if q.shape[0] != plan.num_rows == q.shape[1]:
        raise InvalidArgumentError(
            f"{function}: q has shape {list(q.shape)}, and the plan {plan.num_rows} tokens on this rank; [tokens, "
            "heads, dim] is expected: transpose(0, 1)"
        )


def dtype_under_autocast(t: torch.Tensor) -> torch.dtype:
    """The dtype of what attention computes with: autocast's, if it is on, and otherwise that of the tensor."""
    device = t.device.type
    return torch.get_autocast_dtype(device) if device in _DEVICES and torch.is_autocast_enabled(device) else t.dtype


def as_autocast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: str | Context = ""
) -> tuple[torch.Tensor, ...]:
    """q, k and v in autocast's dtype if autocast is on, and otherwise as they are. Checks the dtype that they have.

    Raises:
        InvalidArgumentError: attention lacks a dtype, or a replay of `context` would not cast again.
    """
    device = q.device.type
    if device in _DEVICES and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        for name, t in (("q", q), ("k", k), ("v", v)):
            if t.dtype != dtype:
                check_done_again(context, f"autocast casts {name}", f"pass {name} in {dtype}")
        return tuple(t.to(dtype) for t in (q, k, v))
    check_dtypes(q, k, v)
    return q, k, v


def check_done_again(context: str | Context, what: str, instead: str) -> None:
    """Raises InvalidArgumentError if a recording of the context is open and its replays would not do again `what` is
    done besides the steps: only those of a captured CUDA graph do. Compiled code does not look.
    """
    here = None if torch.compiler.is_compiling() else find_context(context)
    if here is None or not here._is_recording:
        return
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        raise InvalidArgumentError(
            f"record: {what}, which a replay would not do again; {instead}, or capture a CUDA graph"
        )


def check_sinks_done_again(context: str) -> None:
    """Does what `check_done_again` does for the gradient of sinks, which is no part of a step."""
    check_done_again(context, "backward computes the gradient of sinks", "record it with sinks.detach()")


def check_dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raises InvalidArgumentError for a dtype that attention lacks. The core knows dtypes by their numbers only."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in DTYPE_NUMBERS:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise InvalidArgumentError(f"{name} has dtype {dtype}; float32, bfloat16 and float16 are supported")


def as_numbers(scale: Any, softcap: Any) -> tuple[float | None, float]:
    """Scale, which may be None, and softcap as Python's floats, which nobody changes between forward and backward.

    Raises:
        InvalidArgumentError: one of them is not a number, or it is a tensor that needs a gradient.
    """
    return None if scale is None else _as_number("scale", scale), _as_number("softcap", softcap)


def _as_number(name: str, value: Any) -> float:
    if isinstance(value, float):  # first, because to ask a protocol takes microseconds, in every call
        return value
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            advice = "; multiply q by it, and pass scale=1.0" if name == "scale" else ""
            raise InvalidArgumentError(f"{name} is a tensor that needs a gradient, and would get none{advice}")
        if value.numel() != 1:
            raise InvalidArgumentError(f"{name} has shape {list(value.shape)}; a number is expected")
    if not isinstance(value, SupportsFloat):
        raise InvalidArgumentError(f"{name} = {value!r}; a number is expected")
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgumentError(f"{name} is too large for a floating-point number") from None


def finder_of(context: str | Context) -> MaxLogits | None:
    """What finds the largest logits of the step that begins now; None if nobody asks. Compiled code does not look."""
    here = None if torch.compiler.is_compiling() else find_context(context)
    return None if here is None else here._finder


def retained_bytes(plan: Plan, plan_backward: Plan | None, *inputs: torch.Tensor | None) -> int:
    """Bytes of a step that this rank retains for its backward; 0 if no backward will ask for them."""
    wanted = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    return plan.retained_bytes if wanted and (plan_backward is None or plan_backward.retains) else 0


def in_compiled_code() -> bool:
    """Whether torch.compile is tracing this call, or runs it between graphs because it could not trace it."""
    if torch.compiler.is_compiling():
        return True
    callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
    return callback is not None and callback is not False


def refuse_forward_mode(name: str, *inputs: Any) -> None:
    """Raises InvalidArgumentError if an input has a tangent (`torch.func.jvp`, `torch.autograd.forward_ad`)."""
    if forward_ad._current_level < 0:
        return
    for t in inputs:
        if isinstance(t, torch.Tensor) and forward_ad.unpack_dual(t).tangent is not None:
            raise InvalidArgumentError(
                f"{name} has no forward-mode derivative: an input has a tangent; use backward or torch.autograd.grad"
            )
