"""Ping-pong: two halves of a micro-batch through one model, so that one computes while the other's rows travel.

Two cooperating forward passes (greenlets) of an unmodified model take turns inside core attention: after a step is
dispatched, and after its results are on their way home. Autograd mirrors the order of their nodes in backward.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from distca.errors import InvalidArgumentError
from distca.pingpong.thread_state import ThreadState
from distca.pingpong.turns import here, in_half
from distca.planner.plan import Plan, Plans
from distca.steps import Step, in_compiled_code

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_FSDP_SINCE = (2, 13)


class _Half:
    """One forward pass, which gives the turn back where it pauses."""

    def __init__(self, greenlet: Any, run: Callable[..., Any], number: int, call: Any, state: ThreadState) -> None:
        self._call = tree_map(lambda leaf: leaf.for_parts(number) if isinstance(leaf, Plan | Plans) else leaf, call)
        self._function = run
        self._greenlet = greenlet.greenlet(self._run)
        self._greenlet.gr_context = contextvars.copy_context()
        self._step: Step | None = None
        self._inference = torch.is_inference_mode_enabled()
        self.state = state
        self.result: Any = None

    def _run(self) -> None:
        call = self._call
        self.result = self._function(**call) if isinstance(call, Mapping) else self._function(*call)
        self.state = ThreadState.now()

    @property
    def over(self) -> bool:
        return self._greenlet.dead

    def pause(self, step: Step) -> None:
        """Called in this half: the other one takes its turn."""
        self._step = step
        if torch.is_inference_mode_enabled() != self._inference:
            raise InvalidArgumentError(
                "ping-pong: a layer calls core_attention inside torch.inference_mode() of its own, which torch cannot "
                "switch; enter it around both halves, or use torch.no_grad()"
            )
        self.state = ThreadState.now()
        self._greenlet.parent.switch()

    def resume(self, outer: ThreadState) -> None:
        """Called outside: goes on until it pauses or ends."""
        self._enter(outer)
        try:
            self._greenlet.switch()
        finally:
            here.half = None

    def cancel(self, outer: ThreadState, why: str) -> None:
        """Ends it where it pauses, so that the contexts that it is in are left; its step is abandoned."""
        if self._step is not None:
            self._step.abandon(why)
        if self._greenlet:
            self._enter(outer)
            try:
                # What it raises on its way out follows from the error that ends both.
                with contextlib.suppress(Exception):
                    self._greenlet.throw()
            finally:
                here.half = None

    def _enter(self, outer: ThreadState) -> None:
        self.state.switch_to(outer)
        here.half = self


def greenlet_module() -> Any:
    """The package greenlet, or an ImportError that says what to install."""
    try:
        import greenlet
    except ImportError as error:
        raise ImportError("distca.PingPong needs the package greenlet: pip install greenlet") from error
    return greenlet


def run_halves(run: Callable[..., Any], first: Any, second: Any) -> tuple[Any, Any]:
    """What `run` returns for each, both going on in turns: keyword arguments (a mapping) or positional ones."""
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
        outer.random = halves[0].state.random
        outer.restore()
    return halves[0].result, halves[1].result


class PingPong(torch.nn.Module):
    """Runs a model on two halves of a micro-batch at once: one computes while the other's rows travel.

    ``first, second = PingPong(model)({"x": xa, "plan": plan_a}, {"x": xb, "plan": plan_b})`` returns what
    ``model(**half)`` returns for each, to the bit; so does one backward of the sum of both losses into empty gradients
    (those of weights used twice in a forward pass to rounding, for their parts are added in another order). The model
    itself stays as it is; it calls `distca.core_attention`, directly or through the Hugging Face integration.

    All ranks call it alike; a half without rows passes zero rows. `distca.halves` cuts a layout into balanced halves.
    Contexts that the model enters (autocast, activation checkpointing, no_grad) hold for its own half. Random numbers
    of the first half are those without ping-pong; the second half draws from a generator seeded by the first's.

    DDP and FSDP2 go around it (``DistributedDataParallel(PingPong(model))``; ``fully_shard`` of layers, and of the
    model or of this). With FSDP2 (torch >= 2.13) a layer's weights must stay until both halves have left it, so this
    sets ``reshard_after_forward=False``; `unsharded_bytes` says what that costs. torch.compile is refused: compiled
    code cannot give the turn away.

    Args:
        model: any module, on one device.

    Raises:
        ImportError: without the package greenlet.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        greenlet_module()
        self._checked = False
        #: Bytes of weights that stay whole on this rank from forward to backward because of ping-pong; 0 without FSDP2.
        #: Known after the first forward.
        self.unsharded_bytes = 0

    def forward(self, first: Mapping[str, Any] | Sequence[Any], second: Mapping[str, Any] | Sequence[Any]) -> Any:
        """Both halves, each the keyword arguments (a mapping) or the positional arguments (a sequence) of the model.

        Where the model raises an error, it is raised here too, and steps under way are abandoned on all ranks.

        Returns:
            What the model returns for the first and for the second.

        Raises:
            InvalidArgumentError: where something in the model rules ping-pong out; says what to do instead.
        """
        self._check()
        return run_halves(self.model, first, second)

    def _check(self) -> None:
        """What cannot be switched between two halves is refused; once, at the first forward, when all is wrapped."""
        refuse_compiled("PingPong is")
        if not self._checked:
            self.unsharded_bytes = prepare(self.model)
            self._checked = True


def refuse_compiled(what: str) -> None:
    """Raises InvalidArgumentError in compiled code."""
    if in_compiled_code():
        raise InvalidArgumentError(_COMPILED.format(what))


def prepare(model: torch.nn.Module) -> int:
    """Refuses what cannot take turns; FSDP2 keeps weights from here on. Returns how many bytes that is."""
    # Half a second, which whoever imports distca should not have to wait.
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    for name, module in model.named_modules():
        what = f"{name or 'the model'} ({type(module).__name__}) is"
        if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None:
            raise InvalidArgumentError(_COMPILED.format(what))
        if isinstance(module, DistributedDataParallel):
            raise InvalidArgumentError(
                f"ping-pong: {what} inside; a gradient would be reduced before both halves have added to it: wrap "
                "PingPong in it, DistributedDataParallel(PingPong(model))"
            )
        if isinstance(module, FSDPModule):
            _keep_weights(module)
    return sum(p.numel() * p.element_size() for p in model.parameters() if isinstance(p, DTensor))


_COMPILED = (
    "ping-pong: {} compiled, and compiled code cannot give the turn to the other half in the middle of a layer; leave "
    "out torch.compile, or PingPong"
)


def _keep_weights(module: FSDPModule) -> None:
    """The half that leaves first must not free the weights of the other."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _FSDP_SINCE:
        raise InvalidArgumentError(
            f"ping-pong: FSDP2 of torch {torch.__version__} frees a layer's weights in backward when the second half "
            f"has left it and the first needs them; torch {'.'.join(map(str, _FSDP_SINCE))} or later is needed"
        )
    module.set_reshard_after_forward(False, recurse=False)
