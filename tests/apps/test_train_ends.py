"""How runs of `distca train` end before their last step: by signals, and by the death of a rank."""

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distca.apps.common.stopping import StopRequest
from distca.apps.train.checkpoint import whole_checkpoints
from distca.apps.train.step import BALANCED, compared_step, train_step
from support.train_runs import command, metrics_of, one_rank, ranks_of, start, summary_of, write_texts


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "data")


def _wait_for_first_step(tmp_path: Path, process: subprocess.Popen[str]) -> None:
    path = tmp_path / "runs" / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (path.exists() and path.stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no step within 120 seconds"
        time.sleep(0.01)


def _assert_gone(pids: dict[str, int]) -> None:
    for name, pid in pids.items():
        assert not Path(f"/proc/{pid}").exists(), f"{name} is still there"


@pytest.mark.parametrize(("number", "num_ranks"), [(signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_an_interrupt_ends_all_ranks_after_a_whole_step_with_the_summary(
    number: signal.Signals, num_ranks: int, data: Path, tmp_path: Path
) -> None:
    arguments = command(tmp_path, "--steps", "100000", "--ranks", str(num_ranks))
    with tempfile.TemporaryDirectory() as temporary:  # its path is short enough for sockets
        with start(arguments, env=os.environ | {"TMPDIR": temporary}) as process:
            _wait_for_first_step(tmp_path, process)
            ranks = ranks_of(process)
            process.send_signal(number)
            out, err = process.communicate(timeout=150)
        assert not os.listdir(temporary), "a folder for temporary files is left"
    assert (process.returncode, sorted(ranks)) == (130, [f"distca-rank-{rank}" for rank in range(num_ranks)]), err
    summary = summary_of(tmp_path)
    assert summary["interrupted"] and summary["steps"] == len(metrics_of(tmp_path)) < 100000
    assert list(whole_checkpoints(tmp_path / "runs" / "run")) == [summary["steps"]]
    assert f"stopped after {summary['steps']} steps" in out
    assert "Traceback" not in err
    _assert_gone(ranks)


def test_a_request_that_comes_during_a_step_ends_the_run_after_it() -> None:
    request, nothing = StopRequest(), SimpleNamespace(step=lambda: None)

    def forward_backward(trained: Any, watch: Any) -> tuple[torch.Tensor, int]:
        request.requested = True
        return torch.tensor(2.0), 1

    trained: Any = SimpleNamespace(
        clip=lambda: None, total_norm=lambda: 1.0, optimizer=nothing, schedule=nothing, dtype=torch.float32
    )
    work: Any = SimpleNamespace(forward_backward=forward_backward)
    with one_rank():
        assert train_step(trained, work, request, 0.0).interrupted
        request.requested = False
        assert compared_step(trained, [(BALANCED, work)], request, 0.0).interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_all_processes_of_the_command_ends_it_in_good_order(
    number: signal.Signals, data: Path, tmp_path: Path
) -> None:
    """As `timeout` and batch systems send it."""
    with start(command(tmp_path, "--steps", "100000"), start_new_session=True) as process:
        _wait_for_first_step(tmp_path, process)
        ranks = ranks_of(process)
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=150)
    summary = summary_of(tmp_path)
    assert (process.returncode, len(ranks), "Traceback" in err) == (130, 2, False), err
    assert list(whole_checkpoints(tmp_path / "runs" / "run")) == [summary["steps"]]
    assert f"stopped after {summary['steps']} steps" in out
    _assert_gone(ranks)


def test_a_rank_that_is_killed_ends_the_run_with_an_error_that_names_it(data: Path, tmp_path: Path) -> None:
    with start(command(tmp_path, "--steps", "100000")) as process:
        _wait_for_first_step(tmp_path, process)
        ranks = ranks_of(process)
        os.kill(ranks["distca-rank-1"], signal.SIGKILL)
        _, err = process.communicate(timeout=150)
    assert process.returncode == 1
    assert err.splitlines()[-1] == "distca train: error: rank 1 of 2 was killed by signal SIGKILL"
    assert "Traceback" not in err
    _assert_gone(ranks)
