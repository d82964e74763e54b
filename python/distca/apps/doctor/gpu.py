"""The part of `distca doctor` about GPUs: attention, NVSHMEM and its transports, RDMA adapters, peer access.

Most findings are fine even if something is missing, because it matters only where rows travel between GPUs; the advice
names it. Folders and calls of the driver are arguments, so that tests can examine other machines than this one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from distca.apps.doctor.finding import Finding
from distca.connect.options import chosen_attention
from distca.errors import InvalidArgumentError
from distca.heads import Heads

INFINIBAND = Path("/sys/class/infiniband")
#: NVSHMEM's own transports between hosts: the setting that chooses each, and the package with what it needs.
REMOTE_TRANSPORTS = {
    "ibrc": ("nothing to set, it is the default", "rdma-core (libibverbs)"),
    "ibgda": ("NVSHMEM_IB_ENABLE_IBGDA=1", "rdma-core (libibverbs, libmlx5)"),
    "ibdevx": ("NVSHMEM_REMOTE_TRANSPORT=ibdevx", "rdma-core (libibverbs, libmlx5)"),
    "libfabric": ("NVSHMEM_REMOTE_TRANSPORT=libfabric", "libfabric"),
    "ucx": ("NVSHMEM_REMOTE_TRANSPORT=ucx", "UCX"),
}
#: The bootstrap, by which ranks find each other: distca brings the unique id.
BOOTSTRAP = "uid"
#: The library that the RDMA transports load by themselves when they start.
VERBS = "libibverbs.so.1"

#: Attributes of a device by the driver's numbers (CUdevice_attribute). 125 is about IPC events and holds for IPC.
SHARING = {103: "file descriptors", 125: "CUDA IPC", 128: "fabric handles"}

Load = Callable[[str], str]
"""Loads a library by its name or path. Returns why it does not load, or an empty string."""


def loading_problem(library: str) -> str:
    """Why a library does not load here; empty if it loads."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return ""


def attention(variable: str | None, has_own: bool, activated: str) -> Finding:
    """What computes attention on a GPU, and why.

    Args:
        variable: the value of the environment's ``DISTCA_ATTENTION``; None if it is not set.
        has_own: whether distca has kernels of its own for the GPU.
        activated: what PyTorch was told to use in place of its own flash attention, in words.
    """
    name = "gpu attention"
    try:
        chosen = chosen_attention(variable, "cuda:0", Heads(8, 8, 128, dtype=torch.bfloat16))
    except InvalidArgumentError:
        advice = 'DISTCA_ATTENTION may be "auto", "own" or "flash"'
        return Finding(name, f"DISTCA_ATTENTION={variable}", False, advice)
    why = "the default" if variable is None else f"DISTCA_ATTENTION={variable}"
    if chosen == "own":
        advice = (
            "" if has_own else "these kernels need compute capability 8.0 and libdistca_cuda: unset DISTCA_ATTENTION"
        )
        return Finding(name, f"by distca's own kernels ({why})", has_own, advice)
    return Finding(name, f"by PyTorch's flash attention{activated} ({why})")


def remote_transports(folder: Path, has_adapters: bool, load: Load = loading_problem) -> list[Finding]:
    """A finding for each transport that NVSHMEM may have in its folder of libraries, and one for its bootstraps."""
    findings = []
    for name, (setting, package) in REMOTE_TRANSPORTS.items():
        library = _plugin(folder, f"transport_{name}")
        if library is None:
            findings.append(Finding(f"nvshmem {name}", f"not in {folder}", absent=True))
            continue
        problem = load(str(library)) or (load(VERBS) if name.startswith("ib") else "")
        advice = f"needed only between hosts: install {package}" if problem and has_adapters else ""
        found = f"does not load: {problem}" if problem else f"loads; to use it: {setting}"
        findings.append(Finding(f"nvshmem {name}", found, True, advice, bool(problem)))
    library = _plugin(folder, f"bootstrap_{BOOTSTRAP}")
    problem = "it is missing" if library is None else load(str(library))
    others = sorted(path.name.split("bootstrap_")[1].split(".so")[0] for path in folder.glob("nvshmem_bootstrap_*.so*"))
    found = f"by unique id: {problem or 'loads'} (installed: {', '.join(others) or 'none'})"
    advice = "transport nvshmem cannot start without it: install nvidia-nvshmem-cu13 again" if problem else ""
    return [*findings, Finding("nvshmem bootstrap", found, not problem, advice)]


def _plugin(folder: Path, name: str) -> Path | None:
    return next(iter(sorted(folder.glob(f"nvshmem_{name}.so*"))), None)


def rdma_adapters(folder: Path = INFINIBAND) -> list[Finding]:
    """A finding for each port of each adapter: the state and the rate of its link, as the kernel gives them."""
    return [_port(port) for port in sorted(folder.glob("*/ports/*"))]


def _port(port: Path) -> Finding:
    def read(name: str) -> str:
        try:
            text = (port / name).read_text().strip()
        except OSError:
            return "unknown"
        return text.split(": ", 1)[-1]  # the state is "4: ACTIVE"

    state, physical = read("state"), read("phys_state")
    found = f"{state} ({physical}), {read('rate')}, {read('link_layer')}"
    advice = "" if state == "ACTIVE" else "not used while its link is down: look at the cable, or at `ibstat`"
    return Finding(f"rdma {port.parent.parent.name}:{port.name}", found, True, advice, state != "ACTIVE")


def peer_access(num_gpus: int, can_access: Callable[[int, int], bool]) -> Finding:
    """Which pairs of this host's GPUs reach each other's memory by load and store."""
    pairs = [(a, b) for a in range(num_gpus) for b in range(a + 1, num_gpus)]
    if not pairs:
        return Finding("gpu peers", "fewer than two GPUs here", absent=True)
    apart = [f"{a}-{b}" for a, b in pairs if not (can_access(a, b) and can_access(b, a))]
    found = f"{len(pairs) - len(apart)} of {len(pairs)} pairs reach each other's memory"
    if not apart:
        return Finding("gpu peers", found)
    advice = (
        "rows between those GPUs travel by one of NVSHMEM's transports; `nvidia-smi topo -m` shows their connections"
    )
    return Finding("gpu peers", f"{found}; not {', '.join(apart)}", True, advice)


def memory_sharing(num_gpus: int, attribute: Callable[[int, int], int]) -> Finding:
    """How processes can share a GPU's memory, as its driver says."""
    of_gpus = [
        [way for number, way in SHARING.items() if attribute(number, gpu)] or ["nothing"] for gpu in range(num_gpus)
    ]
    if not of_gpus:
        return Finding("gpu ipc", "no GPU here", absent=True)
    if all(ways == of_gpus[0] for ways in of_gpus):
        found = f"memory is shared between processes by {', '.join(of_gpus[0])}"
    else:
        found = "; ".join(f"GPU {gpu}: {', '.join(ways)}" for gpu, ways in enumerate(of_gpus))
    lacking = any(not {"file descriptors", "CUDA IPC"} & set(ways) for ways in of_gpus)
    advice = "ranks of this host cannot put into each other's memory; in a container, share the host's IPC namespace"
    return Finding("gpu ipc", found, True, advice if lacking else "")


def driver_attribute(number: int, gpu: int) -> int:
    """An attribute of a device by the driver's number; 0 if the driver does not know it."""
    driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    driver.cuInit(0)
    return value.value if driver.cuDeviceGetAttribute(ctypes.byref(value), number, gpu) == 0 else 0
