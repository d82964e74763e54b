"""The open contexts of this process, by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distca.errors import InvalidArgumentError

if TYPE_CHECKING:
    from distca.context import Context

open_contexts: dict[str, Context] = {}


class Registered:
    """The part of a context that the registry knows.

    Attributes:
        name: the name under which the context is found.
    """

    name: str


def get_context(name: str = "default") -> Context | None:
    """The open context of that name, or None."""
    return open_contexts.get(name)


def find_context(context: Context | str) -> Context | None:
    """The given context, or the open one of that name.

    Raises:
        InvalidArgumentError: it is of any other type, or it was closed, and another one has its name now.
    """
    if isinstance(context, Registered):
        if open_contexts.get(context.name, context) is not context:
            raise InvalidArgumentError(f'context "{context.name}" is closed; there is another one of this name by now')
        return context
    if not isinstance(context, str):
        raise InvalidArgumentError(
            f"context is a {type(context).__name__}; a distca.Context, or the name of one, is expected"
        )
    return open_contexts.get(context)
