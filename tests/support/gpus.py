"""Says whether there is a GPU for a test."""

from __future__ import annotations

import torch

from distca import _C


def missing_gpu() -> str:
    """The reason why GPU tests cannot run here; empty if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device: the kernels have only been compiled"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"the kernels are for compute capability 9.0, this is {torch.cuda.get_device_capability()}"
    return "" if _C.cuda_status()[0] else "distca was built without nvcc: no libdistca_cuda"
