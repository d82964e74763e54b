"""setup.py: which PyTorch a build is against, and whether it builds what runs on a GPU."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("setuptools")
SETUP = Path(__file__).resolve().parents[2] / "setup.py"
CMAKE = shutil.which("cmake", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
needs_cmake = pytest.mark.skipif(CMAKE is None, reason="cmake is missing")


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that setup.py defines; nothing is built."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    return runpy.run_path(str(SETUP))


def _hide_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides installed packages, as pip does for an isolated build."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.endswith("-packages")])


def test_an_isolated_build_is_against_the_pytorch_that_its_python_has(
    named: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build_folder: Callable[[], Path] = named["build_folder"]
    with_all = build_folder()
    has_torch = any((Path(folder) / "torch").exists() for folder in named["package_folders"]())
    _hide_packages(monkeypatch)
    if has_torch:  # otherwise torch belongs to another Python, whose packages `make` shows to this one
        assert build_folder() == with_all
    monkeypatch.setattr(sysconfig, "get_path", lambda kind: str(tmp_path))
    with pytest.raises(SystemExit, match="has no PyTorch. Install PyTorch >= 2.10 there first.*--no-build-isolation"):
        build_folder()


@pytest.mark.parametrize(
    ("wanted", "in_place", "gpu", "option"),
    [
        (None, True, False, "OFF"),
        (None, True, True, "AUTO"),
        (None, False, False, "AUTO"),
        ("auto", True, False, "AUTO"),
        ("1", True, False, "ON"),
        ("0", False, True, "OFF"),
    ],
)
def test_what_runs_on_a_gpu_is_built_for_others_or_where_one_is_or_on_request(
    named: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wanted: str | None,
    in_place: bool,
    gpu: bool,
    option: str,
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n" + ("echo 'GPU 0: NVIDIA H100'" if gpu else "echo No devices were found; exit 6") + "\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("DISTCA_CUDA", raising=False)
    if wanted is not None:
        monkeypatch.setenv("DISTCA_CUDA", wanted)
    assert named["cuda_option"](in_place) == option


def test_another_wish_is_refused(named: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCA_CUDA", "maybe")
    with pytest.raises(SystemExit, match="DISTCA_CUDA=maybe; 0 .* 1 .* auto"):
        named["cuda_option"](False)


def test_a_tool_that_fails_ends_the_build_in_one_line_after_what_it_said(
    named: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    fails = [Path(sys.executable), "-c", "import sys; print('the reason'); sys.exit(3)"]
    with pytest.raises(
        SystemExit, match=r"^distca: python\S* ended with code 3, and nothing was installed. Look there.$"
    ):
        named["run"](fails, "Look there.")
    assert capfd.readouterr().out == "the reason\n"
    named["run"]([sys.executable, "-c", ""], "")  # and one that does not fail goes on


def _architectures(folder: Path, wanted: str) -> tuple[str, str]:
    """What nvcc and CMake are told for this TORCH_CUDA_ARCH_LIST, and the messages."""
    script = folder / "script.cmake"
    script.write_text(
        f'include("{SETUP.parent}/cuda/architectures.cmake")\n'
        'read_gpu_architectures("$ENV{WANTED}" options architectures)\n'
        'file(WRITE "$ENV{FOUND}" "${options}\\n${architectures}")\n'
    )
    found = folder / "found"
    environment = os.environ | {"WANTED": wanted, "FOUND": str(found)}
    assert CMAKE is not None
    done = subprocess.run([CMAKE, "-P", script], env=environment, capture_output=True, text=True)
    return found.read_text() if found.exists() else "", " ".join((done.stdout + done.stderr).split())


@needs_cmake
@pytest.mark.parametrize(
    ("wanted", "options", "architectures"),
    [
        ("", "80 sm_80, 90 sm_90, 100 sm_100, 100 compute_100", "80-real;90-real;100-real"),
        ("9.0", "90 sm_90", "90-real"),
        ("7.5 8.0 8.6, 9.0a;12.1+PTX;", "80 sm_80, 86 sm_86, 90a sm_90a, 121 sm_121, 121 compute_121",
         "80-real;86-real;90a-real;121-real"),
    ],
)  # fmt: skip
def test_the_gpus_to_compile_for_are_those_of_pytorch_s_variable(
    tmp_path: Path, wanted: str, options: str, architectures: str
) -> None:
    found, messages = _architectures(tmp_path, wanted)
    pairs = (one.split() for one in options.split(", "))
    assert found == ";".join(f"-gencode=arch=compute_{a},code={b}" for a, b in pairs) + "\n" + architectures
    assert ("7.5, which is left out: distca needs 8.0 or later" in messages) == ("7.5" in wanted)


@needs_cmake
@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("Hopper", "TORCH_CUDA_ARCH_LIST has Hopper; numbers such as 9.0 and 10.0+PTX are expected"),
        ("9.0+ptx", "TORCH_CUDA_ARCH_LIST has 9.0+ptx; numbers"),
        ("90", "TORCH_CUDA_ARCH_LIST has 90; numbers"),
        ("7.0;7.5", "TORCH_CUDA_ARCH_LIST is 7.0;7.5; distca needs 8.0 or later, or DISTCA_CUDA=0"),
    ],
)
def test_gpus_that_cannot_be_compiled_for_are_refused(tmp_path: Path, wanted: str, said: str) -> None:
    found, messages = _architectures(tmp_path, wanted)
    assert not found and said in messages
