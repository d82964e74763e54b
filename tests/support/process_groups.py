"""Process groups of torch.distributed."""

from __future__ import annotations

import torch.distributed as dist


def leave_all_groups() -> None:
    """Leaves all groups but that of all processes.

    Megatron leaves its groups open: dozens for each model, with threads that share the cores of the next one.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if group != dist.group.WORLD:
            dist.destroy_process_group(group)
