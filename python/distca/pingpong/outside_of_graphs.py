"""`call`, for compiled code: calls a function between two graphs.

A module of its own, because keeping torch.compile out of a function imports the compiler, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(
    reason="in a half of a ping-pong, core attention gives the turn to the other half between two graphs: leave out "
    "fullgraph=True"
)  # type: ignore[untyped-decorator]
def call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What `function` returns for these arguments. Neither it nor what it calls is compiled."""
    return function(*args, **options)
