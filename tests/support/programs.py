"""What tests compile. `python -m support.programs` compiles all of it, so that tests find it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

from emulation import emulated_gpu
from support.compiled import ROOT, Program

_CPP = f"-I{ROOT / 'cpp'}"
_LIBRARY = str(files("distca"))
_LINK = ["-L", _LIBRARY, "-ldistca", f"-Wl,-rpath,{_LIBRARY}"]
_RUNTIME = "tests/emulation/runtime"
_SHARED = ["-std=c++20", "-shared", "-fPIC"]


def _scheduler() -> Sequence[Path]:
    return [path for path in sorted((ROOT / "cpp/plan").glob("*.cpp")) if path.name != "validate.cpp"]


#: The CUDA kernels of attention. The first folder has the emulated gpu.h, hopper.h and ampere.h, which are therefore
#: found before those of cuda/attention.
RUN_KERNELS = Program(
    "run_kernels",
    [
        ROOT / "tests/emulation/run_kernels.cpp",
        [ROOT / f"tests/emulation/{name}.cpp" for name in ("machine", "problems")]
        + [ROOT / "cuda/attention/work_list.cpp"],
    ],
    [
        *["-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fopenmp-simd", "-Wno-unknown-pragmas"],
        *[f"-I{ROOT / folder}" for folder in ("tests/emulation", "cuda", "cpp")],
    ],
)
#: The emulated machine, with kernels that break its rules.
MISUSE = Program(
    "misuse",
    [[ROOT / f"tests/emulation/{name}.cpp" for name in ("misuse", "machine")]],
    ["-std=c++20", "-O1", *[f"-I{ROOT / folder}" for folder in ("tests/emulation", "cuda", "cpp")]],
)
#: All that runs on a GPU, with the emulated one. Of two headers with the same name the first in the path is used:
#: launch.h and the instances as rewritten, the instructions as emulated.
EMULATED_GPU = Program(
    "emulated_gpu.so",
    emulated_gpu.sources,
    [
        *[*_SHARED, "-O1", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-unknown-pragmas"],
        *[f"-I{ROOT / one}" for one in (f"{_RUNTIME}/headers", _RUNTIME, "tests/emulation", "cuda", "cpp")],
    ],
    [*_LINK, "-Wl,--no-undefined", "-lpthread"],
)
KERNEL_STRESS = Program(
    "kernel_stress",
    [ROOT / "tests/sanitize/kernel_stress.cpp"],
    ["-std=c++20", "-O1", _CPP],
    [*_LINK, "-lpthread"],
)
STORE_ORDER = Program("store_order", [ROOT / "tests/attention/store_order.cpp"], ["-std=c++20", "-O1", _CPP], _LINK)
#: Undefined behaviour ends the program; a misaligned access is one.
PUT_TABLES = Program(
    "put_tables",
    [ROOT / "tests/transport/put_tables.cpp"],
    ["-std=c++20", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", _CPP],
    _LINK,
)
#: With the scheduler of the library, which is compiled for any processor of this kind.
PLAIN_PLANS = Program("plain_plans", [ROOT / "tests/plan/plan_digests.cpp"], ["-std=c++20", "-O0", _CPP], _LINK)
NATIVE_PLANS = Program(
    "native_plans",
    [ROOT / "tests/plan/plan_digests.cpp", _scheduler()],
    ["-std=c++20", "-O1", "-ftree-vectorize", "-march=native", _CPP],
)
AWKWARD_RANKS = Program(
    "awkward_ranks.so",
    [ROOT / "tests/runtime/awkward_ranks.cpp"],
    [*_SHARED, "-O0", _CPP],
    ["-L", _LIBRARY, "-ldistca_emulation", *_LINK],
)
RECORDER = Program("recorder.so", [ROOT / "tests/attention/recording_backend.cpp"], [*_SHARED, "-O1", _CPP], _LINK)

if __name__ == "__main__":
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(Program.compiled, [one for one in list(globals().values()) if isinstance(one, Program)]))
