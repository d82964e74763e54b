"""Ranks of a command are forked from one process that has imported what they need, where that can be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = """
import os
import sys

from distca.apps.common.ranks import start_ranks

def of_rank():
    imported = "imported_first" in sys.modules
    import imported_first
    return imported, {os.getpid(): "itself", os.getppid(): "its parent"}[imported_first.BY], os.environ["RANK"]

if __name__ == "__main__":
    for result in start_ranks(of_rank, ranks=3, imports=["imported_first"]):
        print(*result)
"""

IMPORTED_FIRST = """
import os

class TakenApart:
    def __del__(self):
        os.write(2, b"taken apart at the end\\n")

BY = os.getpid()
_global = TakenApart()
"""


def _run(folder: Path, **variables: str) -> list[str]:
    (folder / "program.py").write_text(PROGRAM)
    (folder / "imported_first.py").write_text(IMPORTED_FIRST)
    environment = os.environ | {"PYTHONPATH": str(folder)} | variables
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    if sys.version_info >= (3, 11):  # earlier ones cannot leave out the working directory
        (elsewhere / "torch.py").write_text("raise RuntimeError('the working directory has a file of this name')")
    program = [sys.executable, folder / "program.py"]
    done = subprocess.run(program, env=environment, cwd=elsewhere, capture_output=True, text=True)
    said = (done.stdout + done.stderr).splitlines()
    return [line for line in said if not line.startswith("[Gloo]")]  # torch 2.10 does this


@pytest.mark.skipif(torch.version.cuda is not None, reason="PyTorch knows GPUs: ranks are spawned")
def test_ranks_are_forked_from_a_process_that_has_imported_what_they_need_and_ends_at_once(tmp_path: Path) -> None:
    assert _run(tmp_path) == ["True its parent 0", "True its parent 1", "True its parent 2"]


def test_ranks_are_spawned_where_that_process_finds_no_place_for_its_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("a path that is too long for a socket" * 4)
    folder.mkdir()
    said = _run(tmp_path, TMPDIR=str(folder))
    assert said == ["False itself 0", "False itself 1", "False itself 2"] + 3 * ["taken apart at the end"]
