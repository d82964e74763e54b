"""Settings that every test runs under."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from distca.connect.collections_paused import collections_paused
from distca.registry import open_contexts
from emulation import emulated_gpu
from support import gpus
from support.programs import EMULATED_GPU

# Every run has the same examples. A failing one is printed as code that reproduces it.
settings.register_profile("distca", derandomize=True, deadline=None, print_blob=True, database=None)
# `make fuzz` uses this profile: twenty times as many examples, and new ones in every run.
settings.register_profile("fuzz", settings.get_profile("distca"), derandomize=False, max_examples=2000)
settings.load_profile("distca")

gpus.asks = True

# A shell that runs the tests in the background makes them ignore Ctrl-C, and the processes that they start would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with collections_paused():
        result = yield
    gc.collect()
    gc.freeze()  # imported modules stay for good; without them each garbage collection is half a second faster
    if "support.processes" in sys.modules:
        # Started here, because forks of a server started in a test would inherit that test's changes of the
        # environment.
        forkserver.ensure_running()
    return result


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind, which Triton brings, would report what is frozen as leaked


@pytest.fixture(autouse=True, scope="session")
def _cache_of_tokens(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Makes runs of `distca train` keep their tokens in this folder instead of the user's."""
    os.environ["DISTCA_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _imports_are_frozen() -> Iterator[None]:
    """Keeps what a test imports out of later garbage collections, as what is imported before the first one."""
    before = len(sys.modules)
    yield
    if len(sys.modules) > before:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Gives PyTorch one thread, because ranks are threads or processes here and its pool would add to them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _contexts_are_closed() -> Iterator[None]:
    """Closes the contexts that a test leaves open. The next one could find them (`open_contexts`)."""
    before = set(open_contexts)
    yield
    for name in set(open_contexts) - before:
        open_contexts[name].close()


@pytest.fixture(scope="session")
def emulated_library() -> Path:
    """The library with the emulated GPU."""
    return EMULATED_GPU.path()


@pytest.fixture
def gpu(emulated_library: Path) -> Iterator[emulated_gpu.EmulatedGpu]:
    """The emulated GPU, with attention computed by the CPU's kernel."""
    with emulated_gpu.EmulatedGpu(emulated_library).in_use(own_attention=False) as one:
        yield one


@pytest.fixture
def own_gpu(emulated_library: Path, request: pytest.FixtureRequest) -> Iterator[emulated_gpu.EmulatedGpu]:
    """The emulated GPU, with attention computed by the library's own kernels in deterministic mode. Its compute
    capability is 9.0, or 8.0 if the parameter is 8.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    with emulated_gpu.EmulatedGpu(emulated_library).in_use(
        own_attention=True, major=getattr(request, "param", 9)
    ) as one:
        yield one
    torch.use_deterministic_algorithms(before)
