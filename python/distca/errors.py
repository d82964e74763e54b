"""The errors that distca raises, one type a kind of fault. All are RuntimeErrors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


class DistcaError(RuntimeError):
    """Base of all errors of the library."""


class InvalidArgumentError(DistcaError, ValueError):
    """An argument is wrong; nothing was moved."""


class CapacityError(DistcaError):
    """A plan does not fit into the arenas; the message says the bytes needed."""


class PlanFormatError(DistcaError):
    """A plan tensor is truncated, altered, or of another format."""


class PlanMismatchError(DistcaError):
    """Ranks came to the same step with different plans; the message has both digests."""


class PeerDiedError(DistcaError):
    """A peer ended while the group was in use; the message names it."""


class PeerTimeoutError(DistcaError):
    """A peer did not answer in time; the message says who waited for whom, for what, and what was seen."""


class ContextPoisonedError(DistcaError):
    """The context was abandoned after an earlier fault."""


class OperatingSystemError(DistcaError):
    """The operating system refused something (memory, sockets)."""


_FROM_OPERATOR = re.compile(r"distca (\w+): (.*)", re.DOTALL)


@contextmanager
def typed_errors() -> Iterator[None]:
    """Turns the RuntimeError in which an operator of ``torch.ops.distca`` reports a fault into its own type."""
    try:
        yield
    except RuntimeError as error:
        match = _FROM_OPERATOR.match(str(error))
        kind = globals().get(match[1]) if match else None
        if match is None or kind is None:
            raise
        raise kind(match[2]) from None
