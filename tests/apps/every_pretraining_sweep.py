"""The sweeps of benchmarks/example-3d-parallel and example-4d-parallel on CPU ranks. `make pretraining` runs these."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.pretrain_script import ROOT, outside_of_slurm

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

#: What is swept by each script, and the runs that come of it.
SWEEPS = {
    "3d": ({"TOKENS": "64", "CP_SIZES": "1 2"}, ["64-cp1-context64", "64-cp2-context128", "64-cp2-context80"]),
    "4d": ({"TOKENS": "64 96"}, ["64-cp1-context64", "96-cp1-context80", "96-cp1-context96"]),
}


@pytest.mark.parametrize("script", SWEEPS)
def test_a_sweep_makes_a_table(tmp_path: Path, script: str) -> None:
    swept, runs = SWEEPS[script]
    sizes = {
        **swept,
        "CONTEXTS": "all 80",
        "ROUNDS": "2",
        "DOC_SCALE": "0.02",
        "LOGS": str(tmp_path / "logs"),
    }
    ran = subprocess.run(
        ["bash", str(ROOT / f"benchmarks/example-{script}-parallel/run{script}.sh"), "--layers", "2"],
        env=outside_of_slurm() | sizes | {"PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, (ran.stdout, ran.stderr)
    [folder] = (tmp_path / "logs").iterdir()
    table = (folder / "table.md").read_text()
    rows = [line for line in table.splitlines() if line.startswith("| doc_lengths_pretrain")]
    runs = [f"doc_lengths_pretrain-tokens{run}" for run in runs]
    ways = ["distca", "distca, ping-pong", "without balance", "Megatron"]
    assert [row.split(" | ")[:2] for row in rows] == [[f"| {run}", way] for run in runs for way in ways]
    assert all(row in ran.stdout for row in rows)
    for line in (folder / "results.jsonl").read_text().splitlines():
        result = json.loads(line)
        for name, way in result["ways"].items():
            assert way["loss_difference"] < 1e-5 and len(way["seconds"]) == 2 and 0.5 < way["ratio"] * 2 < 100
            assert 1e8 < way["peak_memory"] < 1e10
            planned = way["imbalance"], way["bytes"], way["uneven"], way["waits"]
            assert planned == (None,) * 4 if name == "Megatron" else way["uneven"] > 0 and way["waits"] < 1
            assert (way["bytes"] or 0) > 0 or not name.startswith("distca")
        assert result["options"]["pp_size"] == (1 if script == "3d" else 2)
    assert (folder / "ways.png").stat().st_size > 5000 and "run" in (folder / "command.txt").read_text()
