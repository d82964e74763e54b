"""The commands other than `distca train`: what they print and write, and how they report mistakes."""

import errno
import io
import json
import logging
import os
import re
import sys
from pathlib import Path

import pytest
import torch

import distca
from distca.apps.bench import overhead
from distca.apps.cli import main
from distca.apps.common.machine import setting
from distca.apps.doctor.finding import Finding


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


def test_results_name_the_command_as_a_shell_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/distca", "bench", "when-it-pays", "--only", "documents: equal"])
    assert setting()["command"] == "distca bench when-it-pays --only 'documents: equal'"


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


def test_a_name_that_the_terminal_cannot_show_is_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(said, "ascii", write_through=True))
    assert main(["report", str(tmp_path / "na\u00efve\udcff")]) == 2
    assert b"na\\xefve\\udcff" in said.getvalue()


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [(errno.EPIPE, 141, ""), (errno.ENOSPC, 1, "distca doctor: error: [Errno 28] No space left on device\n")],
)
def test_what_stdout_does_not_take_is_no_traceback(
    number: int, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr("distca.apps.doctor.command.run", lambda options: 0)
    assert main(["doctor"]) == code
    assert capsys.readouterr().err == said


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"distca {distca.__version__}\n"


def test_doctor_calls_nothing_ok_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    missing = [
        line for line in lines if re.search(r"not installed|not built|not available|none:|no GPU|no device", line)
    ]
    assert missing if not torch.cuda.is_available() else True
    assert all(line.startswith("-- ") for line in missing), missing
    assert str(Finding("thing", "gone", False, absent=True)).startswith("!! ")


def test_a_context_says_in_the_log_what_it_is_and_when_it_closes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="distca")
    with distca.init(max_tokens=8, heads=distca.Heads(2, 1, 16), name="logged"):
        assert "context 'logged': rank 0 of 1 over loopback on cpu, a heap of 8,388,608 bytes" in caplog.text
    assert "context 'logged': closed after 0 steps" in caplog.text
