"""The code that pages and docstrings show: parts of the examples, Python that compiles, examples that run.

A block of a page that is part of an example has a comment on the line before it: `<!-- examples/plain_loop.py -->`.
"""

from __future__ import annotations

import doctest
import importlib
import re
import textwrap
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import distca

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
API = ROOT / "docs/api"
PACKAGE = Path(str(files("distca")))
PROMPT = re.compile(r"^ *>>> ", re.MULTILINE)
WITH_EXAMPLES = sorted(path for path in PACKAGE.rglob("*.py") if PROMPT.search(path.read_text()))


class Block(NamedTuple):
    """A ```python block of a page, and the example that the page says it is part of."""

    line: int
    code: str
    example: str | None


def _blocks(text: str) -> Iterator[Block]:
    lines = text.splitlines()
    begin = None
    for number, line in enumerate(lines):
        if begin is None and line.strip() == "```python":
            begin = number
        elif begin is not None and line.strip() == "```":
            marked = re.fullmatch(r"\s*<!-- (\S+) -->", lines[begin - 1]) if begin else None
            yield Block(begin + 1, textwrap.dedent("\n".join(lines[begin + 1 : number])), marked and marked[1])
            begin = None
    assert begin is None, f"line {begin}: a block without end"


def _is_part(code: str, of: str) -> bool:
    """Whether these lines follow one another in the example with the same indentation."""
    wanted, lines = code.split("\n"), of.splitlines()
    windows = (lines[first : first + len(wanted)] for first in range(len(lines)))
    return any(textwrap.dedent("\n".join(window)).split("\n") == wanted for window in windows)


def test_blocks_and_parts_are_found() -> None:
    page = "text\n<!-- examples/a.py -->\n```python\na = 1\n\nb = 2\n```\n  ```python\n  c\n  ```\n"
    assert list(_blocks(page)) == [Block(3, "a = 1\n\nb = 2", "examples/a.py"), Block(8, "c", None)]
    example = "if x:\n    a = 1\n\n    b = 2\n    c = 3\n"
    assert _is_part("a = 1\n\nb = 2", example)
    assert not _is_part("a = 1\nb = 2", example)
    assert not _is_part("if x:\n    a = 2", example)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_of_a_page_compile_or_are_parts_of_their_example(page: Path) -> None:
    for line, code, example in _blocks(page.read_text()):
        where = f"{page.relative_to(ROOT)}, line {line}"
        if example is not None:
            assert _is_part(code, (ROOT / example).read_text()), f"{where}: not so in {example}"
        else:
            try:
                compile(code, where, "exec")
            except SyntaxError as error:
                pytest.fail(f"{where}: {error}")


def test_everything_that_distca_exports_is_on_a_page_of_the_api() -> None:
    text = "\n".join(page.read_text() for page in API.glob("*.md"))
    shown = set(re.findall(r"^::: distca\.([\w.]+)$", text, re.MULTILINE))
    assert "errors" in shown  # this entry shows all types of errors
    others = {name for name in distca.__all__ if getattr(getattr(distca, name), "__module__", "") != "distca.errors"}
    assert not others - shown


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_examples_of_docstrings_run(path: Path) -> None:
    module = importlib.import_module(".".join(("distca", *path.relative_to(PACKAGE).with_suffix("").parts)))
    known = {"distca": distca, "torch": torch}
    found = [test for test in doctest.DocTestFinder().find(module, globs=known) if test.examples]
    assert sum(len(test.examples) for test in found) == len(PROMPT.findall(path.read_text()))
    runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
    said: list[str] = []
    for test in found:
        runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)
