"""Ping-pong: two halves of a micro-batch go through one model; one computes while the other's rows travel.

Two forward passes of an unmodified model (greenlets) take turns inside core attention: after a step is dispatched, and
after its results are on their way home. In backward autograd mirrors the order of their nodes.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from distca.errors import InvalidArgumentError
from distca.inputs import in_compiled_code
from distca.pingpong.thread_state import ThreadState
from distca.pingpong.turns import here, in_half
from distca.planner.plan import Plan, Plans
from distca.planner.plan_source import PlanSource
from distca.steps import Step

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_FSDP_SINCE = (2, 13)


class _Half:
    """One half's forward pass, which gives the turn back when it pauses."""

    def __init__(self, greenlet: Any, run: Callable[..., Any], number: int, call: Any, state: ThreadState) -> None:
        plans = Plan | Plans | PlanSource
        self._call = tree_map(lambda leaf: leaf.for_parts(number) if isinstance(leaf, plans) else leaf, call)
        self._function = run
        self._greenlet = greenlet.greenlet(self._run)
        self._greenlet.gr_context = contextvars.copy_context()
        self._step: Step | None = None
        self._inference = torch.is_inference_mode_enabled()
        self.calls = 0
        self.state = state
        self.result: Any = None

    def _run(self) -> None:
        call = self._call
        self.result = self._function(**call) if isinstance(call, Mapping) else self._function(*call)
        for leaf in tree_leaves(call):
            if isinstance(leaf, PlanSource):
                leaf.check_half_over()
        self.state = ThreadState.now()

    @property
    def over(self) -> bool:
        return self._greenlet.dead

    def pause(self, step: Step) -> None:
        """Gives the turn to the other half. Called in this half."""
        self._step = step
        if torch.is_inference_mode_enabled() != self._inference:
            raise InvalidArgumentError(
                "ping-pong: a layer calls core_attention inside torch.inference_mode() of its own, which torch cannot "
                "switch; enter it around both halves, or use torch.no_grad()"
            )
        self.state = ThreadState.now()
        self._greenlet.parent.switch()

    def resume(self, outer: ThreadState) -> None:
        """Gives this half the turn until it pauses or ends. Called outside of both halves."""
        self._enter(outer)
        try:
            self._greenlet.switch()
        finally:
            here.half = None

    def cancel(self, outer: ThreadState, why: str) -> None:
        """Ends the half where it pauses. It leaves the contexts that it is in, and its step is abandoned."""
        if self._step is not None:
            self._step.abandon(why)
        if self._greenlet:
            self._enter(outer)
            try:
                # What it raises on its way out only follows from the error that ends both halves.
                with contextlib.suppress(Exception):
                    self._greenlet.throw()
            finally:
                here.half = None

    def _enter(self, outer: ThreadState) -> None:
        self.state.switch_to(outer)
        here.half = self


def greenlet_module() -> Any:
    """The package greenlet. Raises an ImportError that says what to install."""
    try:
        import greenlet
    except ImportError as error:
        raise ImportError("distca.PingPong needs the package greenlet: pip install greenlet") from error
    return greenlet


def run_halves(run: Callable[..., Any], first: Any, second: Any) -> tuple[Any, Any]:
    """Runs `run` on both arguments in turns and returns both results.

    Args:
        run: the forward function.
        first, second: each the keyword arguments (a mapping) or the positional arguments (a sequence) of `run`.
    """
    if in_half():
        raise InvalidArgumentError("ping-pong: a half calls another PingPong; use one around the whole model")
    outer = ThreadState.now()
    states = outer, dataclasses.replace(outer, random=outer.random.other())
    greenlet = greenlet_module()
    halves = [_Half(greenlet, run, i, call, states[i]) for i, call in enumerate((first, second))]
    try:
        while not all(half.over for half in halves):
            for half in halves:
                if not half.over:
                    half.resume(outer)
    except BaseException as error:
        for half in halves:
            half.cancel(outer, f"{type(error).__name__}: {error}")
        raise
    finally:
        outer.random = halves[0].state.random.advanced()
        outer.restore()
    return halves[0].result, halves[1].result


