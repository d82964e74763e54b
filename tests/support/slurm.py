"""A Slurm cluster of two nodes on this machine, with daemons, ports and keys of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

#: Debian's packages are slurmctld, slurmd, slurm-client and munge.
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "salloc", "scancel", "squeue", "sinfo", "munged")
NODES = ("n1", "n2")


class Cluster:
    """Runs Slurm's commands for this cluster."""

    def __init__(self, folder: Path) -> None:
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))
        }
        self.environment["SLURM_CONF"] = str(folder / "slurm.conf")

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """Runs a command to its end. Returns what it printed."""
        ran = subprocess.run(
            command, env=self.environment | variables, cwd=cwd, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, (command, ran.stdout, ran.stderr)
        return ran.stdout

    def submit(self, *command: str, cwd: Path, **variables: str) -> int:
        """Submits a batch job. Returns its number."""
        return int(self.run("sbatch", "--parsable", *command, cwd=cwd, **variables))

    def wait(self, job: int, seconds: float = 120) -> str:
        """Waits until a job has ended. Returns its state."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            about = self.run("scontrol", "show", "job", str(job))
            state = about.split("JobState=")[1].split()[0]
            if state not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
                return state
            time.sleep(0.1)
        raise AssertionError(f"job {job} is {state} after {seconds:g} s")


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Starts the cluster, or skips the test where Slurm is not installed or the user is not root."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin") is None]
    if missing or os.geteuid() != 0:
        pytest.skip(
            f"needs root, and Debian's slurmctld, slurmd, slurm-client and munge: missing are {missing or 'none'}"
        )
    for name in ("state", "spool", "log"):
        (folder / name).mkdir(parents=True)
    key, munge_socket = folder / "munge.key", folder / "munge.socket"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    ports = [_free_port() for _ in range(1 + len(NODES))]
    host = socket.gethostname()
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={ports[0]}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={munge_socket}",
        "CredType=cred/munge",
        "SlurmUser=root",
        "SlurmdUser=root",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/log/slurmctld",
        f"SlurmdLogFile={folder}/log/slurmd-%n",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "ReturnToService=2",
        "MinJobAge=3600",
        "PartitionName=main Nodes=ALL Default=YES State=UP",
        *(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={os.cpu_count()}"
            for node, port in zip(NODES, ports[1:], strict=True)
        ),
    ]
    (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
    cluster = Cluster(folder)
    environment = cluster.environment | {"PATH": cluster.environment["PATH"] + ":/usr/sbin"}
    munged = ["munged", "--foreground", "--force", f"--socket={munge_socket}", f"--key-file={key}"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
    daemons = []
    try:
        for command in (munged, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)):
            daemons.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            if command is munged:
                _wait_until(munge_socket.exists, "munged")
        _wait_until(lambda: _idle(cluster) == len(NODES), "two idle nodes")
        yield cluster
    finally:
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            cluster.run("scancel", "--user", "root")
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()


def _idle(cluster: Cluster) -> int:
    found = subprocess.run(
        ["sinfo", "-h", "-t", "idle", "-o", "%D"], env=cluster.environment, capture_output=True, text=True, timeout=60
    )
    return int(found.stdout or 0)


def _wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline, f"no {what} within 30 s"
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
