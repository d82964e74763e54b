"""The ways of a step that `--compare` takes in turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distca.apps.common import pictures

RESULT = "compare.json"


@dataclass(frozen=True)
class Way:
    """One way to take a step.

    Attributes:
        options: what makes it, of the options of `pretrain_llama.py`.
        colour: of its bars.
    """

    options: dict[str, Any]
    colour: str


#: The first way is the one that the others are compared with.
WAYS = {
    "distca": Way({"attention": "distca", "balance": True, "ping_pong": False}, pictures.PLANNED),
    "distca, ping-pong": Way({"attention": "distca", "balance": True, "ping_pong": True}, pictures.DISPATCH),
    "without balance": Way({"attention": "distca", "balance": False, "ping_pong": False}, pictures.AT_HOME),
    "Megatron": Way({"attention": "megatron", "ping_pong": False}, pictures.INK),
}
