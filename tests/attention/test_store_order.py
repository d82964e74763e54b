"""Groups that add to the same key gradients come in order: each after all that have stored to any of its rows."""

from __future__ import annotations

import subprocess

from support.programs import STORE_ORDER


def test_a_group_comes_after_all_that_have_stored_last_to_its_rows() -> None:
    done = subprocess.run([STORE_ORDER.path()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "24000 runs\n"), done.stdout + done.stderr
