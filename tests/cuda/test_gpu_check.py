"""What benchmarks/gpu_check.sh does with the tools that it finds: programs that do nothing stand for all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _program(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


def test_the_program_that_checks_attention_is_made_by_the_compiler_of_the_build(tmp_path: Path) -> None:
    """CUDACXX may name one that is not on PATH, or another than the one that is."""
    tools, out = tmp_path / "tools", tmp_path / "out"
    compiler = _program(
        tmp_path / "cuda/bin/nvcc",
        'while [ "$1" != -o ]; do shift; done',
        'printf \'#!/bin/sh\\necho all right\\n\' >"$2"; chmod +x "$2"',
    )
    _program(tools / "nvcc", "exit 3")
    _program(
        tools / "cmake",
        f'[ "$1" = -S ] && mkdir -p "$4" && echo "CMAKE_CUDA_COMPILER:STRING={compiler}" >"$4/CMakeCache.txt"',
        "exit 0",
    )
    _program(tools / "nvidia-smi", "echo 9.0")
    python = _program(tools / "python", f'[ "$1" = - ] && exec {sys.executable} "$@"', "exit 0")
    path = f"{tools}:{os.environ['PATH']}"
    done = subprocess.run(
        [ROOT / "benchmarks/gpu_check.sh", out],
        env=os.environ | {"PATH": path, "PYTHON": str(python)},
        capture_output=True,
        text=True,
    )
    steps = json.loads((out / "gpu_check.json").read_text())["steps"]
    assert steps["check-attention"]["exit"] == 0, done.stdout + (out / "gpu_check.log").read_text()
    assert "all right" in (out / "gpu_check.log").read_text()
