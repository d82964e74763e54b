"""Ranks for tests that are not about how ranks start. They are forked from one process, because imports take most of a
short run.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any, TypeVar

import torch

import distca
from support import processes  # noqa: F401  # which sets what the server imports for its own tests: these need more

Result = TypeVar("Result")

_LAZILY = [
    "torch.fx.experimental.symbolic_shapes",  # torch imports this at the first backward
    "matplotlib.figure",  # imported at the end of a run, as are those below
    "matplotlib.backends.backend_agg",
    "torch.utils.tensorboard",
]
#: What the server imports of which ranks are forked.
PRELOADED = ["distca.apps.common.preloading", "distca.apps.train.trainer", *_LAZILY, "pytest", "hypothesis"]
multiprocessing.set_forkserver_preload(PRELOADED)


def launch(fn: Callable[..., Result], *args: Any, ranks: int, threads: int = 1) -> list[Result]:
    """`distca.launch` with forked ranks. Where PyTorch knows GPUs ranks are spawned, because a fork cannot use what its
    parent has asked of CUDA.
    """
    if torch.version.cuda is not None:
        return distca.launch(fn, *args, ranks=ranks, threads=threads)
    return distca.launch(fn, *args, ranks=ranks, threads=threads, start_method="forkserver")
