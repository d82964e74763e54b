"""The errors that distca raises, one type for each kind of fault. All are RuntimeErrors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.utils.checkpoint import _StopRecomputationError

if TYPE_CHECKING:
    from distca.context import Context


class DistcaError(RuntimeError):
    """Base of all errors of the library."""


class InvalidArgumentError(DistcaError, ValueError):
    """An argument is wrong. Nothing was moved."""


class CapacityError(DistcaError):
    """A plan does not fit into the arenas. The message says the bytes that it needs."""


class PlanFormatError(DistcaError):
    """A plan tensor is truncated, altered, or of another format."""


class PlanMismatchError(DistcaError):
    """Ranks came to the same step with different plans, calls or layers. The message says what differs."""


class PeerDiedError(DistcaError):
    """A peer's process ended while the group was in use. The message names the peer."""


class PeerLeftError(DistcaError):
    """A peer is alive but has left the steps of the group. The message names it and says why.

    The peer closed its context, refused a call that other ranks made, left a step unfinished, or met an error of its
    own. In the last case the message repeats that error.
    """


class PeerTimeoutError(DistcaError):
    """A peer did not answer in time. The message says who waited for whom, for what, and what was seen."""


class ContextPoisonedError(DistcaError):
    """The context cannot be used any more because of an earlier fault. The message repeats that fault."""


class OperatingSystemError(DistcaError):
    """The operating system refused something (memory, sockets)."""


class DeviceError(DistcaError):
    """A GPU or its driver refused something, or there is none where one is needed."""


@contextmanager
def refusals_told(context: Context | None) -> Iterator[None]:
    """Tells the peers if one collective call of the context, made inside, raises before it has begun.

    Without this they would wait for a rank that never comes. The core itself tells them of the calls that it refuses.
    """
    core = None if context is None else context._core
    before = None if core is None else core.num_calls
    try:
        yield
    except _StopRecomputationError:  # activation checkpointing has run again all that backward needs: no error
        raise
    except Exception as error:
        if core is not None and core.num_calls == before:
            core.refuse(f"{type(error).__name__}: {error}")
        raise


#: C++'s error for a lack of memory in words. PyTorch up to 2.14 makes a MemoryError of it, and 2.15 a RuntimeError.
_NO_MEMORY = "std::bad_alloc"
_FROM_OPERATOR = re.compile(r"distca (\w+): (.*)", re.DOTALL)
_WHAT_TO_CHANGE = {
    PlanMismatchError: "make the same calls of core_attention and of its backward on every rank, in the same order",
    PeerTimeoutError: "if that rank does not hang, it makes fewer calls of core_attention or of its "
    "backward: make the same number on every rank",
}
_ALSO = "; a rank without data passes zero rows, and a model that is evaluated on one rank alone gets no plan there"


@contextmanager
def typed_errors(caller: str = "") -> Iterator[None]:
    """Turns a RuntimeError that an operator of ``torch.ops.distca`` raised into the error type that its text names.

    The message then begins with who made the call, if that is known. If the ranks' calls do not match, it
    ends with what to change.
    """
    try:
        yield
    except RuntimeError as error:
        if (typed := typed_error(error, caller)) is None:
            raise
        raise typed from None


def typed_error(error: RuntimeError, caller: str) -> DistcaError | MemoryError | None:
    """What `typed_errors` raises in place of `error`; None where its text names no other type."""
    if str(error) == _NO_MEMORY:
        return MemoryError(_NO_MEMORY)
    match = _FROM_OPERATOR.match(str(error))
    kind = globals().get(match[1]) if match else None
    if match is None or kind is None:
        return None
    # A poisoned context reports an earlier fault, which may be of another layer.
    where = f"{caller}: " if caller and kind is not ContextPoisonedError else ""
    advice = f". What to change: {_WHAT_TO_CHANGE[kind]}{_ALSO}" if kind in _WHAT_TO_CHANGE else ""
    typed: DistcaError = kind(f"{where}{match[2]}{advice}")
    return typed