class PingPong(torch.nn.Module):
    """Runs a model on two halves of a micro-batch in turns: one computes while the other's rows travel.

    ``first, second = PingPong(model)({"x": xa, "plan": plan_a}, {"x": xb, "plan": plan_b})`` returns what
    ``model(**half)`` returns for each half, to the bit. One backward of the sum of both losses into empty gradients
    gives the same bits too. The exception is a weight that a forward pass uses twice: its gradient's parts are added in
    another order, so it is equal up to rounding. The model itself stays unmodified. It calls `distca.core_attention`,
    directly or through the Hugging Face integration.

    All ranks call it alike; a half without rows passes zero rows. `distca.halves` cuts a layout into balanced halves.
    Contexts that the model enters (autocast, activation checkpointing, no_grad) hold for their own half. The first half
    draws the random numbers that it would draw alone. The second half draws from a generator that is seeded by the
    first's, anew in every call.

    DDP goes around it (``DistributedDataParallel(PingPong(model))``). FSDP2's ``fully_shard`` is applied to layers, and
    to the model or to this module. With FSDP2 (torch >= 2.13) a layer's weights must stay until both halves have left
    the layer. Therefore this module sets ``reshard_after_forward=False``; `unsharded_bytes` says what that costs.
    FSDP1 and DeepSpeed's ZeRO-3 would free them, and are refused.

    The model, or layers of it, may be compiled. torch.compile then breaks its graphs at core attention, because a graph
    cannot give the turn away; ``fullgraph=True`` is therefore an error of torch. This module itself is not compiled.

    Args:
        model: any module, on one device.

    Attributes:
        unsharded_bytes: bytes of weights that stay whole on this rank from forward to backward because of ping-pong. It
            is known after the first forward, and 0 without FSDP2.

    Raises:
        ImportError: the package greenlet is missing.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        greenlet_module()
        self._checked = False
        #: Bytes of weights that stay whole on this rank because of ping-pong, known after the first forward.
        self.unsharded_bytes = 0

    def forward(self, first: Mapping[str, Any] | Sequence[Any], second: Mapping[str, Any] | Sequence[Any]) -> Any:
        """Runs both halves, each the model's keyword arguments (a mapping) or positional arguments (a sequence).

        Returns:
            What the model returns for the first half, and for the second.

        Raises:
            InvalidArgumentError: something in the model rules ping-pong out. The message says what to do instead.
            Exception: the model's own errors, as they are. Steps under way are then abandoned, on all ranks.
        """
        self._check()
        return run_halves(self.model, first, second)

    def _check(self) -> None:
        """Refuses models that cannot take turns. It runs at the first forward, when all wrappers are in place."""
        refuse_compiled("PingPong is")
        if not self._checked:
            self.unsharded_bytes = prepare(self.model)
            self._checked = True


def refuse_compiled(what: str) -> None:
    """Raises InvalidArgumentError in compiled code."""
    if in_compiled_code():
        raise InvalidArgumentError(_COMPILED.format(what))


def prepare(model: torch.nn.Module) -> int:
    """Refuses models that cannot take turns, and makes FSDP2 keep weights. Returns the bytes of the kept weights."""
    # Importing these takes half a second, which `import distca` should not.
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    for name, module in model.named_modules():
        what = f"{name or 'the model'} ({type(module).__name__}) is"
        if isinstance(module, DistributedDataParallel):
            raise InvalidArgumentError(
                f"ping-pong: {what} inside; a gradient would be reduced before both halves have added to it: wrap "
                "PingPong in it, DistributedDataParallel(PingPong(model))"
            )
        if isinstance(module, FSDPModule):
            _keep_weights(module)
        zero_3 = any(hasattr(weight, "ds_status") for weight in module.parameters(recurse=False))  # DeepSpeed's mark
        if zero_3 or isinstance(module, FullyShardedDataParallel):
            raise InvalidArgumentError(
                f"ping-pong: the weights of {what.removesuffix(' is')} are sharded by "
                f"{'ZeRO-3 of DeepSpeed' if zero_3 else 'FSDP1'}, which frees them when one half has left the module, "
                "while the other may still need them: use FSDP2 (fully_shard) or ZeRO-2, or leave out ping-pong"
            )
    return sum(p.numel() * p.element_size() for p in model.parameters() if isinstance(p, DTensor))


_COMPILED = (
    "ping-pong: {} called in compiled code, and no graph can hold two forward passes that take turns; compile what is "
    "inside of it, such as the layers: for layer in model.layers: layer.compile()"
)


def _keep_weights(module: FSDPModule) -> None:
    """Makes FSDP2 keep the module's weights: the half that leaves it first must not free the weights of the other."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _FSDP_SINCE:
        raise InvalidArgumentError(
            f"ping-pong: FSDP2 of torch {torch.__version__} frees a layer's weights in backward when the second half "
            f"has left it and the first needs them; torch {'.'.join(map(str, _FSDP_SINCE))} or later is needed"
        )
    module.set_reshard_after_forward(False, recurse=False)
