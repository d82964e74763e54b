"""Groups of ``torch.distributed`` that nobody else uses: their collectives meet no others in another order."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


class PrivateGroup:
    """A group of some ranks. All of them make it.

    Args:
        ranks: the ranks in ``torch.distributed``; None for all.
        timeout: seconds to wait for the other ranks; None for torch.distributed's own limit.
        backend: ``"gloo"`` or ``"nccl"``.

    Attributes:
        group: the group; None once it is closed.
    """

    def __init__(self, ranks: list[int] | None, timeout: float | None, backend: str) -> None:
        limit = None if timeout is None else timedelta(seconds=timeout)
        self._of_all_ranks = ranks is None
        self.group: dist.ProcessGroup | None = dist.new_group(
            ranks, timeout=limit, backend=backend, use_local_synchronization=ranks is not None
        )

    def close(self) -> None:
        """Leaves the group."""
        # A group of some ranks stays until torch.distributed ends. torch names it after its members; a second group of
        # that name would read the addresses of the first.
        if self.group is not None and self._of_all_ranks and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None
