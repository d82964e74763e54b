"""The plan has the same bits however the scheduler is compiled, because floating point guesses and integers decide."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import pytest

from support.compiled import COMPILER, Source, compiled_once

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests/plan/plan_digests.cpp"


def _digests(
    factory: pytest.TempPathFactory,
    name: str,
    sources: Sequence[Source],
    options: Sequence[str],
    link: Sequence[str] = (),
) -> list[str]:
    """What the program prints when it is compiled with these options."""
    program = compiled_once(factory, name, sources, ["-std=c++20", f"-I{ROOT / 'cpp'}", *options], link)
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="there is no C++ compiler here")
def test_plans_are_the_same_for_a_plain_processor_and_for_all_that_this_one_can(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    library = files("distca")  # compiled for any processor of this kind
    link = ["-L", str(library), "-ldistca", f"-Wl,-rpath,{library}"]
    plain = _digests(tmp_path_factory, "plain_plans", [PROGRAM], ["-O0"], link)
    assert len(plain) == 2 * 48
    assert len(set(plain)) > 48, "these plans are too much alike to show anything"
    scheduler = [path for path in sorted((ROOT / "cpp/plan").glob("*.cpp")) if path.name != "validate.cpp"]
    options = ["-O1", "-ftree-vectorize", "-march=native"]
    assert plain == _digests(tmp_path_factory, "native_plans", [PROGRAM, scheduler], options)
