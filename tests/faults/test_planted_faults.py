"""The faults of `make faults` fit the sources. Planting them takes long; checking that they can be planted does not."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from faults import FAULTS
from faults.fault import Fault
from faults.planted_faults import of_part, part_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted_and_names_tests_that_there_are(fault: Fault) -> None:
    file, text = fault.planted(ROOT)
    assert file == ROOT / fault.file and text != file.read_text()
    for named in fault.tests:
        file, *functions = named.split("::")
        text = (ROOT / file).read_text()
        assert all(re.search(rf"^def {re.escape(function.split('[')[0])}\(", text, re.M) for function in functions)


SOURCE = """int wait(int peer, int round) {
  if (peer == rank_)
    return 0;
  signals_.wait(peer, round);
  return 1;
}
"""
FAULT = Fault("a fault", "cpp/a.cpp", "  signals_.wait(peer, round);\n", "  signals_.wait(round, peer);\n", ())


def _tree(folder: Path, file: str, text: str) -> Path:
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text)
    return folder


def test_a_fault_finds_its_place(tmp_path: Path) -> None:
    tree = _tree(tmp_path, "cpp/a.cpp", SOURCE)
    assert FAULT.planted(tree) == (tree / "cpp/a.cpp", SOURCE.replace("peer, round);", "round, peer);"))


def test_a_fault_finds_its_place_where_line_breaks_have_changed(tmp_path: Path) -> None:
    text = SOURCE.replace("wait(peer, round)", "wait(\n      peer, round)")
    tree = _tree(tmp_path, "cpp/a.cpp", text)
    planted = text.replace("  signals_.wait(\n      peer, round);", "  signals_.wait(round, peer);")
    assert FAULT.planted(tree) == (tree / "cpp/a.cpp", planted)


@pytest.mark.parametrize(
    "text", [SOURCE * 2, SOURCE.replace("signals_.wait(peer, round)", "poll()"), SOURCE.replace("peer", "source"), ""]
)
def test_a_fault_whose_words_are_gone_or_stand_twice_is_an_error_that_shows_it(text: str, tmp_path: Path) -> None:
    said = r"[02] places of cpp/a.cpp have the words of its piece.*\n  signals_.wait\(peer"
    with pytest.raises(ValueError, match=said):
        FAULT.planted(_tree(tmp_path, "cpp/a.cpp", text))


def test_a_fault_whose_file_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0 places of cpp/a.cpp"):
        FAULT.planted(_tree(tmp_path, "cpp/moved/b.h", SOURCE))


def test_no_two_faults_have_one_name() -> None:
    names = [fault.name for fault in FAULTS]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_every_fault_is_in_one_part(parts: int) -> None:
    found = [of_part(list(FAULTS), *part_of(f"{part}/{parts}")) for part in range(1, parts + 1)]
    assert [fault for part in found for fault in part] == list(FAULTS)
    assert max(map(len, found)) - min(map(len, found)) <= 1


@pytest.mark.parametrize("text", ["0/3", "4/3", "1/0", "1", "a/3", "-1/3", ""])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not K/N"):
        part_of(text)
