"""`pretrain_llama.sh` by bash: runs that stop and go on, dead ranks, wrong variables. `make pretraining` runs these."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from support.pretrain_script import SCRIPT, is_of, lines_until, name_of, processes, start
from support.pretrained import log_of

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)


def test_bash_trains_on_cpu_ranks_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    with start(tmp_path, STEPS="100000") as process:
        lines = lines_until(process, "step 2/")
        process.send_signal(signal.SIGTERM)
        lines += lines_until(process, "never")
    assert process.returncode == 130, lines
    assert lines[0] == (
        "pretrain_llama: no GPU here, therefore CPU ranks; tiny, attention by distca, 2 ranks: data 1 x tensor 1 x "
        "pipeline 2"
    )
    assert re.fullmatch(r"stopped after step \d+; the same command with RUN_DIR=.*/run goes on", lines[-1])
    taken = len(log_of(tmp_path / "run"))
    goes_on = {"PP_SIZE": "1", "MICRO_BATCHES": "2", "EXPERIMENT_LOG_MEMORY_USAGE": "1"}
    with start(tmp_path, STEPS=str(taken + 1), **goes_on) as process:
        lines = lines_until(process, "never")
    assert process.returncode == 0, lines
    for rank in range(2):
        [begin, both, last] = map(json.loads, (tmp_path / "run" / f"memory-rank{rank}.jsonl").read_text().splitlines())
        assert [each["point"] for each in (begin, both, last)] == ["begin", "forward and backward", "optimizer"]
        assert begin["step"] == taken + 1 and both["rss_peak"] >= both["rss"] > begin["heap"] > 0
    assert f"resumed after step {taken}" in lines and lines[-1].startswith("finished; ")
    assert (tmp_path / "run" / f"step-{taken + 1}").is_dir() and list((tmp_path / "run" / "tensorboard").iterdir())
    with start(tmp_path, STEPS=str(taken + 1), PP_SIZE="1", MICRO_BATCHES="2") as process:
        last = lines_until(process, "never")[-1]
    assert process.returncode == 2 and f"the run in {tmp_path}/run has taken {taken + 1}: ask for more" in last
    with start(tmp_path, SEED="7", STEPS=str(taken + 9)) as process:
        last = lines_until(process, "never")[-1]
    assert process.returncode == 2 and "SEED is 7, and the run that is resumed has 0: set SEED=0, or" in last
    log = tmp_path / "run" / "log.jsonl"
    log.write_text(log.read_text().replace("loss", 'lo"ss', 1))
    with start(tmp_path, STEPS=str(taken + 9)) as process:
        last = lines_until(process, "never")[-1]
    assert process.returncode == 2 and f"line 1 of {log} is damaged: delete it, or name another --run-dir" in last


def test_bash_names_the_rank_that_died(tmp_path: Path) -> None:
    with start(tmp_path, STEPS="100000") as process:
        lines_until(process, "step 1/")
        [killed] = [pid for pid in processes() if b"distca-rank-1" in name_of(pid) and is_of(process.pid, pid)]
        begin = time.monotonic()
        os.kill(killed, signal.SIGKILL)
        last = lines_until(process, "never")[-1]
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
    with start(tmp_path, **{name: value}) as process:
        lines = lines_until(process, "never")
    assert process.returncode == 2, lines
    assert re.match(f"pretrain_llama: error: .*{said}", lines[-1]), lines
    assert not (tmp_path / "run" / "log.jsonl").exists()
