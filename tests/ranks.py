"""Ranks of tests that are not about how ranks start: forked from one process, for imports are most of a short run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

import distca
from processes import preload

Result = TypeVar("Result")


def launch(fn: Callable[..., Result], *args: Any, ranks: int, threads: int = 1) -> list[Result]:
    """`distca.launch`; spawned where PyTorch knows GPUs, for what one process has asked of CUDA no fork may use."""
    if torch.version.cuda is not None:
        return distca.launch(fn, *args, ranks=ranks, threads=threads)
    preload()
    return distca.launch(fn, *args, ranks=ranks, threads=threads, start_method="forkserver")
