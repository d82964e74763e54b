"""Checks of arguments that name what is wrong, with its value, before it reaches the core."""

from __future__ import annotations

import ctypes
import math
from operator import index
from typing import Any, SupportsFloat

from distca.errors import InvalidArgumentError

_MOST = 2**62


def is_whole(value: Any, least: int, most: int = _MOST) -> bool:
    """Whether it is an integer of any library, from `least` to `most`. True and False do not count."""
    try:
        return not isinstance(value, bool) and least <= index(value) <= most
    except TypeError:
        return False


def is_number(value: Any, least: float, most: float) -> bool:
    """Whether it is a number from `least` to `most`. True and False do not count, nor tensors that need a gradient."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat) or getattr(value, "requires_grad", False):
        return False
    return least <= float(value) <= most


def is_float32(value: Any, least: float) -> bool:
    """Whether it is a number from `least` on that is finite in float32, and zero there only where it is zero."""
    if not is_number(value, least, math.inf):
        return False
    rounded = ctypes.c_float(float(value)).value
    return math.isfinite(rounded) and (rounded != 0 or float(value) == 0)


def check_type(function: str, name: str, value: Any, expected: type, made_by: str) -> None:
    """Raises InvalidArgumentError unless `value` is of distca's `expected` type. `made_by` says how one is made."""
    if not isinstance(value, expected):
        raise InvalidArgumentError(
            f"{function}: {name} is a {type(value).__name__}; a distca.{expected.__name__} is expected, as made by "
            f"{made_by}"
        )


def check_flag(function: str, name: str, value: Any) -> None:
    """Raises InvalidArgumentError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{function}: {name} is {value!r}; True or False is expected")


def listed(function: str, name: str, value: Any, expected: str) -> list[Any]:
    """The elements of a sequence. Raises InvalidArgumentError, which says what is `expected`, for anything else."""
    try:
        return list(value)
    except TypeError:
        raise InvalidArgumentError(f"{function}: {name} is {value!r}; {expected} is expected") from None
