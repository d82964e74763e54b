"""The libraries of the installed package share one state and contain no trace of where they were built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import distca
from distca import _C
from distca.testing import _emulation

PACKAGE = Path(str(files("distca")))
SHIPPED = [PACKAGE / "libdistca.so", PACKAGE / "libdistca_torch.so", Path(_C.__file__)]
LIBRARIES = [*SHIPPED, PACKAGE / "libdistca_emulation.so", Path(_emulation.__file__)]
HEADS = distca.Heads(q=2, kv=1, dim=8)


def rows(plan: distca.Plan) -> list[torch.Tensor]:
    return [torch.randn(plan.num_rows, heads, 8) for heads in (2, 1, 1)]


def test_an_operator_finds_the_context_that_the_module_made() -> None:
    name = "made by the module"
    plan = distca.plan(distca.Layout.from_documents([[7]]), HEADS, rank=0, capacity=2**62)
    q, k, v = rows(plan)
    options = {"slot_bytes": 4096, "timeout": 10.0, "cost": distca.CostModel().core}
    core = _C.make_loopback(names=[name], **options)[0]
    try:
        out, _ = torch.ops.distca.core_attention(q, k, v, plan.tensor, context=name)
        assert core.step == 1
        assert torch.equal(out, distca.attention(q, k, v)[0])
    finally:
        assert _C.remove_context(name)
    with pytest.raises(RuntimeError, match=f'no context "{name}"'):
        torch.ops.distca.core_attention(q, k, v, plan.tensor, context=name)


def test_an_operator_finds_the_context_that_init_made_and_shares_its_error_types() -> None:
    with distca.init(max_tokens=16, heads=HEADS, name="made by init") as context:
        plan = distca.plan(distca.Layout.from_documents([[7]]), HEADS, rank=0)
        q, k, v = rows(plan)
        torch.ops.distca.core_attention(q, k, v, plan.tensor, context="made by init")
        assert context.step == 1
        with pytest.raises(distca.PlanFormatError, match="altered"):
            altered = distca.plan(distca.Layout.from_documents([[7]]), HEADS, rank=0)
            altered.tensor[20] += 1
            distca.core_attention(q, k, v, altered, context=context)


def test_each_library_is_loaded_once_and_from_the_package() -> None:
    for library in LIBRARIES:
        mapped = [line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line]
        loaded = {path for path in mapped if path.endswith(f"/distca/{library.relative_to(PACKAGE)}")}
        assert {os.path.realpath(path) for path in loaded} == {os.path.realpath(library)}


def test_the_libraries_find_each_other_beside_themselves_only() -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is missing")
    for library in LIBRARIES:
        text = subprocess.run([readelf, "-d", "-W", library], check=True, capture_output=True, text=True).stdout
        paths = re.findall(r"\((RUNPATH|RPATH)\).*\[(.*)\]", text)
        allowed = {"libdistca_torch.so": "$ORIGIN:$ORIGIN/../torch/lib", LIBRARIES[-1].name: "$ORIGIN/.."}
        assert paths == [("RUNPATH", allowed.get(library.name, "$ORIGIN"))], library.name


def test_nothing_that_trains_loads_what_only_tests_and_benchmarks_use() -> None:
    program = (
        "import distca; distca.loopback(2, max_tokens=8, heads=distca.Heads(q=2, kv=1, dim=8)); "
        "print(open('/proc/self/maps').read())"
    )
    text = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert all(library.name in text for library in SHIPPED)
    assert "_emulation" not in text


def test_no_path_of_the_machine_that_built_them_is_in_the_libraries() -> None:
    root = Path(__file__).resolve().parents[2]
    for library in LIBRARIES:
        content = library.read_bytes()
        for path in (root, Path(sys.prefix), Path(torch.__file__).parent):
            assert os.fsencode(str(path)) + b"/" not in content, f"{path} is in {library.name}"


def test_the_package_is_typed() -> None:
    for name in ("py.typed", "_C.pyi", "testing/_emulation.pyi"):
        assert (PACKAGE / name).is_file()
