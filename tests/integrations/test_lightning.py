"""PyTorch Lightning on ranks under distca has the losses and weights of a plain loop in one process in float64."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from support.forked_ranks import run_program
from support.once import made_once

CASES = [
    "ddp",
    "accumulated_and_clipped",
    "own_model",
    "own_model_with_uneven_loaders",
    "uneven_loaders",
    "fsdp2",
    "bf16",
    "recomputation",
    "ping_pong",
    "over_torch",
    "resumed",
    "resumed_fsdp2",
    "three_ranks",
]
# A batch goes through two layers, forward and backward; one's own model has one layer. A validation has three batches,
# or four, and the one before training has two.
ATTENTION_CALLS = {
    "ddp": 12 + 4 + 18,
    "own_model": 6,
    "own_model_with_uneven_loaders": 8 + 2 + 16,
    "uneven_loaders": 16,
    "fsdp2": 12 + 4 + 18,
    "recomputation": 18,
    "ping_pong": 24,
    "resumed": 24,
    "resumed_fsdp2": 24,
    "three_ranks": 8,
}
PROGRAM = Path(__file__).with_name("lightning_program.py")

if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what the processes of all cases saved."""
    return made_once(tmp_path_factory, "lightning", lambda folder: run_program(PROGRAM, folder, CASES))


def _ranks(folder: Path, case: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{case}.{rank}.pt") for rank in range(3 if case == "three_ranks" else 2)]


@pytest.mark.parametrize("case", CASES)
def test_ranks_have_the_losses_and_weights_of_one_process_without_distca(folder: Path, case: str) -> None:
    alone = torch.load(folder / f"{case}.alone.pt")
    of_losses, of_weights = (3e-4, 0.1) if case == "bf16" else (2e-6, 1e-4)
    for rank in _ranks(folder, case):
        assert rank["losses"] == pytest.approx(alone["losses"], rel=of_losses)
        assert rank["validations"] == pytest.approx(alone["validations"], rel=of_losses)
        assert rank["steps"] == ATTENTION_CALLS.get(case, 12), "attention went another way"
        assert rank["bytes moved"] > 0
        assert rank["weights"].keys() == alone["weights"].keys()
        for name, expected in alone["weights"].items():
            error = (rank["weights"][name] - expected).norm()
            assert error <= of_weights * (expected - alone["start"][name]).norm(), name
