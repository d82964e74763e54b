"""Terms: what must be the same on all ranks of a context. They are compared when it is made, for every transport.
On one of them, the CPU's kernel, the ranks agree by themselves.

Ranks with other terms would compute addresses in each other's memory from other sizes, read each other's tables in
another format, wait for each other over different transports, or return rows whose bits depend on who computed them.
What a plan says (layout, heads, mask, cost model) is compared at every step instead.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import torch.distributed as dist

from distca import _C
from distca.connect.cpu_kernels import CpuKernels, agreed
from distca.connect.exchange import gather_text
from distca.errors import InvalidArgumentError


@dataclass(frozen=True)
class Terms:
    """The terms of one rank."""

    transport: str
    device: str
    """``"cpu"`` or ``"cuda"``."""
    slot_bytes: int
    attention: str
    """``"own"`` or ``"flash"``."""
    problem: str = ""
    """Why this rank cannot take part in the context; empty if it can."""
    cpu_kernels: CpuKernels | None = None
    """The instruction sets that the CPU's kernel can use; None on a GPU, or if there is a problem."""


_ADVICE = {
    "version": "install the same version of distca on all hosts",
    "transport": "give all ranks the same transport",
    "device": "give all ranks the same kind of device",
    "slot_bytes": "give all ranks the same heap_bytes, or the same max_tokens and heads",
    "attention": "give all ranks the same attention, or the same DISTCA_ATTENTION",
}
_PROBLEM_CHARACTERS = 130


def agree(group: dist.ProcessGroup, mine: Terms, timeout: float, who: str = "rank") -> tuple[str, int]:
    """Compares the terms of all ranks. This is collective over the group. Messages call a rank of it `who`.

    Returns:
        The instruction set of the CPU's kernel on which the ranks agree, and the first rank that would choose it by
        itself; ``("", 0)`` if a GPU computes attention.

    Raises:
        PeerDiedError, PeerTimeoutError: a rank has gone, or does not come within `timeout` seconds.
        InvalidArgumentError: a rank has a problem, or two ranks differ. All ranks raise it, and the message names them.
    """
    ranks = [json.loads(text) for text in gather_text(_text_of(mine), group, timeout)]
    compare(ranks, who)
    return ("", 0) if mine.cpu_kernels is None else agreed([CpuKernels(**terms["cpu_kernels"]) for terms in ranks])


def _text_of(terms: Terms) -> str:
    """The terms as JSON, short enough for gather_text whatever the problem's text holds."""
    problem = "".join(c if c.isascii() and c.isprintable() else "?" for c in terms.problem[:_PROBLEM_CHARACTERS])
    return json.dumps(asdict(terms) | {"problem": problem, "version": _version()})


def compare(ranks: list[dict[str, object]], who: str = "rank") -> None:
    """Raises InvalidArgumentError for the first problem; without a problem, for the first difference."""
    for rank, terms in enumerate(ranks):
        if terms["problem"]:
            raise InvalidArgumentError(f"init: {who} {rank}: {terms['problem']}")
    for name, advice in _ADVICE.items():
        values = [terms[name] for terms in ranks]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            raise InvalidArgumentError(
                f"init: {who} 0 has {name} = {values[0]!r}, {who} {other} has {values[other]!r}; {advice}"
            )


def _version() -> str:
    try:
        found = version("distca")
    except PackageNotFoundError:
        found = "unknown"
    return f"{found}, plan format {_C.PLAN_FORMAT}"
