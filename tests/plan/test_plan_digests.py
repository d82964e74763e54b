"""The plan has the same bits however the scheduler is compiled, because floating point guesses and integers decide."""

from __future__ import annotations

import subprocess

from support.compiled import Program
from support.programs import NATIVE_PLANS, PLAIN_PLANS


def _digests(program: Program) -> list[str]:
    return subprocess.run([program.path()], capture_output=True, text=True, check=True).stdout.splitlines()


def test_plans_are_the_same_for_a_plain_processor_and_for_all_that_this_one_can() -> None:
    plain = _digests(PLAIN_PLANS)
    assert len(plain) == 2 * 24
    assert len(set(plain)) > 24, "these plans are too much alike to show anything"
    assert plain == _digests(NATIVE_PLANS)
