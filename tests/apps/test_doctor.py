"""What `distca doctor` says about made-up machines: folders laid out as the kernel and NVSHMEM's wheel lay them out."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from distca.apps.doctor import gpu as doctor_gpu
from distca.connect import nvshmem


def _port(folder: Path, adapter: str, state: str, physical: str, rate: str) -> None:
    port = folder / adapter / "ports" / "1"
    port.mkdir(parents=True)
    files = {"state": state, "phys_state": physical, "rate": rate, "link_layer": "InfiniBand"}
    for name, text in files.items():
        (port / name).write_text(text + "\n")


def test_a_port_has_the_state_and_the_rate_of_its_link_and_one_that_is_down_says_so(tmp_path: Path) -> None:
    _port(tmp_path, "mlx5_1", "1: DOWN", "2: Polling", "10 Gb/sec (4X SDR)")
    _port(tmp_path, "mlx5_0", "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")
    up, down = doctor_gpu.rdma_adapters(tmp_path)
    assert (up.name, up.found) == ("rdma mlx5_0:1", "ACTIVE (LinkUp), 400 Gb/sec (4X NDR), InfiniBand")
    assert up.advice == "" and up.fine
    assert (down.name, down.found) == ("rdma mlx5_1:1", "DOWN (Polling), 10 Gb/sec (4X SDR), InfiniBand")
    assert "not used while its link is down" in down.advice and down.fine


def test_a_port_whose_files_cannot_be_read_and_a_machine_without_adapters_are_no_errors(tmp_path: Path) -> None:
    (tmp_path / "efa_0" / "ports" / "1").mkdir(parents=True)
    assert [port.found for port in doctor_gpu.rdma_adapters(tmp_path)] == ["unknown (unknown), unknown, unknown"]
    assert doctor_gpu.rdma_adapters(tmp_path / "none") == []


def test_each_transport_of_nvshmem_is_missing_or_loads_or_says_why_it_does_not(tmp_path: Path) -> None:
    library = re.search(r"(/\S*/libm(?:-|\.so)\S*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    assert library is not None
    for name in ("transport_ucx", "bootstrap_uid"):  # the contents do not matter: it must be a library that loads
        shutil.copy(library[1], tmp_path / f"nvshmem_{name}.so.3")
    (tmp_path / "nvshmem_transport_libfabric.so.3").write_text("no library")
    (tmp_path / "nvshmem_bootstrap_mpi.so.3").touch()
    found = {finding.name: finding for finding in doctor_gpu.remote_transports(tmp_path, has_adapters=True)}
    assert found["nvshmem ucx"].found == "loads; to use it: NVSHMEM_REMOTE_TRANSPORT=ucx"
    assert "does not load: " in found["nvshmem libfabric"].found
    assert found["nvshmem libfabric"].advice == "needed only between hosts: install libfabric"
    assert found["nvshmem ibrc"].found == f"not in {tmp_path}"
    assert found["nvshmem bootstrap"].found == "by unique id: loads (installed: mpi, uid)"
    assert all(finding.fine for finding in found.values())
    without_adapters = doctor_gpu.remote_transports(tmp_path, has_adapters=False)
    assert not [finding.advice for finding in without_adapters if finding.advice]


def test_transports_over_rdma_need_the_verbs_library_too_and_a_missing_bootstrap_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "nvshmem_transport_ibrc.so.3").touch()
    problems = {doctor_gpu.VERBS: "no libibverbs"}
    ibrc, *_, bootstrap = doctor_gpu.remote_transports(tmp_path, True, lambda library: problems.get(library, ""))
    assert ibrc.found == "does not load: no libibverbs" and "libibverbs" in ibrc.advice
    assert not bootstrap.fine and "it is missing" in bootstrap.found


def test_pairs_of_gpus_that_do_not_reach_each_other_are_named() -> None:
    def in_one_half(a: int, b: int) -> bool:
        return a // 2 == b // 2

    apart = doctor_gpu.peer_access(4, in_one_half)
    assert apart.found == "2 of 6 pairs reach each other's memory; not 0-2, 0-3, 1-2, 1-3"
    assert "nvidia-smi topo -m" in apart.advice
    assert doctor_gpu.peer_access(4, lambda a, b: True).found == "6 of 6 pairs reach each other's memory"
    # Access in one direction is not enough.
    assert doctor_gpu.peer_access(2, lambda a, b: a < b).found.startswith("0 of 1")
    assert "fewer than two" in doctor_gpu.peer_access(1, in_one_half).found


@pytest.mark.parametrize(
    ("attributes", "found", "advised"),
    [
        ([{103: 1, 125: 1, 128: 1}] * 2, "memory is shared between processes by file descriptors, CUDA IPC", False),
        ([{103: 1}, {128: 1}], "GPU 0: file descriptors; GPU 1: fabric handles", True),
        ([{}], "by nothing", True),
        ([], "no GPU here", False),
    ],
)
def test_how_processes_share_a_gpus_memory_is_what_its_driver_says(
    attributes: list[dict[int, int]], found: str, advised: bool
) -> None:
    finding = doctor_gpu.memory_sharing(len(attributes), lambda number, gpu: attributes[gpu].get(number, 0))
    assert found in finding.found
    assert bool(finding.advice) == advised


def test_the_wheel_of_nvshmem_has_every_transport_that_is_looked_for() -> None:
    folder = nvshmem.library_folder()
    if folder is None:
        pytest.skip("nvidia-nvshmem-cu13 is not installed for this Python")
    findings = doctor_gpu.remote_transports(folder, has_adapters=True)
    assert [finding for finding in findings if "not in" in finding.found] == []
    assert findings[-1].found.startswith("by unique id: loads")
