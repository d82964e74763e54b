"""Settings that every test runs under."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from emulation import emulated_gpu
from support.compiled import COMPILER

# The same examples in every run; a failing one is printed as code that reproduces it.
settings.register_profile("distca", derandomize=True, deadline=None, print_blob=True, database=None)
# For `make fuzz`: twenty times as many, other ones in every run.
settings.register_profile("fuzz", settings.get_profile("distca"), derandomize=False, max_examples=2000)
settings.load_profile("distca")

# A shell that runs the tests in the background makes them ignore Ctrl-C, and so would every process they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what is imported stays: half a second less for every collection of garbage, of which runs have dozens
    if "support.processes" in sys.modules:
        forkserver.ensure_running()  # not within a test, whose changes of the environment all forks would have


@pytest.fixture(autouse=True, scope="session")
def _cache_of_tokens(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs of `distca train` keep tokens here, not in the user's folder."""
    os.environ["DISTCA_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Ranks are threads or processes here: PyTorch's own pool would only add to them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def emulated_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What emulated_gpu.py builds."""
    if shutil.which(COMPILER) is None:
        pytest.skip("there is no C++ compiler here")
    return emulated_gpu.build(tmp_path_factory)


@pytest.fixture
def gpu(emulated_library: Path) -> Iterator[emulated_gpu.EmulatedGpu]:
    """The emulated GPU, where attention is computed by the CPU's kernel."""
    with emulated_gpu.EmulatedGpu(emulated_library).in_use(own_attention=False) as one:
        yield one


@pytest.fixture
def own_gpu(emulated_library: Path) -> Iterator[emulated_gpu.EmulatedGpu]:
    """The emulated GPU with the library's own kernels for attention, deterministic ones."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with emulated_gpu.EmulatedGpu(emulated_library).in_use(own_attention=True) as one:
        yield one
    torch.use_deterministic_algorithms(before)
