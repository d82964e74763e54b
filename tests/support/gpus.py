"""Says whether there is a GPU for a test."""

from __future__ import annotations

import torch

from distca import _C

asks = False
"""Whether this process is one of pytest's own; conftest sets it. Processes that tests start import the test's module
too. There the question is not asked, because asking begins CUDA, and their forks could not use CUDA any more.
"""


def no_gpu() -> str:
    """The reason why tests that need any GPU cannot run here; empty if they can."""
    if not asks or torch.cuda.is_available():
        return ""
    return "no CUDA device: nothing ran on a GPU"


def missing_gpu() -> str:
    """The reason why tests of distca's own CUDA code cannot run here; empty if they can."""
    if not asks:
        return ""
    if reason := no_gpu():
        return reason
    if torch.cuda.get_device_capability() < (8, 0):
        return f"the kernels are for compute capability 8.0 and later, this is {torch.cuda.get_device_capability()}"
    return "" if _C.cuda_status()[0] else "distca was built without nvcc: no libdistca_cuda"
