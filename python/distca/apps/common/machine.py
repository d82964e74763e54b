"""The machine on which a figure was measured, and the versions of the software that measured it."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

import distca


def setting() -> dict[str, Any]:
    """The command that runs, the hardware and the versions."""
    gpu = {}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu = {
            "gpu": properties.name,
            "gpu_capability": f"{properties.major}.{properties.minor}",
            "gpu_multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
        }
    return {
        **gpu,
        "command": shlex.join(["distca", *sys.argv[1:]]),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu_kernel": distca._C.cpu_isa(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "distca": distca.__version__,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
