"""Runs whose processes share the model take the steps of the same run on one rank: the forms and families of models
that `test_train_split.py` leaves out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.split_runs import MODELS, Way, figures_in, run_all, worst_difference, write_files

BOTH: dict[str, Any] = {"pipeline": 2, "tensor": 2}
STAGES: dict[str, Any] = {"pipeline": 2}
TENSOR: dict[str, Any] = {"tensor": 2}
SHARDS: dict[str, Any] = {"fsdp": True}
UNEVEN = {"eval_fraction": 0.4, "eval_every": 2, "eval_steps": 2}
FAMILIES = [model for model in MODELS if not model.startswith("llama")]

EXACT = {
    "three stages": Way(3, {"pipeline": 3, "layers_per_stage": "2,2,1"}, "llama with five layers"),
    "three stages, dealt by cost": Way(3, {"pipeline": 3}, "llama with five layers"),
    "two stages alone, evaluated": Way(2, STAGES, options=UNEVEN),
    "chunks of tensor ranks, in ping-pong": Way(4, {**BOTH, "chunks": 2, "ping_pong": True}),
    "chunks, recomputed": Way(4, {**STAGES, "chunks": 2, "checkpoint_activations": True}),
    "chunks and shards": Way(4, {**STAGES, **SHARDS, "chunks": 2}, "qwen3"),
    "shards of tensor ranks": Way(4, {**TENSOR, **SHARDS}),
    "shards of tensor ranks, tied": Way(4, {**TENSOR, **SHARDS}, "qwen3"),
    "data and tensor ranks, evaluated": Way(4, TENSOR, options=UNEVEN),
    "tensor ranks in ping-pong, recomputed": Way(4, {**TENSOR, "ping_pong": True, "checkpoint_activations": True}),
    "not balanced": Way(4, {**BOTH, "balance": "off"}),
    "compared": Way(4, {**STAGES, "compare": True}),
    "one micro-batch": Way(4, BOTH, options={"accumulate": 1}),
    "five micro-batches": Way(4, STAGES, options={"accumulate": 5}),
    **{f"{model}, stages of tensor ranks": Way(4, BOTH, model) for model in FAMILIES},
    **{f"{model}, stages of data ranks": Way(4, STAGES, model) for model in FAMILIES},
    **{f"{model}, shards in stages": Way(4, {**STAGES, **SHARDS}, model) for model in FAMILIES},
}
ROUNDED = {
    "bfloat16": Way(4, BOTH, options={"dtype": "bfloat16"}),
    "bfloat16, master weights": Way(4, BOTH, options={"dtype": "bfloat16", "master_weights": True}),
}
WAYS = EXACT | ROUNDED


@pytest.mark.parametrize("name", WAYS)
def test_losses_gradient_norms_and_evaluations_are_those_of_one_rank(name: str, tmp_path: Path) -> None:
    way = WAYS[name]
    write_files(tmp_path, [way.model])
    run_all({name: way}, tmp_path, tmp_path)
    alone = figures_in(tmp_path / way.name_alone)
    assert len(alone["loss"]) == len(alone["grad_norm"]) == 3
    worst = worst_difference(tmp_path / name, tmp_path / way.name_alone)
    print(f"{name}: {worst:.1e}")
    # bfloat16 has 8 bits of mantissa: each of a few roundings in a row may be 2^-9 of the number.
    assert worst < (1e-5 if name in EXACT else 3e-2)
