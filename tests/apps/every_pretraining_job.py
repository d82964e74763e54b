"""`pretrain_llama.sh` in a real Slurm cluster of two nodes: batch jobs, allocations, cancelled jobs, dead ranks.
`make pretraining` runs these.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pretrain_script import SCRIPT, VARIABLES, environment_of, is_rank, processes
from support.pretrained import log_of
from support.slurm import Cluster, slurm_cluster

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def _log(folder: Path, job: int) -> str:
    path = folder / f"pretrain_llama-{job}.log"
    return path.read_text() if path.exists() else ""


def _wait_for(folder: Path, job: int, what: str) -> None:
    deadline = time.monotonic() + 90
    while not re.search(what, _log(folder, job)):
        assert time.monotonic() < deadline, _log(folder, job)
        time.sleep(0.1)


def test_a_batch_job_trains_over_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(SCRIPT, cwd=tmp_path, STEPS="8", **VARIABLES)
    assert cluster.wait(job) == "COMPLETED", _log(tmp_path, job)
    lines = _log(tmp_path, job).splitlines()
    assert lines[0].startswith("pretrain_llama: no GPU here, therefore CPU ranks; tiny, attention by distca, 2 ranks")
    losses = [step["loss"] for step in log_of(tmp_path / "logs" / f"pretrain-{job}")]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    assert f"step 8/8 | loss {losses[-1]:.4f}" in lines[-2]


def test_an_allocation_trains(cluster: Cluster, tmp_path: Path) -> None:
    said = cluster.run("salloc", "-N", "2", "bash", SCRIPT, "--steps", "2", cwd=tmp_path, **VARIABLES)
    assert "step 2/2 | loss" in said and "finished" in said


def test_more_nodes_than_allocated_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit("-N", "1", SCRIPT, cwd=tmp_path, **VARIABLES)
    assert cluster.wait(job) == "FAILED"
    assert _log(tmp_path, job) == ("pretrain_llama: error: NNODES is 2, and the allocation has 1 nodes: sbatch -N 2\n")


def test_a_cancelled_job_goes_on_where_it_was(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = cluster.submit(SCRIPT, cwd=tmp_path, STEPS="100000", RUN_DIR=str(run_dir), **VARIABLES)
    _wait_for(tmp_path, job, "step 2/")
    cluster.run("scancel", str(job))
    assert cluster.wait(job) == "CANCELLED"
    _wait_for(tmp_path, job, r"stopped after step \d+; the same command with RUN_DIR=")
    [stopped] = re.findall(r"stopped after step (\d+)", _log(tmp_path, job))
    job = cluster.submit(SCRIPT, cwd=tmp_path, STEPS=str(int(stopped) + 2), RUN_DIR=str(run_dir), **VARIABLES)
    assert cluster.wait(job) == "COMPLETED", _log(tmp_path, job)
    assert f"resumed after step {stopped}" in _log(tmp_path, job)
    assert [step["step"] for step in log_of(run_dir)] == list(range(1, int(stopped) + 3))


def test_a_job_whose_rank_is_killed_ends_at_once_and_names_it(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(SCRIPT, cwd=tmp_path, STEPS="100000", **VARIABLES)
    _wait_for(tmp_path, job, "step 1/")
    of_rank_1 = [pid for pid in processes() if b"SLURM_PROCID=1\0" in environment_of(pid) and is_rank(pid, job)]
    [killed] = of_rank_1
    os.kill(killed, signal.SIGKILL)
    begin = time.monotonic()
    assert cluster.wait(job, 20) == "FAILED"
    assert time.monotonic() - begin < 10
    last = _log(tmp_path, job).splitlines()[-1]
    # The greatest code of a task: the killed one's, or that of the other, where Slurm ended it before it ended itself.
    assert re.match(
        r"pretrain_llama: the job ended with exit code (137|143)\. First cause: srun: error: n2: task 1: Killed", last
    )
