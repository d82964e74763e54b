"""The emulated machine, on which the attention kernels are tested: it notices what breaks a rule of an instruction.

A GPU would compute wrong numbers, hang, or compute the right ones by luck.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.programs import MISUSE

BROKEN = {
    "read_what_was_stored_without_a_fence": "the asynchronous proxy met a store that no fence had followed",
    "load_over_what_was_stored_without_a_fence": "the asynchronous proxy met a store that no fence had followed",
    "fence_in_another_thread": "the asynchronous proxy met a store that no fence had followed",
    "load_with_an_unknown_barrier": "a barrier that no fence has made known",
    "load_by_a_map_that_was_not_acquired": "a map is used that was not acquired",
    "load_what_a_signal_announced_without_a_fence": "a signal that no fence of all memory has followed",
    "end_before_a_copy": "a CTA ended before its copies did",
    "expect_too_many_bytes": "more bytes than a barrier can count",
    "disagree_about_a_named_barrier": "threads disagree on the size of a named barrier",
    "come_to_a_named_barrier_with_half_a_warp": "a part of a warp comes to a named barrier",
    "leave_a_named_barrier": "a kernel ended with threads that had arrived at a named barrier",
    "use_an_unknown_named_barrier": "a named barrier that does not exist",
    "multiply_before_products_are_begun": "a product is started before products are begun",
    "multiply_again_after_a_group": "a product is started before products are begun",
    "multiply_what_is_not_aligned": "an operand at an address off 1024",
    "multiply_with_three_warps": " its products",
    "lower_the_registers_of_three_warps": " the registers of its warpgroup",
    "raise_registers_beyond_what_there_is": " registers that others give back",
    "end_before_a_group_of_copies": "a CTA ended before its copies did",
    "end_before_copies_are_a_group": "a thread ended before it had made its copies a group",
    "copy_to_what_is_not_aligned": "an access that is not aligned",
    "copy_from_what_is_not_aligned": "an access that is not aligned",
    "load_matrices_that_are_not_aligned": "an access that is not aligned",
    "load_matrices_beyond_shared_memory": "an access beyond shared memory",
    "load_matrices_otherwise_in_a_lane": "the lanes of a warp execute different instructions",
    "multiply_with_half_a_warp": " the lanes of its warp",
    "come_to_a_barrier_before_the_end_of_products": "a barrier comes before the end of a warp's products",
    "end_before_the_end_of_products": "a thread ended before the end of its warp's products",
}


@pytest.fixture(scope="module")
def program() -> Path:
    return MISUSE.path()


def _run(program: Path, which: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, which], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("which", BROKEN)
def test_a_broken_rule_ends_the_program_and_is_named(program: Path, which: str) -> None:
    done = _run(program, which)
    assert done.returncode == 2, done
    assert BROKEN[which] in done.stderr


def test_a_kernel_that_keeps_the_rules_runs_to_its_end(program: Path) -> None:
    done = _run(program, "nothing")
    assert done.returncode == 0, done
