"""The emulated CUDA runtime itself: wrong use is noticed, and captures of streams obey CUDA's rules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from emulation.emulated_gpu import EmulatedGpu

MISUSE = {
    "free_what_a_kernel_reads": "freed that is still to be used by add_kernel",
    "free_the_source_of_a_copy": "freed that is still to be used by copy",
    "free_twice": "freed before",
    "launch_a_graph_over_freed_memory": "graph uses memory that was freed",
    "read_freed_memory": "set_kernel uses memory that was freed",
    "copy_beyond_the_end": "a copy goes beyond an allocation",
    "use_a_destroyed_event": "an event is used that was destroyed",
    "use_a_destroyed_stream": "a stream is used that was destroyed",
    "launch_no_block": "set_kernel is launched with a wrong grid",
    "launch_too_many_threads": "more than 1024 threads a block",
    "leave_threads_at_a_barrier": "of the 128 threads of a block of uneven_kernel 28 have ended",
    "write_beyond_the_end": "",  # this case ends with a segmentation fault
}


@pytest.mark.parametrize("which", MISUSE)
def test_wrong_use_ends_the_program_and_says_why(emulated_library: Path, which: str) -> None:
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).misuse(sys.argv[2].encode())"
    command = [sys.executable, "-S", "-c", code, str(emulated_library), which]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode < 0, done
    assert MISUSE[which] in done.stderr


@pytest.mark.parametrize(
    ("which", "result"),
    {
        "reuse_a_source_too_early": 2,  # the value that was written there after the copy was queued
        # The result is 1 if the call waits for the device, as the driver may. That of a kernel has a digit for its
        # first start, which waits, and one for its second, which does not.
        "free_something": 1,
        "allocate_page_locked_memory": 1,
        "allocate_memory_of_the_device": 0,
        "start_a_kernel_for_the_first_time": 10,
        "values_with_a_barrier": 0,
        "replay_a_fork_and_join": 1115,  # 2 x 5 + 1 is 11, and 2 x 7 + 1 is 15
        "replay_branches_that_wait_for_each_other": 0,
        # These are CUDA's numbers of errors: 1000 times that of the call, plus that of the end of the capture.
        "wait_for_an_event_from_outside": 905_901,
        "wait_outside_for_an_event_of_a_capture": 907_000,
        "leave_a_stream_unjoined": 904,
        "synchronise_a_capturing_stream": 900_901,
        "synchronise_the_device": 900_901,
        "query_a_captured_event": 907_901,
        "query_another_event": 900_901,
        "allocate": 900_901,
        "allocate_relaxed": 0,
        "allocate_in_a_relaxed_capture": 0,
        "allocate_elsewhere": 900_901,
        "allocate_elsewhere_thread_local": 0,
        "allocate_elsewhere_of_a_thread_local_capture": 0,
        "merge_two_captures": 902_901,
        "end_in_another_thread": 908_000,
        "end_another_stream": 903_000,
        "begin_twice": 401_000,
    }.items(),
)
def test_copies_barriers_and_captures_do_what_the_manual_says(gpu: EmulatedGpu, which: str, result: int) -> None:
    assert gpu.outcome(which) == result
    if which == "start_a_kernel_for_the_first_time":
        assert gpu.was_loaded_by_a_launch("new_kernel")


def test_a_barrier_that_is_missing_shows_in_what_a_kernel_computes(gpu: EmulatedGpu) -> None:
    assert gpu.outcome("values_without_a_barrier") > 0
