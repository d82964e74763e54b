"""The step protocol as a model (steps.pml): spin tries every order of its events.

The model finds each of its planted faults, which shows that its checks can fail.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from distca.calls import Call, calls_of_pass

MODEL = Path(__file__).parent / "steps.pml"

needs_spin = pytest.mark.skipif(
    shutil.which("spin") is None, reason="needs the model checker spin (Debian, Ubuntu: apt-get install spin)"
)


def _compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc")
    assert found is not None
    return found


def _check(folder: Path, *defines: str) -> str:
    """The output of spin's verifier."""
    options = [f"-D{name}" for name in defines]
    subprocess.run(["spin", *options, "-a", str(MODEL)], cwd=folder, check=True, capture_output=True)
    # The verifier stops soon for most faults. Compiling it well would then take longer than running it.
    level = "-O0" if any("FAULT" in name for name in defines) and "STEPS=5" not in defines else "-O1"
    subprocess.run([_compiler(), level, "-w", "-DSAFETY", "-o", "pan", "pan.c"], cwd=folder, check=True)
    out = subprocess.run(["./pan", "-m100000", "-w22"], cwd=folder, check=True, capture_output=True, text=True).stdout
    # A search that was cut short proves nothing.
    assert not re.search(r"max search depth too small|out of memory|truncated", out), out
    return out


@needs_spin
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
        "ORDER=5 SLOW_CREDITS ONE_PUT",
        "ORDER=5 ONE_PUT QUEUED",
        "ORDER=6 ONE_PUT",
        "ORDER=7 ONE_PUT",
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


@needs_spin
@pytest.mark.parametrize(
    ("fault", "options", "found"),
    [
        ("NO_WAIT_FOR_CREDIT", "ORDER=3", ROWS_AT_HOME),
        ("CREDIT_TOO_EARLY", "ORDER=3", ROWS_AT_HOME),
        ("NO_QUIET", "ORDER=2", ROWS_AT_SERVER),
        ("RESULTS_NOT_AWAITED", "ORDER=1", ROWS_AT_HOME),
        ("RESULTS_NOT_AWAITED", "ORDER=3 QUEUED", ROWS_AT_HOME),
        ("FREED_BEFORE_RESULTS_LEFT", "ORDER=2 ONE_PUT", ROWS_AT_HOME),
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
        ("FREED_TOO_EARLY", "ORDER=2 ONE_PUT", ROWS_AT_HOME),
        ("NO_WAIT_FOR_OLDER_SIGNAL", "ORDER=1 SLOW_CREDITS STEPS=5 ONE_PUT FIRST=3", TWO_SIGNALS),
        ("SLOT_BY_NUMBER", "ORDER=6", DEADLOCK),
        ("NO_RECOMPUTATION_SERVED", "ORDER=5", DEADLOCK),
        ("NO_RECOMPUTATION_SERVED", "ORDER=6", DEADLOCK),
        ("ONE_STEP_TOO_FEW_SERVED", "ORDER=6", DEADLOCK),
        ("RECOMPUTATION_SERVED_FIRST", "ORDER=6", DEADLOCK),
        ("HALVES_SERVED_APART", "ORDER=6", DEADLOCK),
    ],
)
def test_a_planted_fault_is_found(fault: str, options: str, found: str, tmp_path: Path) -> None:
    out = _check(tmp_path, f"FAULT_{fault}", *options.split())
    assert re.search(r"errors: 1$", out, re.M), out
    assert re.search(f"pan:1: {found}", out), out


def test_every_fault_that_the_model_can_plant_is_among_them() -> None:
    marks = test_a_planted_fault_is_found.pytestmark  # type: ignore[attr-defined]
    [parameters] = [mark.args[1] for mark in marks if mark.name == "parametrize"]
    planted = {fault for fault, _, _ in parameters}
    assert planted == set(re.findall(r"FAULT_(\w+)", MODEL.read_text()))


def _numbered(calls: Iterable[Call]) -> list[int]:
    """The calls as the model writes them: 10 * part + number of the step."""
    numbers: dict[tuple[str, int, int | None], int] = {}
    for call in calls:
        numbers.setdefault(call[1:], len(numbers) + 1)
    parts = ("dispatch", "attend", "collect")
    return [10 * parts.index(call.part) + numbers[call[1:]] for call in calls]


def _calls_of_model(order: int) -> list[int]:
    """The calls without the 0 at their end."""
    command = [_compiler(), "-E", "-P", "-x", "c", f"-DORDER={order}", str(MODEL)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"byte calls\[.*?\] = \{(.*?), 0\};", text, re.S)
    assert found is not None
    return [int(number) for number in found[1].split(",")]


@needs_spin
def test_ticks_of_the_model_have_the_calls_of_the_code() -> None:
    """A forward and a backward tick of one layer, and a backward tick of two. Each layer is run again by itself."""
    forward, backward = (calls_of_pass(phase, 1, groups=[(0, 1)], halves=True) for phase in ("forward", "backward"))
    again = [call._replace(layer=1) for call in backward]  # steps of a tick of their own
    assert _calls_of_model(6) == _numbered([*forward, *again])
    assert _calls_of_model(7) == _numbered(calls_of_pass("backward", 2, groups=[(0, 1), (1, 2)], halves=True))
