"""What tests and benchmarks need and training does not: groups whose rows are late, whose attention is slept, and more.

Import it by name: `import distca` does not.
"""

from __future__ import annotations

import torch

from distca import _C
from distca.connect.loopback import make_group
from distca.connect.options import device_name
from distca.context import Context
from distca.errors import InvalidArgumentError
from distca.heads import Heads
from distca.planner.cost import CostModel
from distca.testing import _emulation
from distca.trace.trace import Link

__all__ = ["loopback"]


def loopback(
    num_ranks: int,
    *,
    max_tokens: int,
    heads: Heads,
    heap_bytes: int | None = None,
    timeout: float = 600.0,
    cost: CostModel | None = None,
    reorder_seed: int | None = None,
    progress_thread: bool = False,
    link: Link | None = None,
    device: torch.device | str = "cpu",
    attention: str | None = None,
    replay: tuple[CostModel, CostModel] | None = None,
    streams: bool = False,
    hosts: int = 1,
) -> list[Context]:
    """`distca.loopback` with what only tests and benchmarks want.

    Args:
        num_ranks: number of ranks.
        max_tokens, heads, heap_bytes, timeout, cost, device, attention: as for :func:`distca.loopback`.
        reorder_seed: delays and reorders puts in an order drawn from this seed.
        progress_thread: as for :func:`distca.init`, though nothing else is shared memory between processes here.
        link: emulates a network of that speed.
        replay: what forward and backward of attention cost, with ``unit_ns``; attention is not computed then, but every
            rank sleeps as long, so that schedules of many ranks run on few cores. Rows travel; what comes out is
            whatever was in memory.
        streams: queue every step on two threads a rank that stand for a GPU's streams, as steps on CUDA always are,
            instead of running it in the calling thread. ``reorder_seed``, ``progress_thread``, ``link`` and ``replay``
            do not go with it.
        hosts: on the CPU with ``streams``: ranks stand for those of so many hosts, on which they lie in turn. Between
            hosts rows are packed and carried by a thread that stands for a network.

    Raises:
        InvalidArgumentError: for wrong arguments, or such that do not go together.
    """
    device = device_name(device)
    if streams or device != "cpu":
        if (reorder_seed, link, replay, progress_thread) != (None, None, None, False):
            raise InvalidArgumentError(
                "loopback: steps that are queued on streams have no reorder_seed, progress_thread, link or replay"
            )
        streams = True
    if hosts != 1 and not (streams and device == "cpu"):
        raise InvalidArgumentError(f"loopback: hosts = {hosts} goes with streams, on the CPU")
    return make_group(
        num_ranks,
        max_tokens,
        heads,
        heap_bytes,
        timeout,
        cost,
        device,
        attention,
        emulation=_emulation,
        reorder_seed=reorder_seed,
        progress_thread=progress_thread,
        link=None if link is None else link.words,
        replay=None if replay is None else _replayed(*replay),
        streams=streams,
        hosts=hosts,
    )


def _replayed(forward: CostModel, backward: CostModel) -> tuple[_C.CostModel, float, _C.CostModel, float]:
    if forward.unit_ns is None or backward.unit_ns is None:
        raise InvalidArgumentError("loopback: replay takes cost models that were measured: unit_ns is None")
    return forward.core, forward.unit_ns, backward.core, backward.unit_ns
