"""`distca.launch`: what it returns, and how it reports every way in which a rank can fail."""

import ctypes
import gc
import importlib
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distca
from distca.connect import rank_process
from support.ranks import launch

launch_module = importlib.import_module("distca.connect.launch")


def _about_this_rank(greeting: str) -> tuple[str, int, list[str], int, float]:
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return greeting, dist.get_rank(), [os.environ[name] for name in names], torch.get_num_threads(), total.item()


def _fails_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise LookupError("no such thing as rank one")
    dist.barrier()


def _refuses() -> None:
    raise distca.InvalidArgumentError("steps = 0")


def _killed_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _hangs_when_rank_0_fails() -> None:
    if dist.get_rank() == 0:
        raise LookupError("the first failure")
    threading.Event().wait()


def _catches_that_nobody_joins() -> None:
    if dist.get_rank() == 0:
        with pytest.raises(distca.PeerTimeoutError, match="rank 0 waited 0.5 s, and rank 1 did not join"):
            distca.init(max_tokens=1, heads=distca.Heads(1, 1, 8), timeout=0.5)


def _returns_a_lock() -> object:
    return threading.Lock()


def _vanishes() -> None:
    os._exit(0)


def _leaves_a_child(file: str) -> None:
    """The child holds what it has inherited open, as workers of a data loader do. It ends by itself."""
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    Path(file).write_text(str(child))
    os._exit(3)


def test_values_come_back_in_rank_order_from_an_initialised_group() -> None:
    results = distca.launch(_about_this_rank, "hello", ranks=3, threads=1)
    assert results == [("hello", rank, [str(rank), str(rank), "3", "3"], 1, 6.0) for rank in range(3)]


def _is_collecting() -> tuple[bool, bool]:
    return gc.isenabled(), gc.get_threshold()[0] > 0


def test_ranks_collect_garbage_unless_their_program_does_not() -> None:
    assert launch(_is_collecting, ranks=1) == [(True, True)]
    without = importlib.import_module("support.without_collector")
    gc.enable()
    assert launch(without.is_collecting, ranks=1) == [(False, True)]


