"""`Recording`: steps that are recorded once and repeated with other plans."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from distca import _C
from distca.arguments import check_type, listed
from distca.errors import InvalidArgumentError, refusals_told
from distca.planner.plan import Plan

if TYPE_CHECKING:
    from distca.context import Context


class Recording:
    """Recorded steps of one context, forward and backward, to repeat with new plans. `Context.record` makes it.

    Use it in ``with``. Steps inside are recorded and not done; therefore what they return is not computed yet.
    Afterwards repeat them any number of times, in the same way on all ranks::

        recording.replan(plan)
        recording.replay()  # or launch the CUDA graph that was captured meanwhile

    A replay does the same operations over the same tensors: those that were passed to the calls inside, and those that
    the calls returned. Write new values into the former before a replay, and read the latter after it. A tensor that is
    given other memory (``q.data = ...``) is not the recorded one any more.
    """

    def __init__(self, context: Context, headroom: float, rounds: int) -> None:
        self._context = context
        self._room = headroom, rounds
        self._open: _C.Recording | None = None
        self._made: _C.Recording | None = None
        self._calls_before = 0  # those of the context, when the recording began

    @property
    def num_steps(self) -> int:
        """Number of recorded steps. The forward and the backward of a call are one step each."""
        return self._complete().num_steps

    def __enter__(self) -> Recording:
        if self._open is not None or self._made is not None:
            raise InvalidArgumentError("record: a recording is made once; make another one with Context.record")
        with refusals_told(self._context):
            if self._context._finder is not None:
                raise InvalidArgumentError(
                    "record: the context finds the largest logits of all steps, which a replay would not do; pass "
                    "max_logits=True to core_attention"
                )
            self._open = self._core().begin_recording(*self._room)
        self._context._is_recording, self._calls_before = True, self._core().num_calls
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recording, self._open = self._open, None
        self._context._is_recording = False
        if kind is not None:
            core = self._context._core
            if core is None:
                return
            core.drop_recording()
            # Recorded steps are no calls: a call since the beginning is one that was refused, and told already.
            if core.num_calls == self._calls_before:
                core.refuse(f"a recording broke off: {kind.__name__}: {error}")
            return
        with refusals_told(self._context):
            self._core().end_recording()
        self._made = recording

    def replan(self, plan: Plan | Sequence[Plan]) -> None:
        """Makes the recorded steps the next steps of the context, with the given plans. `replay` then does them.

        This is a collective call. All ranks make it with their slices of the same plans; if the plans of two ring
        neighbours differ, at least one of the two notices here. It reads and writes no tensor. No other step may come
        between it and the replay.

        Args:
            plan: one plan for all steps, or one for each step in the order in which the steps began. The documents may
                be any, but this rank must have as many rows in them as the tensors have.

        Raises:
            CapacityError: a plan needs more than the recording has room for (the message says of what, and how much),
                or, on CUDA, it has another mask. Nothing has happened on this rank. If other ranks have room, it is a
                fault; see `check`.
            InvalidArgumentError, PlanFormatError: before anything changes; also if a graph was not launched since the
                last replan, or was launched more often than that.
            PlanMismatchError, PeerDiedError, PeerLeftError, PeerTimeoutError: a fault, as in a step.
        """
        with refusals_told(self._context):
            self._fill(plan, check_only=False)

    def check(self, plan: Plan | Sequence[Plan]) -> None:
        """Raises what `replan` would raise for plans that do not fit on this rank, and does nothing else.

        This is not a collective call. Let all ranks call it and tell each other the result. If a plan does not fit on
        some rank, do the steps one by one without the recording.
        """
        self._fill(plan, check_only=True)

    def replay(self) -> None:
        """Does the recorded steps, once after each `replan`. They are queued, as all steps of the context are.

        Raises:
            InvalidArgumentError: there was no replan since the last replay, or the steps are part of a CUDA graph.
        """
        with refusals_told(self._context):
            self._core().replay(self._complete())

    def _fill(self, plan: Plan | Sequence[Plan], *, check_only: bool) -> None:
        plans = (
            [plan] if isinstance(plan, Plan) else listed("replan", "plan", plan, "a distca.Plan, or one for each step,")
        )
        for one in plans:
            check_type("replan", "plan", one, Plan, "distca.plan")
        tensors = [one.tensor for one in plans]  # keeps them until the call is over
        for tensor in tensors:
            if tensor.device.type != "cpu" or tensor.dtype != torch.int64 or not tensor.is_contiguous():
                raise InvalidArgumentError(
                    "replan: plan.tensor must be a contiguous int64 CPU tensor; pass the distca.Plan with its tensor "
                    "unmoved"
                )
        words = [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]
        self._core().replan(self._complete(), words, check_only=check_only)

    def _core(self) -> _C.Context:
        if self._context._core is None:
            raise InvalidArgumentError(f"recording: context {self._context.name!r} is closed")
        return self._context._core

    def _complete(self) -> _C.Recording:
        if self._made is None:
            raise InvalidArgumentError("recording: nothing is recorded; use it in `with` first")
        return self._made
