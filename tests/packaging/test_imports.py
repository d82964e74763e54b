"""Imports between the package's modules: there is no circle, the library imports no application, and `import distca`
loads nothing heavy.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "python/distca"
ENTRY = "distca.__main__"
"""`python -m distca`, which belongs to the command line."""
APPS = "distca.apps."
HEAVY = ("torch.distributed.fsdp", "torch._dynamo", "greenlet", "matplotlib", "transformers", "datasets", "tqdm")


def _modules() -> dict[str, Path]:
    files = {}
    for file in PACKAGE.rglob("*.py*"):
        if file.suffix not in (".py", ".pyi"):  # .pyi files stand for compiled modules
            continue
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return files


FILES = _modules()


def _imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """All imports, also those in functions, but without those that only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        yield from _imports(child)


def _imported(file: Path) -> set[str]:
    """The modules of the package that a module imports by name.

    The package itself is not counted: after `import distca` its attributes are looked up later.
    """
    found = set()
    for node in _imports(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        else:
            names = [f"{node.module}.{name.name}" for name in node.names]
            names = [name if name in FILES else str(node.module) for name in names]
        found.update(name for name in names if name in FILES and name != "distca")
    return found


GRAPH = {name: _imported(file) for name, file in FILES.items() if name != "distca"}


def _app(module: str) -> str:
    return module.removeprefix(APPS).split(".")[0] if module.startswith(APPS) else ""


def test_the_graph_has_the_modules_that_there_are() -> None:
    assert len(GRAPH) > 80 and "distca.planner.layout" in GRAPH["distca.planner.plan"]


def test_no_module_imports_itself_by_way_of_others() -> None:
    try:
        list(TopologicalSorter(GRAPH).static_order())
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_library_imports_no_application() -> None:
    library = {name: of for name, of in GRAPH.items() if not name.startswith("distca.apps") and name != ENTRY}
    assert not {name: of for name, of in library.items() if any(map(_app, of))}


def test_applications_import_what_they_share_and_not_one_another() -> None:
    """Benchmarks may run the steps of training and the measurements of a profile."""
    crossing = [
        (name, other)
        for name, of in GRAPH.items()
        for other in of
        if _app(name) not in ("", "cli", "bench") and _app(other) not in ("", "common", _app(name))
    ]
    assert not crossing


def test_the_planner_needs_no_context_transport_or_operator() -> None:
    allowed = ("distca.planner", "distca._C", "distca.arguments", "distca.errors", "distca.heads", "distca.registry")
    of_planner = {other for name, of in GRAPH.items() if name.startswith("distca.planner") for other in of}
    # PlanAhead learns the lengths of other ranks over torch's process group, so it needs none of these either.
    assert not [other for other in of_planner if not other.startswith(allowed)]


def test_importing_distca_loads_nothing_that_is_heavy_and_the_rest_when_it_is_asked_for() -> None:
    later = {"PingPong": "distca.pingpong.ping_pong", "simulate": "distca.simulator.simulate"}
    heavy = (*HEAVY, *later.values(), "distca.apps", "distca.testing", "distca.pipeline")
    program = f"""
import sys, torch
before = set(sys.modules)
import distca
loaded = set(sys.modules) - before
assert "distca.ops" in loaded
heavy = [name for name in loaded if name.startswith({heavy})]
assert not heavy, heavy
assert {{*distca.__all__, "pipeline"}} <= set(dir(distca))
assert distca.pipeline.tick_table.__module__ == "distca.pipeline.tick_table"
missing = [name for name in distca.__all__ if not hasattr(distca, name)]
assert not missing, missing
for name, module in {later}.items():
    assert getattr(distca, name).__module__ == module
"""
    subprocess.run([sys.executable, "-c", program], check=True)
