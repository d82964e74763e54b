"""The tables of the GPU's put and reduce kernels, carried out on the host without a GPU or a CUDA compiler."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from support.compiled import COMPILER, compiled_once

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C++ compiler here")
def test_put_and_reduce_tables_move_and_add_what_plain_loops_do(tmp_path_factory: pytest.TempPathFactory) -> None:
    sources = [ROOT / "tests/transport/put_tables.cpp"]
    library = files("distca")
    # Undefined behaviour ends the program; a misaligned access is one.
    options = ["-std=c++20", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    includes = [f"-I{ROOT / 'cpp'}"]
    link = ["-L", str(library), "-ldistca", f"-Wl,-rpath,{library}"]
    program = compiled_once(tmp_path_factory, "transport_tables", sources, [*options, *includes], link)
    ran = subprocess.run([program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    counts = re.fullmatch(r"(\d+) sums, (\d+) of them carried to a later round\n", ran.stdout)
    assert counts is not None and int(counts[1]) > 100 and int(counts[2]) > 100, ran.stdout
