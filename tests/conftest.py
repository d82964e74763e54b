"""Settings that every test runs under."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The same examples in every run; a failing one is printed as code that reproduces it.
settings.register_profile("distca", derandomize=True, deadline=None, print_blob=True, database=None)
settings.load_profile("distca")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Ranks are threads or processes here: PyTorch's own pool would only add to them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
