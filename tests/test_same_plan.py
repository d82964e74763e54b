"""The same plan to the last bit, however the scheduler is compiled: floating point guesses, integers decide."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILER = os.environ.get("CXX") or shutil.which("c++") or "c++"


def _digests(folder: Path, *options: str) -> list[str]:
    """What the program prints when compiled with these options."""
    program = folder / "plan_digests"
    sources = [str(path) for path in sorted((ROOT / "cpp/plan").glob("*.cpp")) if path.name != "validate.cpp"]
    command = [
        COMPILER,
        "-std=c++20",
        *options,
        "-I",
        str(ROOT / "cpp"),
        str(ROOT / "tests/plan_digests.cpp"),
        *sources,
    ]
    built = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C++ compiler here")
def test_plans_are_the_same_for_a_plain_processor_and_for_all_that_this_one_can(tmp_path: Path) -> None:
    for name in ("plain", "native"):
        (tmp_path / name).mkdir()
    plain = _digests(tmp_path / "plain", "-O1")
    assert len(plain) == 2 * 48
    assert len(set(plain)) > 48, "these plans are too much alike to show anything"
    assert plain == _digests(tmp_path / "native", "-O2", "-ftree-vectorize", "-march=native")
