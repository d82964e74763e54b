"""The library's code for GPUs on an emulated CUDA runtime (`runtime`), compiled by the host's compiler."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests/emulation/runtime"
OPTIONS = {"streams": True, "attention": "flash", "timeout": 20.0}
"""The options of contexts on the emulated GPU, while it is in use."""

_THREAD_LOCAL = 1  # the mode of captures
_LAUNCH = re.compile(r"(\w+)((?:<[\w, ]+>)?)<<<(.*?)>>>\((.*?)\);", re.DOTALL)
_SHARED = re.compile(r"(?<!extern )__shared__ ([\w:]+) (\w+);")
_DYNAMIC = re.compile(r"extern __shared__ std::byte (\w+)\[\];")
ATTENTION = ("hopper_64", "hopper_512", "ampere_64", "ampere_512")
"""The kernels of attention that are compiled: of small heads, and those that run more than once."""
_ON_MACHINE = {"kKernel"}
"""Kernels, as their launches name them, that are written in the instructions of hopper.h or ampere.h."""


def for_the_host(source: str) -> str:
    """The text of a .cu file as C++: kernel launches and shared memory are written in another way, on the same lines.

    A GPU has 2 multiprocessors here, so that grids which fill it are small.
    """

    def launch(found: re.Match[str]) -> str:
        name, arguments, how, given = found.groups()
        start = "start_on_machine" if name in _ON_MACHINE else "start_kernel"
        kernel = f'with_arguments("{name}", {name}{arguments}{", " if given else ""}{given})'
        return f"emulated_gpu::{start}({{{how}}}, emulated_gpu::{kernel});"

    source = _SHARED.sub(r"auto& \2 = emulated_gpu::shared<\1>(__LINE__);", source)
    source = _DYNAMIC.sub(r"std::byte* const \1 = emulated_gpu::dynamic_shared();", source)
    return _LAUNCH.sub(launch, source).replace(" 132 * ", " 2 * ")


def sources(folder: Path) -> list[Path | list[Path]]:
    """What the shared library is compiled from; see contexts.cpp for its functions. Writes some of it to `folder`."""
    cuda = ROOT / "cuda"

    def rewritten(source: Path, name: str) -> Path:
        to = folder / name
        to.parent.mkdir(exist_ok=True)
        to.write_text(f'#include "device.h"\n#line 1 "{source}"\n{for_the_host(source.read_text())}')
        return to

    for name in ("launch.h", "hopper_instances.h", "ampere_instances.h"):
        rewritten(cuda / "attention" / name, f"attention/{name}")
    kernels = [one for one in cuda.glob("*/*.cu") if one.parent.name != "attention" or one.stem in ATTENTION]
    return [
        sorted(cuda.glob("*/*.cpp")),
        [FOLDER.parent / "machine.cpp", *sorted(FOLDER.glob("*.cpp"))],
        *[rewritten(one, f"{one.stem}.cpp") for one in [*kernels, *FOLDER.glob("*.cu")]],
    ]


class EmulatedGpu:
    """The emulated GPU: the library loaded into this process."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.emulated_launches.restype = self._library.take_most_blocks.restype = ctypes.c_int64

    @contextmanager
    def in_use(self, own_attention: bool, major: int = 9) -> Iterator[EmulatedGpu]:
        """Inside, contexts that are made with `OPTIONS` use this GPU, whose compute capability is `major`.0. Attention
        is computed by the library's own kernels, or by the CPU's.
        """
        self._library.use_emulated_gpu(own_attention, major)
        try:
            yield self
        finally:
            self._library.leave_emulated_gpu()

    def is_own_the_default(self) -> bool:
        """Whether the own kernels compute where nobody chooses."""
        return bool(self._library.is_own_the_default())

    def launches(self, kernel: str) -> int:
        return self._library.emulated_launches(kernel.encode())

    def take_most_blocks(self, kernel: str) -> int:
        """The thread blocks of the largest launch of that kernel since the last question."""
        return self._library.take_most_blocks(kernel.encode())

    def was_loaded_by_a_launch(self, kernel: str) -> bool:
        """Whether the first launch of a kernel had to load it, which may wait for the whole device."""
        return bool(self._library.was_loaded_by_a_launch(kernel.encode()))

    def outcome(self, which: str) -> int:
        return self._library.outcome(which.encode())

    def synchronize(self) -> None:
        """Waits for what this thread has queued. Only replays and launches need this: steps wait by themselves."""
        self._call("synchronize")

    @contextmanager
    def _switched(self, function: str, inside: object, outside: object) -> Iterator[None]:
        """Calls a function of the library with one value at the beginning, and with the other at the end."""
        self._library[function](inside)
        try:
            yield
        finally:
            self._library[function](outside)

    def stream(self, number: int) -> AbstractContextManager[None]:
        """Inside, this thread queues on its own stream of that number; outside it uses stream 0."""
        return self._switched("use_stream", number, 0)

    def steps_do_not_wait(self) -> AbstractContextManager[None]:
        """Inside, steps are only queued. The caller keeps all tensors that they read and return, and looks at none
        before it waits.
        """
        return self._switched("wait_after_steps", False, True)

    def attention_by_aten(self) -> AbstractContextManager[None]:
        """Contexts made inside leave attention to what stands for ATen, which computes nothing."""
        return self._switched("let_aten_compute", True, False)

    def without_page_locked_memory(self) -> AbstractContextManager[None]:
        """Inside, there is no more of it."""
        return self._switched("set_page_locked_memory", False, True)

    def without_kernels(self) -> AbstractContextManager[None]:
        """Inside, no kernel can be loaded, as on a GPU that they were not compiled for."""
        return self._switched("set_compiled_for_device", False, True)

    def nodes_one_by_one(self) -> AbstractContextManager[None]:
        """Inside, a started graph runs its nodes one after another, in a random order that its edges allow."""
        return self._switched("run_graphs_one_by_one", True, False)

    @contextmanager
    def graph(self) -> Iterator[Callable[[], None]]:
        """Captures what this thread queues inside, and yields a function that launches it afterwards."""
        graph = ctypes.c_void_p()
        self._call("begin_capture", _THREAD_LOCAL)

        def launch() -> None:
            self._call("launch_graph", graph)

        try:
            yield launch
        except BaseException:
            self._library.end_capture(ctypes.byref(graph))
            raise
        self._call("end_capture", ctypes.byref(graph))

    def _call(self, function: str, *arguments: object) -> None:
        error = self._library[function](*arguments)
        assert error == 0, f"{function}: error {error}"
