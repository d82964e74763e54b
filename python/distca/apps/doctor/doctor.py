"""`distca doctor`: what was found on this machine, what will be used, and what to do about what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

import distca
from distca import _C
from distca.apps.doctor import gpu
from distca.apps.doctor.finding import Finding
from distca.connect import nvshmem
from distca.planner.private_group import all_to_all_single


def examine() -> list[Finding]:
    """Examines everything. It loads NVSHMEM if that is installed, and starts nothing but a compiler for its version."""
    return [
        Finding("distca", f"{distca.__version__} in {os.path.dirname(distca.__file__)}"),
        Finding("python", f"{platform.python_version()} on {platform.platform()}"),
        _torch(),
        _instruction_set(),
        Finding("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores for one process"),
        _shared_memory(),
        _process_groups(),
        _cuda(),
        _cuda_library(),
        _attention(),
        *_between_gpus(),
        _transformers(),
        _compiler(),
    ]


def _torch() -> Finding:
    version = torch.__version__
    major, minor = (int(part) for part in version.split(".")[:2])
    fine = (major, minor) >= (2, 10)
    return Finding("torch", version, fine, "" if fine else "install PyTorch >= 2.10 and build distca again")


def _instruction_set() -> Finding:
    forced = os.environ.get("DISTCA_CPU_ISA")
    try:
        used = _C.cpu_isa()
    except distca.InvalidArgumentError as error:
        return Finding("cpu kernel", f"DISTCA_CPU_ISA={forced}", False, str(error))
    said = "a group takes the weakest of its ranks' choices"
    is_fast = forced or used.startswith(("avx512", "amx"))
    advice = "" if is_fast else "an AVX-512 CPU would be faster; nothing to do here"
    return Finding("cpu kernel", f"{used} ({'forced by DISTCA_CPU_ISA' if forced else said})", True, advice)


def _shared_memory() -> Finding:
    heads = distca.Heads(q=1, kv=1, dim=8)
    try:
        distca.init(transport="shm", max_tokens=1, heads=heads, heap_bytes=1 << 20, name="doctor").close()
    except distca.DistcaError as error:
        return Finding("transport shm", "does not work", False, str(error))
    return Finding("transport shm", "works: memory without a name between processes of one host")


def _process_groups() -> Finding:
    # A group of this process alone. gloo's error messages are the same for any group.
    if not (dist.is_available() and dist.is_gloo_available()):
        return Finding(
            "transport torch", "torch was built without gloo", True, "needed only between several hosts", True
        )
    try:
        bytes_to_self = torch.arange(8, dtype=torch.uint8)
        received = torch.zeros_like(bytes_to_self)
        backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
        all_to_all_single(backend, received, bytes_to_self, [8], [8])
    except RuntimeError as error:
        advice = f"{error}; set GLOO_SOCKET_IFNAME to the network interface between the hosts"
        return Finding("transport torch", "does not work", False, advice)
    fine = torch.equal(received, bytes_to_self)
    nccl = "; NCCL is available but has not been run yet" if dist.is_nccl_available() else ""
    return Finding("transport torch", f"works over gloo; it is for ranks on several hosts{nccl}", fine)


def _cuda() -> Finding:
    """The device, and whether distca can use it."""
    if not torch.cuda.is_available():
        return Finding("cuda", "PyTorch finds no device; distca runs on CPU tensors here", absent=True)
    name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    found = f"{name}, compute capability {major}.{minor}"
    if major < 8:
        return Finding(
            "cuda", found, True, "not used, because distca needs 8.0 or later; distca runs on CPU tensors here", True
        )
    return Finding("cuda", found)


def _attention() -> Finding:
    """What computes attention on a GPU, and what decided that."""
    variable = os.environ.get("DISTCA_ATTENTION")
    has_own = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0) and _C.cuda_status()[0]
    finding = gpu.attention(variable, has_own, _activated())
    return replace(finding, absent=not torch.cuda.is_available())


def _activated() -> str:
    """The implementation that PyTorch was told to use in place of its own. PyTorch before 2.11 does not tell it."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return f" ({current})" if current else ""


def _cuda_library() -> Finding:
    built, count, problem = _C.cuda_status()
    if not built:
        advice = "needed only on GPUs: build distca with DISTCA_CUDA=1 on a machine that has nvcc >= 12.8"
        return Finding("libdistca_cuda", "not built", True, advice, True)
    found = f"built; {count} devices" if count else f"built; no device: {problem}"
    return Finding("libdistca_cuda", found, absent=not count)


def _between_gpus() -> list[Finding]:
    version, problem = nvshmem.status()
    if not version:
        return [Finding("transport nvshmem", "not available", True, f"needed only between GPUs: {problem}", True)]
    folder, num_gpus = nvshmem.library_folder(), torch.cuda.device_count()
    adapters = gpu.rdma_adapters()
    return [
        Finding("transport nvshmem", f"NVSHMEM {version}; not yet run between hosts"),
        *(gpu.remote_transports(folder, bool(adapters)) if folder is not None else []),
        *(adapters or [Finding("rdma adapters", "none: NVSHMEM reaches only the GPUs of this host", absent=True)]),
        gpu.peer_access(num_gpus, torch.cuda.can_device_access_peer),
        gpu.memory_sharing(num_gpus, gpu.driver_attribute),
    ]


def _transformers() -> Finding:
    try:
        from distca.integrations.hf_version import NEEDED
    except ImportError as error:
        return Finding("transformers", importlib.metadata.version("transformers"), False, str(error))
    if importlib.util.find_spec("transformers") is None:
        advice = f"`distca train` and distca.integrations.hf need {NEEDED}"
        return Finding("transformers", "not installed", True, advice, True)
    return Finding("transformers", importlib.metadata.version("transformers"))


def _compiler() -> Finding:
    name = os.environ.get("CXX", "c++")
    path = shutil.which(name)
    if path is None:
        advice = "needed only to build distca: g++ >= 12 or clang >= 14"
        return Finding("compiler", f"{name} was not found", True, advice, True)
    version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()
    return Finding("compiler", version[0] if version else path)
