"""Fewer cases of long tests, where there is no time for all, as in CI."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TypeVar

Case = TypeVar("Case")

EVERY = int(os.environ.get("EVERY", "1"))
"""Every second of the cases runs if this is 2, and so on."""


def thinned(cases: Iterable[Case], always: Callable[[Case], bool] = lambda case: False) -> list[Case]:
    """Every EVERY-th of the cases, and those that run always."""
    return [case for number, case in enumerate(cases) if number % EVERY == 0 or always(case)]
