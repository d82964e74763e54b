"""Groups of ranks for tests and benchmarks, with late rows, replayed attention, queued steps or emulated hosts.

`import distca` does not import this module. Import it by its name.
"""

from __future__ import annotations

import torch

from distca import _C
from distca.connect.loopback import make_group
from distca.connect.options import device_name
from distca.context import Context
from distca.errors import InvalidArgumentError
from distca.heads import LayerHeads
from distca.planner.cost import CostModel
from distca.testing import _emulation
from distca.trace.trace import Link

__all__ = ["loopback"]


def loopback(
    num_ranks: int,
    *,
    max_tokens: int,
    heads: LayerHeads,
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
    """`distca.loopback` with further options, which only tests and benchmarks need.

    Args:
        num_ranks: number of ranks.
        max_tokens, heads, heap_bytes, timeout, cost, device, attention: as in `distca.loopback`.
        reorder_seed: delays and reorders puts, in an order drawn from this seed.
        progress_thread: as in `distca.init`, where otherwise only shm has one.
        link: emulates a network of that speed.
        replay: the cost models of forward and backward of attention, with ``unit_ns``. Attention is then not computed:
            every rank sleeps as long as it would take. Schedules of many ranks thus run on few cores. Rows travel; the
            results are whatever was in memory.
        streams: queues every step on two threads a rank that stand for a GPU's streams, as steps on CUDA always are,
            instead of running it in the calling thread. It excludes ``reorder_seed``, ``progress_thread``, ``link`` and
            ``replay``.
        hosts: number of hosts that the ranks stand for, on the CPU with ``streams``. Ranks lie on them in turn. Rows
            between hosts are packed, and a thread that stands for a network carries them.

    Returns:
        The contexts of the ranks, by rank.

    Raises:
        InvalidArgumentError: an argument is wrong, or arguments exclude each other.
    """
    device = device_name(device)
    if streams or device != "cpu":
        if (reorder_seed, link, replay, progress_thread) != (None, None, None, False):
            raise InvalidArgumentError(
                "loopback: streams=True, or a GPU, excludes reorder_seed, progress_thread, link and replay"
            )
        streams = True
    if hosts != 1 and not (streams and device == "cpu"):
        raise InvalidArgumentError(f"loopback: hosts = {hosts} needs streams=True, on the CPU")
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
