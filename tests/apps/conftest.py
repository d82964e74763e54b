"""Fixtures of the tests of the command line: runs of `distca train` that tests resume."""

from dataclasses import replace
from pathlib import Path

import pytest

from distca.apps.train.checkpoint import whole_checkpoints
from support.once import made_once
from support.ranks import launch
from support.resumed_runs import OF_ONE_RANK, OF_TWO_RANKS, SMALL, resumed_with, whole_and_resumed
from support.train_runs import one_rank


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twelve short documents, two of which are far longer than the others."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(12):
        text = f"line {number} of a text that repeats itself\n" * (20 if number % 6 == 0 else 1 + number // 2)
        (folder / f"{number:02}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def resumed_runs(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs without interruption and resumed ones, each in a folder of its name; all workers share them."""

    def make(folder: Path) -> Path:
        (folder / "whole").mkdir()
        three_ranks = replace(SMALL, data=texts, keep_checkpoints=3)
        launch(whole_and_resumed, three_ranks, folder, ranks=3)
        launch(resumed_with, OF_TWO_RANKS, replace(three_ranks, ranks=2), folder, ranks=2)
        with one_rank():
            resumed_with(OF_ONE_RANK, replace(three_ranks, ranks=1), folder)
        return folder

    return made_once(tmp_path_factory, "resumed_runs", make)


@pytest.fixture
def whole_run(resumed_runs: Path) -> Path:
    """A run of 6 steps on three ranks, its checkpoints after 2, 4 and 6 steps kept."""
    assert list(whole_checkpoints(resumed_runs / "whole")) == [2, 4, 6]
    return resumed_runs / "whole"
