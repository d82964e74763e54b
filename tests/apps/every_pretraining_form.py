"""`pretrain_llama.py` and Megatron's schedule and attention compute the same: more forms of four processes.

`make pretraining` runs these.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from support.pretrained import check_both, folder_of_runs, run_all, runs_of_both
from support.ranks import launch

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

FORMS = {
    "tensor, sequence": {"TP_SIZE": "2", "PP_SIZE": "2", "SEQUENCE_PARALLEL": "1", "RECOMPUTE": "selective"},
    "context, tensor, sequence": {"TP_SIZE": "2", "CP_SIZE": "2", "SEQUENCE_PARALLEL": "1", "TOKENS_PER_RANK": "102"},
    "context": {"CP_SIZE": "4", "RECOMPUTE": "full", "TOKENS_PER_RANK": "51"},
    "head-tail, ping-pong": {"CP_SIZE": "4", "HOMES": "head-tail", "PING_PONG": "1", "TOKENS_PER_RANK": "101"},
    "head-tail, stages": {
        **{"CP_SIZE": "2", "PP_SIZE": "2", "VPP_SIZE": "2"},
        **{"HOMES": "head-tail", "EVAL_FRACTION": "0.2"},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, after they have ended."""
    folder = folder_of_runs(tmp_path_factory)
    launch(run_all, folder, folder / "cache", runs_of_both(folder, FORMS), ranks=4)
    return folder


@pytest.mark.parametrize("name", FORMS)
def test_losses_and_norms_are_those_of_megatrons_schedule(folder: Path, name: str) -> None:
    check_both(folder, name, FORMS[name])
