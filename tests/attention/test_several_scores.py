"""The CPU's kernel on problems whose documents have different masks, windows, scales and softcaps.

tests/sanitize/kernel_stress.cpp makes them. It compares the bits of each document with those of the document alone. The
other tests of this folder compare documents alone with PyTorch.
"""

from __future__ import annotations

import subprocess

from support.programs import KERNEL_STRESS


def test_a_document_has_the_same_bits_alone_and_beside_one_with_other_scores() -> None:
    """Random documents on every instruction set of this machine, and problems with wrong scores, which are refused."""
    done = subprocess.run([KERNEL_STRESS.path(), "8"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "instruction sets, 8 problems each" in done.stdout
