"""Versions of transformers that distca does not take: an error says which it needs."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distca.apps.doctor.doctor import _transformers
from distca.integrations.hf_version import NEEDED

MODULE = "distca.integrations.hf_version"


def _error(version: str) -> str:
    return f"need {NEEDED}; this is {version}: pip install '{NEEDED}'"


@pytest.mark.parametrize(
    ("version", "command"),
    [
        ("4.57.6", ["-c", "import distca.integrations.hf"]),
        ("5.3.0", ["-m", "distca", "train"]),
        ("6.0.0", ["-c", "import distca.integrations.hf"]),
    ],
)
def test_another_version_of_transformers_is_refused_before_anything_is_imported_from_it(
    version: str, command: list[str], tmp_path: Path
) -> None:
    package, metadata = tmp_path / "transformers", tmp_path / f"transformers-{version}.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").touch()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    run = subprocess.run(
        [sys.executable, *command], env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert run.stderr.strip().endswith(_error(version)), run.stderr


@pytest.mark.parametrize(("version", "fine"), [("5.3.0", False), ("5.4.0", True), ("5.30.0.dev0", True)])
def test_doctor_says_whether_the_version_of_transformers_is_one_that_distca_takes(
    version: str, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    monkeypatch.delitem(sys.modules, MODULE)
    found = _transformers()
    assert (found.found, found.fine) == (version, fine)
    assert found.advice == ("" if fine else f"`distca train` and distca.integrations.hf {_error(version)}")


def test_the_extra_train_asks_for_the_versions_that_the_integration_takes() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert re.search(rf'^train = \["{re.escape(NEEDED)}",', project, flags=re.MULTILINE)
