"""Megatron-core on distca in many forms, beside Megatron-core in one process with PyTorch's attention of each document.

pytest runs this file only if it is named (`make megatron`). `test_megatron.py` has a few of the cases. In one process
(`make megatron ARGS="-n 0"`) it prints how far each case is from what is expected.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest

from support import ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
# Importing Megatron takes seconds on every rank otherwise.
multiprocessing.set_forkserver_preload([*ranks.PRELOADED, "megatron.core.models.gpt", "megatron.core.optimizer"])

from support.megatron_cases import EIGHT, FOUR, HALVED, PEERS  # noqa: E402
from support.megatron_runs import Case, Result, assert_as_alone, figures, run_all, run_all_alone  # noqa: E402
from support.thinning import thinned  # noqa: E402

#: Cases that read a checkpoint come after this one of `FOUR`, with those that write it.
MIDDLE = 24


def _some(cases: list[Case]) -> list[Case]:
    """Those of them that run: every EVERY-th one, and all that write checkpoints."""
    return thinned(cases, always=lambda case: bool(case.writes))


Compare = Callable[[list[Case], list[list[Result]], list[Result]], None]


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Compare:
    """Prints how far each case is from what is expected of it, and asserts that it is near."""

    def compared(cases: list[Case], of_ranks: list[list[Result]], expected: list[Result]) -> None:
        with capsys.disabled():
            print("", *figures(cases, of_ranks, expected), sep="\n")
        assert_as_alone(cases, of_ranks, expected)

    return compared


@pytest.mark.parametrize(
    "cases",
    [_some(FOUR[:MIDDLE]), _some(FOUR[MIDDLE:]), _some(HALVED)[::2], _some(HALVED)[1::2], _some(EIGHT)],
    ids=["four processes", "four more processes", "in ping-pong", "more in ping-pong", "eight processes"],
)
def test_megatron_computes_what_it_computes_in_one_process(cases: list[Case], tmp_path: Path, compare: Compare) -> None:
    """Many cases in one launch."""
    [alone] = ranks.launch(run_all_alone, cases, ranks=1)
    compare(cases, ranks.launch(run_all, cases, tmp_path, ranks=cases[0].ranks), alone)


def test_megatron_computes_what_it_computes_in_as_many_processes(compare: Compare) -> None:
    [alone, *_] = ranks.launch(run_all, PEERS, None, True, ranks=4)
    compare(PEERS, ranks.launch(run_all, PEERS, ranks=4), alone)


def test_a_checkpoint_goes_from_megatrons_own_attention_to_distca_and_back(tmp_path: Path, compare: Compare) -> None:
    """Nothing in it depends on what computes core attention."""
    alone = Case(data=1, share=2, steps=4)
    before, after = alone._replace(writes="without distca"), alone._replace(reads="with distca")
    four = [Case(pipeline=2, steps=4, reads="without distca"), Case(tensor=2, steps=4, writes="with distca")]
    [expected] = ranks.launch(run_all, [before], tmp_path, True, ranks=1)
    compare(four, ranks.launch(run_all, four, tmp_path, ranks=4), expected * 2)
    compare([after], ranks.launch(run_all, [after], tmp_path, True, ranks=1), expected)
