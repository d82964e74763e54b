"""The CPU's kernel on problems whose documents have different masks, windows, scales and softcaps.

tests/sanitize/kernel_stress.cpp makes them. It compares the bits of each document with those of the document alone. The
other tests of this folder compare documents alone with PyTorch.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from support.compiled import COMPILER, compiled_once

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C++ compiler here")


def test_a_document_has_the_same_bits_alone_and_beside_one_with_other_scores(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Random documents on every instruction set of this machine, and problems with wrong scores, which are refused."""
    library = str(files("distca"))
    program = compiled_once(
        tmp_path_factory,
        "kernel_stress",
        [ROOT / "tests/sanitize/kernel_stress.cpp"],
        ["-std=c++20", "-O1", f"-I{ROOT / 'cpp'}"],
        ["-L", library, "-ldistca", f"-Wl,-rpath,{library}", "-lpthread"],
    )
    done = subprocess.run([program, "20"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "instruction sets, 20 problems each" in done.stdout
