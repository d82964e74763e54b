"""The open contexts of this process, by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distca.errors import InvalidArgumentError

if TYPE_CHECKING:
    from distca.context import Context

open_contexts: dict[str, Context] = {}
closed_names: set[str] = set()  # of contexts that were closed; another one may have the name by now


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
        InvalidArgumentError: it is of any other type, or it was closed.
    """
    if isinstance(context, Registered):
        if (of_this_name := open_contexts.get(context.name)) is not context:
            other = "" if of_this_name is None else "; there is another one of this name by now"
            raise InvalidArgumentError(f'context "{context.name}" is closed{other}')
        return of_this_name
    if not isinstance(context, str):
        raise InvalidArgumentError(
            f"context is a {type(context).__name__}; a distca.Context, or the name of one, is expected"
        )
    return open_contexts.get(context)


def if_closed(name: str) -> str:
    """The end of a message that there is no context of that name: that there was one."""
    return "; the one that had this name was closed" if name in closed_names else ""


def refuse_closed(name: str) -> None:
    """Raises InvalidArgumentError if the context of that name was closed and there is no other one."""
    if name in closed_names and name not in open_contexts:
        raise InvalidArgumentError(f'no context "{name}"; call distca.init first{if_closed(name)}')
