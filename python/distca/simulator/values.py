"""Checks of values that a user gives in files."""

from __future__ import annotations

import math

from distca.arguments import is_number, is_whole
from distca.errors import InvalidArgumentError


def check(what: str, value: object, allowed: bool, expected: str) -> None:
    """Raises InvalidArgumentError with this value unless it is allowed."""
    if not allowed:
        raise InvalidArgumentError(f"{what} = {value!r}; {expected} is expected")


def positive(where: str, of: object, names: str) -> None:
    """Raises InvalidArgumentError unless these attributes are positive numbers."""
    for name in names.split():
        value = getattr(of, name)
        check(f"{where}: {name}", value, is_number(value, 1e-30, math.inf), "a positive number")


def whole(where: str, of: object, names: str) -> None:
    """Raises InvalidArgumentError unless these attributes are whole numbers from 1 on."""
    for name in names.split():
        value = getattr(of, name)
        check(f"{where}: {name}", value, is_whole(value, 1), "a whole number from 1 on")
