"""The tables of the GPU's put and reduce kernels, carried out on the host without a GPU or a CUDA compiler."""

from __future__ import annotations

import re
import subprocess

from support.programs import PUT_TABLES


def test_put_and_reduce_tables_move_and_add_what_plain_loops_do() -> None:
    ran = subprocess.run([PUT_TABLES.path()], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    counts = re.fullmatch(r"(\d+) sums, (\d+) of them carried to a later round\n", ran.stdout)
    assert counts is not None and int(counts[1]) > 100 and int(counts[2]) > 100, ran.stdout
