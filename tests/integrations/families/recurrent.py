"""The results of models with recurrent layers, whose rounding goes on along rows."""

from __future__ import annotations

import pytest
import torch

from .verdict import LOSS, RECURRENT_NORM

#: A loss, and the gradients of all weights by name.
Result = tuple[float, dict[str, torch.Tensor]]


def assert_as_expected(found: Result, expected: Result) -> None:
    """Gradients are compared by their norms; some are 0 up to rounding."""
    assert found[0] == pytest.approx(expected[0], rel=LOSS)
    floor = 1e-2 * max(gradient.norm() for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= RECURRENT_NORM * (gradient.norm() + floor), name
