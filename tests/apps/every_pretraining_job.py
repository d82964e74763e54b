"""`pretrain_llama.sh` by bash, and in a real Slurm cluster of two nodes: batch jobs, allocations, cancelled jobs, dead
ranks. `make pretraining` runs these.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pretrained import log_of
from support.slurm import Cluster, slurm_cluster

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "pretrain_llama.sh")
VARIABLES = {
    "PYTHON": sys.executable,
    "NNODES": "2",
    "PP_SIZE": "2",
    "TOKENS_PER_RANK": "128",
}


def _start(folder: Path, **variables: str) -> subprocess.Popen[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return subprocess.Popen(
        ["bash", SCRIPT],
        env=own | VARIABLES | {"NNODES": "1", "RUN_DIR": str(folder / "run")} | variables,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _lines_until(process: subprocess.Popen[str], what: str) -> list[str]:
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if re.match(what, line):
            break
    return lines


def test_bash_trains_on_cpu_ranks_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    with _start(tmp_path, STEPS="100000") as process:
        lines = _lines_until(process, "step 2/")
        process.send_signal(signal.SIGTERM)
        lines += _lines_until(process, "never")
    assert process.returncode == 130, lines
    assert lines[0] == (
        "pretrain_llama: no GPU here, therefore CPU ranks; tiny, attention by distca, 2 ranks: data 1 x tensor 1 x "
        "pipeline 2"
    )
    assert re.fullmatch(r"stopped after step \d+; the same command with RUN_DIR=.*/run goes on", lines[-1])
    taken = len(log_of(tmp_path / "run"))
    goes_on = {"PP_SIZE": "1", "MICRO_BATCHES": "2", "EXPERIMENT_LOG_MEMORY_USAGE": "1"}
    with _start(tmp_path, STEPS=str(taken + 1), **goes_on) as process:
        lines = _lines_until(process, "never")
    assert process.returncode == 0, lines
    for rank in range(2):
        [begin, both, last] = map(json.loads, (tmp_path / "run" / f"memory-rank{rank}.jsonl").read_text().splitlines())
        assert [each["point"] for each in (begin, both, last)] == ["begin", "forward and backward", "optimizer"]
        assert begin["step"] == taken + 1 and both["rss_peak"] >= both["rss"] > begin["heap"] > 0
    assert f"resumed after step {taken}" in lines and lines[-1].startswith("finished; ")
    assert (tmp_path / "run" / f"step-{taken + 1}").is_dir() and list((tmp_path / "run" / "tensorboard").iterdir())
    with _start(tmp_path, STEPS=str(taken + 1), PP_SIZE="1", MICRO_BATCHES="2") as process:
        last = _lines_until(process, "never")[-1]
    assert process.returncode == 2 and f"the run in {tmp_path}/run has taken {taken + 1}: ask for more" in last
    with _start(tmp_path, SEED="7", STEPS=str(taken + 9)) as process:
        last = _lines_until(process, "never")[-1]
    assert process.returncode == 2 and "SEED is 7, and the run that is resumed has 0: set SEED=0, or" in last
    log = tmp_path / "run" / "log.jsonl"
    log.write_text(log.read_text().replace("loss", 'lo"ss', 1))
    with _start(tmp_path, STEPS=str(taken + 9)) as process:
        last = _lines_until(process, "never")[-1]
    assert process.returncode == 2 and f"line 1 of {log} is damaged: delete it, or name another --run-dir" in last


def test_bash_names_the_rank_that_died(tmp_path: Path) -> None:
    with _start(tmp_path, STEPS="100000") as process:
        _lines_until(process, "step 1/")
        [killed] = [pid for pid in _processes() if b"distca-rank-1" in _name(pid) and _is_of(process.pid, pid)]
        begin = time.monotonic()
        os.kill(killed, signal.SIGKILL)
        last = _lines_until(process, "never")[-1]
        assert time.monotonic() - begin < 5
    assert process.returncode == 1
    assert last == "pretrain_llama: error: rank 1 of 2 was killed by signal SIGKILL"


@pytest.mark.parametrize(
    ("variables", "arguments", "ranks"),
    [
        ({}, "", "2"),
        ({"TP_SIZE": "2", "PP_SIZE": "2"}, "", "4"),
        ({}, "--tp-size 2 --steps 3 --pp-size=2", "4"),
        ({"CP_SIZE": "8"}, "--cp-size 3", "3"),
        ({"TP_SIZE": "4", "RANKS_PER_NODE": "1"}, "", "1"),
        ({"RANKS": "6"}, "--tp-size 2", "6"),
    ],
)
def test_the_script_starts_as_many_cpu_ranks_as_the_sizes_need(
    tmp_path: Path, variables: dict[str, str], arguments: str, ranks: str
) -> None:
    """Also where sizes are given as arguments, which count more than variables."""
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/bash\necho "$RANKS ranks, ${@:2}"\n')
    stand_in.chmod(0o700)
    done = subprocess.run(
        ["bash", SCRIPT, *arguments.split()],
        env={"PATH": os.environ["PATH"], "PYTHON": str(stand_in)} | variables,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == (f"{ranks} ranks, {arguments}\n", "")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NNODES", "two", "NNODES is two, must be a positive whole number"),
        ("RANKS_PER_NODE", "0", "RANKS_PER_NODE is 0, must be a positive whole number"),
        ("TP_SIZE", "-1", "TP_SIZE is -1, must be a positive whole number"),
        ("STEPS", "1e3", "STEPS is '1e3': must be a whole number"),
        ("TOKENIZER", "/nowhere", "/nowhere"),
        ("DATA", "/nowhere", "/nowhere"),
        ("RUN_DIR", "/proc/run", r"--run-dir \(RUN_DIR\) is /proc/run, where nothing can be written"),
        ("ENABLE_NSYS", "1", "ENABLE_NSYS is 1, (and nsys is not on PATH|which needs a GPU: there is none here)"),
        ("ENABLE_NSYS", "yes", "ENABLE_NSYS is 'yes'; 1 .on. and 0 .off. are allowed"),
        ("EXPERIMENT_LOG_MEMORY_USAGE", "2", "EXPERIMENT_LOG_MEMORY_USAGE is '2'; 1 .on. and 0 .off. are allowed"),
        ("TRANSPORT", "carrier", "carrier"),
        ("PP_SIZE", "3", r"--pp-size \(PP_SIZE\) is 3, times --vpp-size 1 must divide the 4 layers"),
    ],
)
def test_a_wrong_variable_is_told_in_the_last_line(tmp_path: Path, name: str, value: str, said: str) -> None:
    with _start(tmp_path, **{name: value}) as process:
        lines = _lines_until(process, "never")
    assert process.returncode == 2, lines
    assert re.match(f"pretrain_llama: error: .*{said}", lines[-1]), lines
    assert not (tmp_path / "run" / "log.jsonl").exists()


#: What is swept by each script, and the runs that come of it.
SWEEPS = {
    "3d": ({"TOKENS": "64", "CP_SIZES": "1 2"}, ["64-cp1-context64", "64-cp2-context128", "64-cp2-context80"]),
    "4d": ({"TOKENS": "64 96"}, ["64-cp1-context64", "96-cp1-context80", "96-cp1-context96"]),
}


@pytest.mark.parametrize("script", SWEEPS)
def test_a_sweep_makes_a_table(tmp_path: Path, script: str) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    swept, runs = SWEEPS[script]
    sizes = {
        **swept,
        "CONTEXTS": "all 80",
        "ROUNDS": "2",
        "DOC_SCALE": "0.02",
        "LOGS": str(tmp_path / "logs"),
    }
    ran = subprocess.run(
        ["bash", str(ROOT / f"benchmarks/example-{script}-parallel/run{script}.sh"), "--layers", "2"],
        env=own | sizes | {"PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, (ran.stdout, ran.stderr)
    [folder] = (tmp_path / "logs").iterdir()
    table = (folder / "table.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| doc_lengths_pretrain")]
    runs = [f"doc_lengths_pretrain-tokens{run}" for run in runs]
    ways = ["distca", "distca, ping-pong", "without balance", "Megatron"]
    assert [row.split(" | ")[:2] for row in rows] == [[f"| {run}", way] for run in runs for way in ways]
    assert all(row in ran.stdout for row in rows)
    for line in (folder / "results.jsonl").read_text().splitlines():
        result = json.loads(line)
        for name, way in result["ways"].items():
            assert way["loss_difference"] < 1e-5 and len(way["seconds"]) == 2 and 0.5 < way["ratio"] * 2 < 100
            assert 1e8 < way["peak_memory"] < 1e10
            planned = way["imbalance"], way["bytes"], way["uneven"], way["waits"]
            assert planned == (None,) * 4 if name == "Megatron" else way["uneven"] > 0 and way["waits"] < 1
            assert (way["bytes"] or 0) > 0 or not name.startswith("distca")
        assert result["options"]["pp_size"] == (1 if script == "3d" else 2)
    assert (folder / "ways.png").stat().st_size > 5000 and "run" in (folder / "command.txt").read_text()


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
    of_rank_1 = [pid for pid in _processes() if b"SLURM_PROCID=1\0" in _environment(pid) and _is_rank(pid, job)]
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


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _name(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/comm").read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def _is_of(command: int, pid: int) -> bool:
    """Whether a command has started the process, or has started what it was forked from."""
    return command in (_parent(pid), _parent(_parent(pid)))


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() + b"\0"
    except OSError:
        return b""


def _is_rank(pid: int, job: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"pretrain_llama.py" in command and f"SLURM_JOB_ID={job}\0".encode() in _environment(pid)
