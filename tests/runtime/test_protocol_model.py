"""The step protocol as a model (steps.pml): spin tries every order of its events.

The model finds each of its planted faults, which shows that its checks can fail.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parent / "steps.pml"

pytestmark = pytest.mark.skipif(
    shutil.which("spin") is None, reason="needs the model checker spin (Debian, Ubuntu: apt-get install spin)"
)


def _check(folder: Path, *defines: str) -> str:
    """The output of spin's verifier."""
    options = [f"-D{name}" for name in defines]
    subprocess.run(["spin", *options, "-a", str(MODEL)], cwd=folder, check=True, capture_output=True)
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None
    # The verifier stops soon for most faults. Compiling it well would then take longer than running it.
    level = "-O0" if any("FAULT" in name for name in defines) and "STEPS=5" not in defines else "-O1"
    subprocess.run([compiler, level, "-w", "-DSAFETY", "-o", "pan", "pan.c"], cwd=folder, check=True)
    out = subprocess.run(["./pan", "-m100000", "-w22"], cwd=folder, check=True, capture_output=True, text=True).stdout
    # A search that was cut short proves nothing.
    assert not re.search(r"max search depth too small|out of memory|truncated", out), out
    return out


@pytest.mark.parametrize(
    "options",
    [
        "ORDER=1 ALL_PLANS ONE_PUT",
        "ORDER=1 SLOW_CREDITS ONE_PUT",
        "ORDER=1 SLOW_CREDITS STEPS=5 ONE_PUT FIRST=3",
        "ORDER=2 ONE_PUT",
        "ORDER=3 ONE_PUT",
        "ORDER=4 ONE_PUT",
        "ORDER=1 SLOW_CREDITS ONE_PUT QUEUED",
        "ORDER=3 ONE_PUT QUEUED",
    ],
    ids=str.lower,
)
def test_no_order_of_events_deadlocks_loses_a_signal_or_overwrites_rows(options: str, tmp_path: Path) -> None:
    out = _check(tmp_path, *options.split())
    assert re.search(r"errors: 0$", out, re.M), out
    # All ranks come to the end of their calls. Otherwise fewer states would be reached, and none would be an error.
    unreached = out.split("unreached in proctype Rank")[1].split("unreached in")[0]
    assert "-end-" not in unreached, out


DEADLOCK = "invalid end state"
ROWS_AT_SERVER = "assertion violated.*server_in_a"
ROWS_AT_HOME = "assertion violated.*home_in_a"
TWO_SIGNALS = "assertion violated.*pending_(credit|freed)"
# If a sender is too fast, the first thing noticed may be that its previous message is still under way.
TOO_FAST = "assertion violated.*(_in_a|pending_in|pending_home)"


@pytest.mark.parametrize(
    ("fault", "options", "found"),
    [
        ("NO_WAIT_FOR_CREDIT", "ORDER=1", ROWS_AT_SERVER),
        ("CREDIT_TOO_EARLY", "ORDER=1", ROWS_AT_SERVER),
        ("NO_QUIET", "ORDER=2", ROWS_AT_HOME),
        ("NO_WAIT_FOR_ROUND_CREDIT", "ORDER=1", TOO_FAST),
        ("NO_ROUND_CREDIT", "ORDER=1", DEADLOCK),
        ("ROUND_CREDIT_TOO_EARLY", "ORDER=1", TOO_FAST),
        ("ROUND_NOT_IN_VALUE", "ORDER=1", TOO_FAST),
        ("SIGNALS_ADD", "ORDER=1", ROWS_AT_HOME),
        ("SIGNAL_OVERTAKES_PUT", "ORDER=1", ROWS_AT_HOME),
        ("WAITS_FOR_ALL", "ORDER=1", DEADLOCK),
        ("RECEIVES_BEFORE_IT_SENDS", "ORDER=1", DEADLOCK),
        ("ONE_SLOT", "ORDER=2", TOO_FAST),
        ("ORDERS_DIFFER", "ORDER=2", DEADLOCK),
        ("GRANTED_TWICE", "ORDER=1 SLOW_CREDITS", TWO_SIGNALS),
        ("FREED_TOO_EARLY", "ORDER=1", ROWS_AT_SERVER),
        ("NO_WAIT_FOR_OLDER_SIGNAL", "ORDER=1 SLOW_CREDITS STEPS=5 ONE_PUT FIRST=3", TWO_SIGNALS),
    ],
)
def test_a_planted_fault_is_found(fault: str, options: str, found: str, tmp_path: Path) -> None:
    out = _check(tmp_path, f"FAULT_{fault}", *options.split())
    assert re.search(r"errors: 1$", out, re.M), out
    assert re.search(f"pan:1: {found}", out), out


def test_every_fault_that_the_model_can_plant_is_among_them() -> None:
    marks = test_a_planted_fault_is_found.pytestmark  # type: ignore[attr-defined]
    planted = {fault for fault, _, _ in marks[0].args[1]}
    assert planted == set(re.findall(r"FAULT_(\w+)", MODEL.read_text()))
