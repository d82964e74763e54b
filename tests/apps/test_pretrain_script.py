"""`pretrain_llama.sh` finds its folder in a Slurm job, and starts a process for each GPU that it may use."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "pretrain_llama.sh"


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def _started(script: Path, programs: Path, *arguments: str, **variables: str) -> list[str]:
    """The arguments with which the script starts Python."""
    _program(programs / "python", "printf '%s\\n' \"$@\"")
    given = {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHON": str(programs / "python"), **variables}
    ran = subprocess.run(["bash", str(script), *arguments], env=given, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.parametrize(
    "arguments", [[], ["--steps", "3", "--data", "texts/a b"], ["--data", "/x/pretrain_llama.sh y"]]
)
def test_a_copy_that_slurm_runs_finds_the_folder_of_the_script(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    copy = shutil.copy(SCRIPT, tmp_path / "spool" / "slurm_script")
    command = "\n".join([f"   Command={' '.join(['/a b/pretrain_llama.sh', *arguments])}"] * 2)
    told = f"JobId=1 ArrayTaskId=1\n{command}\n   WorkDir=/elsewhere"
    _program(tmp_path / "scontrol", f"cat <<'END'\n{told}\nEND")
    started = _started(copy, tmp_path, *arguments, SLURM_JOB_ID="1")
    assert started == ["/a b/pretrain_llama.py", *arguments]


@pytest.mark.parametrize(
    ("visible", "ranks"), [({}, 4), ({"CUDA_VISIBLE_DEVICES": "2, 3"}, 2), ({"CUDA_VISIBLE_DEVICES": "GPU-5f"}, 1)]
)
def test_there_is_a_process_for_each_gpu_that_is_visible(visible: dict[str, str], ranks: int, tmp_path: Path) -> None:
    _program(tmp_path / "nvidia-smi", 'for number in 0 1 2 3; do echo "GPU $number: H100"; done')
    assert f"--nproc-per-node={ranks}" in _started(SCRIPT, tmp_path, **visible)


def test_without_a_visible_gpu_there_are_cpu_ranks(tmp_path: Path) -> None:
    _program(tmp_path / "nvidia-smi", "echo 'GPU 0: H100'")
    assert _started(SCRIPT, tmp_path, CUDA_VISIBLE_DEVICES="") == [str(SCRIPT.with_suffix(".py"))]
