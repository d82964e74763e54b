"""The code of the CUDA kernels, run on a host: every thread is a fiber, and software does the GPU's instructions.

The results are compared with float64 on random problems, where every row that must not be read is NaN. Every second
problem has two documents with different masks, windows, scales or softcaps. The machine stops a kernel that hangs,
leaves a barrier half used, or reads what no fence has ordered.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.programs import RUN_KERNELS


@pytest.fixture(scope="module")
def program() -> Path:
    return RUN_KERNELS.path()


def _run(program: Path, *arguments: object) -> None:
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{arguments}: status {done.returncode}\n{done.stdout[-4000:]}{done.stderr}"
    assert "rms" in done.stdout


SHAPES = pytest.mark.parametrize(
    ("dim", "v_dim", "dtype", "rounds"),
    [
        (64, 64, "bfloat16", 5),
        (64, 64, "float16", 3),
        (128, 128, "bfloat16", 3),
        (96, 80, "float16", 3),  # the kernel for 128 columns fills the others with zeros
        (192, 128, "bfloat16", 2),
        (256, 256, "bfloat16", 2),
        (512, 512, "bfloat16", 2),
        (264, 24, "float16", 2),  # the second pass has eight columns of dk and none of dv
    ],
)


FAMILIES = pytest.mark.parametrize("family", ["hopper", "ampere"])


@SHAPES
@FAMILIES
def test_forward_is_right_and_a_row_has_the_same_bits_however_tasks_are_cut(
    program: Path, family: str, dim: int, v_dim: int, dtype: str, rounds: int
) -> None:
    _run(program, family, "forward", dim, v_dim, dtype, rounds, 1)


def test_forward_is_right_over_more_keys_than_the_producer_knows_blocks_of_at_a_time(program: Path) -> None:
    _run(program, "hopper", "long", 64, 64, "bfloat16", 1, 2)


@FAMILIES
def test_groups_add_to_gradients_in_their_order_whatever_the_blocks_in_which_they_have_the_rows(
    program: Path, family: str
) -> None:
    """Problems in which an item has to wait for several others, and for both of their warpgroups."""
    _run(program, family, "backward", 64, 64, "bfloat16", 12, 11)


@SHAPES
@FAMILIES
def test_backward_is_right_and_dq_has_the_same_bits_in_the_deterministic_mode(
    program: Path, family: str, dim: int, v_dim: int, dtype: str, rounds: int
) -> None:
    _run(program, family, "backward", dim, v_dim, dtype, rounds, 1)
