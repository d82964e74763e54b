"""TRL's trainers on ranks under distca have the losses and weights of plain ones: the SFTTrainer of one process on the
same documents, those that pad their batches of as many ranks.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from support.forked_ranks import run_program
from support.once import made_once

CASES = [
    "packing",
    "padding_free",
    "lora",
    "gradient_checkpointing",
    "fsdp2",
    "bf16",
    "gradient_accumulation",
    "completion_only_loss",
    "assistant_only_loss",
    "padded_to_a_multiple",
    "sliding_window",
    "layers_that_differ",
    "evaluation",
    "three_ranks",
]
PADDED = [
    "dpo",
    "dpo_bf16",
    "dpo_shared",
    "dpo_shared_lora_checkpoints",
    "reward",
    "kto",
    "grpo",
    "grpo_shared",
    "rloo",
]
PROGRAM = Path(__file__).with_name("trl_program.py")
# Three steps go through two layers, forward and backward. Checkpointing adds a forward; an evaluation has three
# batches.
ATTENTION_CALLS = {"lora": 18, "gradient_checkpointing": 18, "gradient_accumulation": 24, "evaluation": 12 + 18}

for name in ("trl", "datasets", "peft"):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what the processes of all cases saved."""
    return made_once(tmp_path_factory, "trl", lambda folder: run_program(PROGRAM, folder, [*CASES, *PADDED]))


def _ranks(folder: Path, case: str, count: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{case}.{rank}.pt") for rank in range(count)]


@pytest.mark.parametrize("case", CASES)
def test_ranks_have_the_losses_and_weights_of_one_process_without_distca(folder: Path, case: str) -> None:
    alone = torch.load(folder / f"{case}.alone.pt")
    # In bf16 rows are rounded differently before they reach attention, whatever computes it.
    of_losses, of_weights = (3e-4, 0.05) if case == "bf16" else (2e-6, 3e-5)
    for rank in _ranks(folder, case, 3 if case == "three_ranks" else 2):
        assert rank["losses"] == pytest.approx(alone["losses"], rel=of_losses)
        assert rank["evaluations"] == pytest.approx(alone["evaluations"], rel=of_losses)
        assert len(rank["losses"]) == 3 and len(rank["evaluations"]) == (3 if case == "evaluation" else 0)
        assert rank["steps"] == ATTENTION_CALLS.get(case, 12), "attention went another way"
        assert rank["bytes moved"] > 0
        assert rank["weights"].keys() == alone["weights"].keys()
        for name, expected in alone["weights"].items():
            # Adapters start at different values, and half of them at 0.
            start = alone["start"].get(name, torch.zeros(()))
            error = (rank["weights"][name] - expected).norm()
            assert error <= of_weights * (expected - start).norm(), name


@pytest.mark.parametrize("case", PADDED)
def test_ranks_have_the_losses_and_weights_of_ranks_without_distca(folder: Path, case: str) -> None:
    plain = [torch.load(folder / f"{case}.plain.{rank}.pt") for rank in range(2)]
    of_losses, of_weights = (3e-4, 4e-3) if case == "dpo_bf16" else (2e-6, 2e-6)
    for ours, theirs in zip(_ranks(folder, case, 2), plain, strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=of_losses, abs=1e-6) and len(ours["losses"]) == 3
        assert ours["weights"].keys() == theirs["weights"].keys()
        bound = 3e-5 if "lora" in case else of_weights  # adapters start at 0, and so have changed as a whole
        for name, expected in theirs["weights"].items():
            assert (ours["weights"][name] - expected).norm() <= bound * expected.norm(), name
        assert ours["steps"] >= 3 * 2 * 2, "attention went another way"
        rows, kept = ours["rows"]["computed"], theirs["rows"]["no padding"]
        if "grpo" in case or case == "rloo":  # they generate, which is as before
            continue
        times = 2 if "checkpoints" in case else 1  # recomputed rows are counted again
        assert rows < times * kept if "shared" in case else rows == times * kept


def test_answers_that_share_a_prompt_are_computed_with_it_once(folder: Path) -> None:
    for apart, shared in zip(_ranks(folder, "grpo", 2), _ranks(folder, "grpo_shared", 2), strict=True):
        assert shared["rows"]["computed"] < apart["rows"]["computed"]  # both generate the same
