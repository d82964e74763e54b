"""The commands beside `distca train`: what they print and write, and what they say of mistakes."""

import json
from pathlib import Path

import pytest

from distca.bench import overhead
from distca.cli import main


def test_bench_prints_a_table_and_writes_figures_with_what_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overhead, "ROWS", 64)
    path = tmp_path / "results" / "overhead.json"
    assert main(["bench", "overhead", "--rounds", "2", "--json", str(path)]) == 0
    assert "core_attention / local attention" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert [row["unit"] for row in written["rows"]] == ["x", "ms"]
    assert all(row["value"] > 0 for row in written["rows"])
    assert written["details"] == {"rows": 64, "heads": 8, "dim": 64, "dtype": "float32", "pairs": 2}
    assert {"command", "cpu", "threads", "python", "torch", "distca"} <= written.keys()


def test_bench_refuses_a_number_of_rounds_below_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "overhead", "--rounds", "0"]) == 2
    assert "--rounds is 0, must be at least 1" in capsys.readouterr().err


def test_doctor_names_the_instruction_set_in_use_and_one_that_this_cpu_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTCA_CPU_ISA", "plain")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "plain (forced by DISTCA_CPU_ISA)" in out
    assert all(f"ok transport {name}" in out for name in ("shm", "torch"))
    monkeypatch.setenv("DISTCA_CPU_ISA", "vax")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "!! cpu kernel" in out and "this CPU and build allow" in out
