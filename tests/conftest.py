"""Settings that every test runs under."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# The same examples in every run; a failing one is printed as code that reproduces it.
settings.register_profile("distca", derandomize=True, deadline=None, print_blob=True, database=None)
# For `make fuzz`: twenty times as many, other ones in every run.
settings.register_profile("fuzz", settings.get_profile("distca"), derandomize=False, max_examples=2000)
settings.load_profile("distca")

# A shell that runs the tests in the background makes them ignore Ctrl-C, and so would every process they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Ranks are threads or processes here: PyTorch's own pool would only add to them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
