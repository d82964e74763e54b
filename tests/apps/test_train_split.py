"""Runs whose processes share the model take the steps of the same run on one rank: a sample for every run of the tests.

`test_train_split_forms.py` has the other forms and the families of models.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.once import made_once
from support.split_runs import Way, figures_in, run_all, worst_difference, write_files

# Fifteen micro-batches are evaluated: three steps of four, and one of three.
EVALUATED = {"eval_fraction": 0.4, "eval_every": 2, "eval_steps": 4, "steps": 3}
BFLOAT16 = {"dtype": "bfloat16", "master_weights": True}

EXACT = {
    "stages of tensor ranks": Way(
        4, {"pipeline": 2, "tensor": 2, "trace": "", "log_memory": True}, options=EVALUATED, exports=True
    ),
    "stages of data ranks, in chunks": Way(4, {"pipeline": 2, "chunks": 2}, options=EVALUATED),
    "four stages": Way(4, {"pipeline": 4, "layers_per_stage": "1,1,2,1"}, "llama with five layers"),
    "fsdp in stages, with tied weights": Way(4, {"pipeline": 2, "fsdp": True}, "qwen3", exports=True),
    "ping-pong and recomputation": Way(
        4, {"pipeline": 2, "tensor": 2, "ping_pong": True, "checkpoint_activations": True}
    ),
    "tensor ranks alone, with tied weights": Way(2, {"tensor": 2}, "qwen3"),
    "stages of a hybrid, whose documents are cut": Way(
        4, {"pipeline": 2, "layers_per_stage": "3,1"}, "lfm2", options={"clip_norm": 4.5}
    ),
}
ROUNDED = {"bfloat16 with master weights": Way(4, {"pipeline": 2, "fsdp": True}, options=BFLOAT16)}
WAYS = EXACT | ROUNDED


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each run, and of what it is compared with."""

    def make(folder: Path) -> Path:
        write_files(folder, ["llama", "llama with five layers", "qwen3", "lfm2"])
        run_all(WAYS, folder, folder)
        return folder

    return made_once(tmp_path_factory, "split_runs", make)


@pytest.mark.parametrize("name", EXACT)
def test_losses_gradient_norms_and_evaluations_are_those_of_one_rank(name: str, runs: Path) -> None:
    alone = figures_in(runs / WAYS[name].name_alone)
    assert len(alone["loss"]) == len(alone["grad_norm"]) == 3
    clip_norm = WAYS[name].options.get("clip_norm", 3.5)
    assert min(alone["grad_norm"]) < clip_norm < max(alone["grad_norm"]), "clipping made no difference, or always"
    assert len(alone["eval_loss"]) == (2 if "eval_every" in WAYS[name].options else 0)
    assert worst_difference(runs / name, runs / WAYS[name].name_alone) < 1e-5


@pytest.mark.parametrize("name", ROUNDED)
def test_a_run_in_bfloat16_is_near_that_on_one_rank(name: str, runs: Path) -> None:
    # Ranks add up gradients of other rows, each rounded to 8 bits of mantissa: 2^-8 is 4e-3.
    assert 1e-7 < worst_difference(runs / name, runs / WAYS[name].name_alone) < 2e-2


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.exports])
def test_the_exported_model_is_that_of_one_rank(name: str, runs: Path) -> None:
    ours, alone = (
        AutoModelForCausalLM.from_pretrained(runs / f"{folder}, exported").state_dict()
        for folder in (name, WAYS[name].name_alone)
    )
    assert ours.keys() == alone.keys()
    for key, weight in alone.items():
        assert torch.linalg.norm(ours[key] - weight) <= 1e-5 * torch.linalg.norm(weight), key


def test_every_process_of_a_split_run_logs_its_memory_and_the_trace_has_them_all(runs: Path) -> None:
    run = runs / "stages of tensor ranks"
    for rank in range(4):
        lines = [json.loads(line) for line in (run / f"memory-rank{rank}.jsonl").read_text().splitlines()]
        points = [line["point"] for line in lines if line["step"] == 0]
        assert points[0] == "begin" and points[-2:] == ["backward", "optimizer"]
        assert {line["step"] for line in lines} == {0, 1, 2}
        assert all(line["heap"] > 0 and line["arena_forward"] > 0 and line["arena_backward"] > 0 for line in lines)
    processes = {event["pid"] for event in json.loads((run / "trace.json").read_text())["traceEvents"]}
    assert len(processes) >= 2, "each context traces its own ranks"
