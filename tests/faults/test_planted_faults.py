"""The faults of `make faults` still fit the sources: planting each takes hours, whether it can be planted no time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from faults import FAULTS
from faults.fault import Fault

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_names_tests_that_there_are(fault: Fault) -> None:
    assert fault.planted(ROOT) != (ROOT / fault.file).read_text()
    for named in fault.tests:
        file, *functions = named.split("::")
        text = (ROOT / file).read_text()
        assert all(re.search(rf"^def {re.escape(function.split('[')[0])}\(", text, re.M) for function in functions)


def test_a_fault_whose_text_is_gone_or_stands_twice_is_an_error_that_shows_it(tmp_path: Path) -> None:
    (tmp_path / "source.h").write_text("int a;\nint a;\n")
    for old, times in (("int a;", 2), ("int b;", 0)):
        with pytest.raises(ValueError, match=f"stands {times} times in source.h"):
            Fault("a fault", "source.h", old, "", ()).planted(tmp_path)


def test_no_two_faults_have_one_name() -> None:
    names = [fault.name for fault in FAULTS]
    assert sorted(set(names)) == sorted(names)
