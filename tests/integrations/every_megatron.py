"""Megatron-core on distca in many forms, beside Megatron-core in one process with PyTorch's attention of each document.

pytest runs this file only if it is named (`make megatron`). `test_megatron.py` has a few of the cases.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from support import ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
# Importing Megatron takes seconds on every rank otherwise.
multiprocessing.set_forkserver_preload([*ranks.PRELOADED, "megatron.core.models.gpt", "megatron.core.optimizer"])

from support.megatron_runs import Case, assert_as_alone, run_all, run_all_alone  # noqa: E402

UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform"}
SELECTIVE = {"recompute_granularity": "selective"}
SEQUENCE = {"sequence_parallel": True}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.01}
RAGGED = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
RECOMPUTED: list[dict[str, Any]] = [
    {**UNIFORM, "recompute_num_layers": 1},
    {**UNIFORM, "recompute_num_layers": 2},
    SELECTIVE,
]

# Gradients are reduced in backward from the second step on.
FOUR = [
    Case(tensor=2, stock=True),
    Case(tensor=2),
    Case(tensor=2, changes=SEQUENCE),
    Case(tensor=4, data=1),
    Case(tensor=4, data=1, kv_heads=1),
    Case(pipeline=2, steps=2),
    *(Case(pipeline=2, changes=changes) for changes in RECOMPUTED),
    Case(pipeline=2, layers=8, chunks=2),
    *(Case(pipeline=2, layers=8, chunks=2, changes=changes) for changes in RECOMPUTED),
    Case(pipeline=2, changes={"num_layers_in_first_pipeline_stage": 1}),
    Case(pipeline=2, changes={"num_layers_in_last_pipeline_stage": 1, "deallocate_pipeline_outputs": True}),
    Case(pipeline=2, changes={"num_layers_in_first_pipeline_stage": 2, **RECOMPUTED[1]}, layers=6),
    Case(pipeline=2, per_token=True),
    Case(pipeline=2, overlap=True, steps=3),
    Case(pipeline=2, overlap=True, steps=3, align=True),
    Case(pipeline=2, chunks=2, overlap=True, steps=3, align=True),
    Case(pipeline=2, shards=True),
    Case(pipeline=2, chunks=2, overlap=True, steps=3, shards=True),
    Case(pipeline=2, ragged=True, changes=RAGGED),
    Case(pipeline=2, changes={**EXPERTS, "moe_token_dispatcher_type": "alltoall"}),
    Case(pipeline=2, changes={**EXPERTS, "moe_token_dispatcher_type": "allgather", "expert_model_parallel_size": 2}),
]
EIGHT = [
    Case(2, 2, 2, steps=20),
    *(Case(2, 2, 2, changes=SEQUENCE | changes) for changes in RECOMPUTED),
    Case(2, 2, 2, chunks=2, changes=SEQUENCE, overlap=True, steps=3, shards=True),
    Case(2, 2, 2, changes={**SEQUENCE, "num_layers_in_first_pipeline_stage": 1, **RECOMPUTED[0]}, shards=True),
    Case(2, 4, 1, per_token=True),
    Case(2, 4, 1, ragged=True, changes=RAGGED),
    Case(1, 4, 2, layers=8, chunks=2, changes=SELECTIVE),
]


@pytest.mark.parametrize("cases", [FOUR, EIGHT], ids=["four processes", "eight processes"])
def test_megatron_computes_what_it_computes_in_one_process(cases: list[Case]) -> None:
    """All cases of a number of processes in one launch."""
    [alone] = ranks.launch(run_all_alone, cases, ranks=1)
    assert_as_alone(cases, ranks.launch(run_all, cases, ranks=cases[0].ranks), alone)