def test_threads_are_by_default_the_cores_of_the_program_over_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((7, 3), (1, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert distca.launch(torch.get_num_threads, ranks=2, start_method="forkserver") == [threads] * 2


def test_a_program_that_ignores_the_end_of_its_children_learns_how_ranks_ended() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert distca.launch(os.getenv, "RANK", ranks=1) == ["0"]
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGCHLD, before)


def _exits_with_a_stream_that_is(kind: str) -> None:
    sys.stdout = None if kind == "closed" else open("/dev/full", "w")  # noqa: SIM115
    print("something")
    rank_process.exit_now(0)


@pytest.mark.parametrize(("kind", "code"), [("closed", 0), ("full", 1)])
def test_an_exit_says_whether_what_was_printed_is_written(kind: str, code: int) -> None:
    with pytest.raises(distca.RankError, match=f"rank 0 of 1 exited with code {code} "):
        launch(_exits_with_a_stream_that_is, kind, ranks=1)


def test_forked_ranks_are_as_spawned_ones_and_see_the_environment_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other failures are tried with ranks that start fast, because reports do not depend on how ranks start."""
    for greeting in ("hello", "hello again"):
        monkeypatch.setenv("GREETING", greeting)
        results = launch(_about_this_rank, greeting, ranks=2)
        assert results == [(greeting, rank, [str(rank), str(rank), "2", "2"], 1, 3.0) for rank in range(2)]
        assert launch(os.getenv, "GREETING", ranks=1) == [greeting]
    monkeypatch.delenv("GREETING")
    assert launch(os.getenv, "GREETING", ranks=1) == [None]


def test_an_exception_names_its_rank_and_brings_its_traceback_not_that_of_the_echo() -> None:
    with pytest.raises(distca.DistcaError, match="rank 1 of 2 failed: LookupError: no such thing") as caught:
        launch(_fails_on_rank_1, ranks=2)
    assert caught.value.rank == 1
    assert "in _fails_on_rank_1" in str(caught.value)


def test_a_mistake_that_a_rank_finds_is_told_apart_from_a_failure() -> None:
    for function, mistake in ((_refuses, True), (_fails_on_rank_1, False)):
        with pytest.raises(distca.RankError) as caught:
            launch(function, ranks=2)
        assert caught.value.mistake == mistake


def test_a_killed_rank_is_named_with_its_signal() -> None:
    with pytest.raises(distca.DistcaError, match="rank 1 of 2 was killed by signal SIGKILL"):
        launch(_killed_on_rank_1, ranks=2)


def test_a_rank_that_hangs_after_another_failed_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "KNOWN_GRACE_SECONDS", 0.1)
    with pytest.raises(distca.DistcaError, match="rank 0 of 2 failed: LookupError: the first failure") as caught:
        launch(_hangs_when_rank_0_fails, ranks=2)
    assert "rank 1 then ended: did not end by itself" in str(caught.value)


def test_a_value_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(distca.DistcaError, match=r"rank 0 of 1 failed: .*returned lock cannot be pickled"):
        launch(_returns_a_lock, ranks=1)


def test_a_rank_that_exits_without_returning_is_an_error() -> None:
    with pytest.raises(distca.DistcaError, match="rank 0 of 1 exited with code 0 without returning"):
        launch(_vanishes, ranks=1)


def test_ranks_that_return_and_cannot_leave_their_group_together_say_so() -> None:
    with pytest.raises(distca.RankError) as caught:
        launch(_catches_that_nobody_joins, ranks=2)
    assert "exited with code 1 after its function had returned, because the ranks could not leave" in str(caught.value)
    assert "__main__" not in str(caught.value)


def test_a_rank_has_ended_though_a_process_that_it_forked_has_not(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(distca.RankError, match="rank 0 of 1 exited with code 3"):
        distca.launch(_leaves_a_child, str(tmp_path / "child"), ranks=1)
    took = time.monotonic() - begin
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert took < 25


PROGRAM = "import distca\ndef f():\n  return 1\nif __name__ == '__main__':\n  print(distca.launch(f, ranks=1))\n"


@pytest.mark.parametrize("how", ["-c", "-", "a folder", "-m"])
def test_a_function_that_no_process_can_import_is_refused_with_what_to_do(how: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder/__main__.py", tmp_path / "program.py"):
        path.write_text(PROGRAM)
    arguments = {"-c": ["-c", PROGRAM], "-": ["-"], "a folder": ["folder"], "-m": ["-m", "program"]}[how]
    program = [sys.executable, *arguments]
    ran = subprocess.run(program, input=PROGRAM, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    if how == "-m":
        assert ran.stdout == "[1]\n", ran.stderr
    else:
        assert "InvalidArgumentError: launch: f is defined where other processes cannot import it from" in ran.stderr


def test_wrong_arguments_are_refused_before_anything_starts() -> None:
    with pytest.raises(distca.InvalidArgumentError, match="importable"):
        distca.launch(lambda: None, ranks=1)
    with pytest.raises(distca.InvalidArgumentError, match="ranks is 0"):
        distca.launch(_vanishes, ranks=0)
    many: Any
    for many in ("2", 2.0, True):
        with pytest.raises(distca.InvalidArgumentError, match=f"ranks is {many!r}, must be an integer from 1 on"):
            distca.launch(_vanishes, ranks=many)
        with pytest.raises(distca.InvalidArgumentError, match=f"threads is {many!r}, must be an integer from 1 on"):
            distca.launch(_vanishes, ranks=1, threads=many)
    with pytest.raises(distca.InvalidArgumentError, match="threads is 0"):
        distca.launch(_vanishes, ranks=1, threads=0)
    with pytest.raises(distca.InvalidArgumentError, match="start_method is 'fork', must be one of spawn, forkserver"):
        distca.launch(_vanishes, ranks=1, start_method="fork")


def _page_faults_of_a_tensor_made_again() -> int:
    """What a tensor of 20 MiB costs after others that were freed. glibc first leaves gaps between aligned ones."""
    for _ in range(40):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(20 << 18)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library")
def test_ranks_keep_memory_that_they_have_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in rank_process._MALLOC_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    pages = (20 << 20) // resource.getpagesize()
    assert max(launch(_page_faults_of_a_tensor_made_again, ranks=2)) < pages // 100


@pytest.mark.parametrize("variable", ["GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_what_the_user_chose_of_freed_memory_stays(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in rank_process._MALLOC_VARIABLES:
        monkeypatch.delenv(each, raising=False)
    calls: list[tuple[int, int]] = []
    library = SimpleNamespace(mallopt=lambda *call: calls.append(call))
    monkeypatch.setattr(rank_process.ctypes, "CDLL", lambda _: library)
    monkeypatch.setenv(variable, "1")
    rank_process.keep_freed_memory()
    assert calls == []
    monkeypatch.delenv(variable)
    rank_process.keep_freed_memory()
    assert len(calls) == 2


def test_a_limit_of_open_files_that_is_too_low_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    used, hard = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = used + 200
    monkeypatch.setattr(launch_module, "_start", None)  # nothing comes as far as this call
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with pytest.raises(distca.OperatingSystemError) as caught:
            distca.launch(_about_this_rank, "hello", ranks=100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert re.fullmatch(
        rf"launch: 100 ranks may take 416 open files beside the \d+ of this process, whose limit is {limit}: raise it "
        r"with `ulimit -n (512|1024)`",
        str(caught.value),
    )


def _interrupts_the_rank_that_has_returned() -> str:
    """Rank 1 interrupts rank 0 once that has returned, which shows in the signals that rank 0 ignores."""
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    if dist.get_rank() == 1:
        status = Path(f"/proc/{int(pids[0])}/status")
        deadline = time.monotonic() + 20
        while not int(re.findall(r"SigIgn:\s*(\w+)", status.read_text())[0], 16) & 1 << signal.SIGINT - 1:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(int(pids[0]), signal.SIGINT)
    return "returned"


def test_a_rank_that_has_returned_is_not_interrupted_any_more() -> None:
    assert distca.launch(_interrupts_the_rank_that_has_returned, ranks=2) == ["returned"] * 2


class _UnreadableError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def _raise_unreadable() -> None:
    raise _UnreadableError


def test_an_exception_whose_text_cannot_be_read_is_told_by_its_type_with_its_traceback() -> None:
    with pytest.raises(distca.RankError) as caught:
        launch(_raise_unreadable, ranks=1)
    assert caught.value.exception == "_UnreadableError"
    assert "its text cannot be read: ValueError" in str(caught.value) and "_raise_unreadable" in str(caught.value)
