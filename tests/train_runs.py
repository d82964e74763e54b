"""Runs of `distca train` inside the test's own process."""

import contextlib
import gc
from collections.abc import Iterator

import torch.distributed as dist


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """This process as the only rank, which starts at once."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()
        dist.destroy_process_group()
