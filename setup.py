"""Build of the native libraries; everything else about the package stands in pyproject.toml."""

import hashlib
import importlib.machinery
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def find_tool(name: str) -> str:
    """Path of `name`: the one installed beside the building Python, else the one on PATH."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    tool = shutil.which(name, path=path)
    if tool is None:
        raise SystemExit(f"distca: {name} is missing; run: {sys.executable} -m pip install {name}")
    return tool


def run(command: list[str | Path], where: str) -> None:
    """Runs a command, whose output says why it fails. A traceback after it would hide that."""
    if code := subprocess.run(command).returncode:
        raise SystemExit(f"distca: {Path(command[0]).name} ended with code {code}, and nothing was installed. {where}")


def package_folders() -> list[str]:
    """Where the building Python has its packages. pip's isolated builds hide them, but run the Python that they are of:
    what is built there is compiled against its PyTorch, and none has to be fetched to build with."""
    return list(dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib")))


def build_folder() -> Path:
    """Folder of CMake's cache and objects: one for each Python, torch and compiler, for a cache keeps their paths."""
    torch = importlib.machinery.PathFinder.find_spec("torch", [*sys.path, *package_folders()])
    if torch is None or torch.origin is None:
        raise SystemExit(
            f"distca: {sys.executable} has no PyTorch. Install PyTorch >= 2.10 there first. Where the build has an "
            "environment of its own (uv, python -m build), tell it to do without: --no-build-isolation, --no-isolation."
        )
    paths = f"{sys.prefix}\n{torch.origin}\n{os.environ.get('CXX')}\n{os.environ.get('CUDACXX')}"
    return ROOT / "build" / f"{sys.implementation.cache_tag}-{hashlib.sha256(paths.encode()).hexdigest()[:12]}"


def has_gpu() -> bool:
    """Whether the driver knows a GPU."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and b"GPU" in subprocess.run([tool, "-L"], capture_output=True).stdout


def cuda_option(in_place: bool) -> str:
    """Whether to build what runs on a GPU: the environment's DISTCA_CUDA; by default where nvcc is found, and for an
    editable installation, which is of this machine alone, only where a GPU is there too."""
    wanted = os.environ.get("DISTCA_CUDA", "")
    options = {"": "OFF" if in_place and not has_gpu() else "AUTO", "0": "OFF", "1": "ON", "auto": "AUTO"}
    if wanted not in options:
        raise SystemExit(f"distca: DISTCA_CUDA={wanted}; 0 (never), 1 (always) and auto (where nvcc is) are allowed")
    return options[wanted]


class BuildNative(build_ext):
    """Runs CMake and installs all libraries into the package folder: the wheel's, or the source's where editable.

    setuptools by itself would carry only the extension module and drop the libraries it links.
    """

    def run(self) -> None:
        package = (ROOT / "python" if self.inplace else Path(self.build_lib).resolve()) / "distca"
        cmake, build = find_tool("cmake"), build_folder()
        configure = [cmake, "-S", ROOT, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={find_tool('ninja')}"]
        configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DDISTCA_CUDA={cuda_option(bool(self.inplace))}"]
        configure += [f"-DDISTCA_PACKAGES={';'.join(package_folders())}"]
        run(configure, "Look above for 'CMake Error'.")
        run([cmake, "--build", build, "--parallel", str(os.cpu_count() or 1)], "Look above for 'FAILED'.")
        for library in package.rglob("*.so"):  # also those that this build leaves out
            library.unlink()
        run([cmake, "--install", build, "--prefix", package, "--strip"], "The reason stands above.")


setup(ext_modules=[Extension("distca._C", sources=[])], cmdclass={"build_ext": BuildNative})
