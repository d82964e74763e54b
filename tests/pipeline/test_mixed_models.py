"""Models of transformers whose layers differ are pipelined: Gemma 2 and 3 (windows, softcap), gpt-oss (sinks), Llama 4
(chunks, queries scaled by position), and Qwen3-Next, whose stages begin or end with layers without attention.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import distca
import distca.integrations.hf  # registers attn_implementation="distca"
from distca import pipeline
from support.models import FAMILIES, GQA, VOCABULARY, WINDOW, Family
from support.ranks import launch

DATA, MICROBATCHES = 2, 3
DOCUMENTS = [[[90], [20, 70]], [[30, 60], [90]], [[9] * 10, [85, 5]]]
#: Of the model's four layers. With one layer in the first stage and three in the second, every step mixes kinds.
KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]


RECURRENT = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
QWEN3_NEXT = Family(
    "Qwen3NextConfig",
    {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    | {"mlp_only_layers": [0, 1, 2, 3]},
)


CHUNK = 24
CHUNKS = ["chunked_attention", "full_attention", "full_attention", "chunked_attention"]
LLAMA4 = Family(
    "Llama4TextConfig",
    {"attention_chunk_size": CHUNK, "no_rope_layers": [1, 0, 1, 1], "floor_scale": 8, "attn_scale": 0.5}
    | {"num_local_experts": 2, "intermediate_size_mlp": 48, "moe_layers": []},
)


class Case(NamedTuple):
    family: str
    layers: tuple[int, ...]
    recompute: bool = False

    @property
    def kinds(self) -> list[str]:
        return {"qwen3_next": RECURRENT, "llama4": CHUNKS}.get(self.family, KINDS)

    @property
    def with_attention(self) -> list[int]:
        """The layers of each stage that have attention."""
        parts = torch.tensor([kind != "linear_attention" for kind in self.kinds]).split(self.layers)
        return [int(part.sum()) for part in parts]


CASES = [
    Case("gemma3", (2, 2)),
    Case("gemma3", (1, 3), recompute=True),
    Case("gemma2", (1, 3)),
    Case("gpt_oss", (1, 3)),
    Case("gpt_oss", (2, 2), recompute=True),
    Case("qwen3_next", (2, 2)),
    Case("qwen3_next", (2, 2), recompute=True),
    Case("llama4", (2, 2), recompute=True),
    Case("llama4", (1, 3)),
]
#: The window of each kind of layer with attention.
WINDOWS = {"sliding_attention": WINDOW, "full_attention": None, "chunked_attention": distca.Chunk(CHUNK)}


def _family(case: Case) -> Family:
    return {"qwen3_next": QWEN3_NEXT, "llama4": LLAMA4}.get(case.family) or FAMILIES[case.family]


def _model(case: Case, attention: str) -> Any:
    options = _family(case).options | {"num_hidden_layers": len(case.kinds), "layer_types": case.kinds}
    options |= {"experts_implementation": "eager"} if case.family == "gpt_oss" else {}  # others have no float64
    return dataclasses.replace(_family(case), options=options).model(attention)


def _tokens(microbatch: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, targets and positions of a rank's documents."""
    lengths = DOCUMENTS[microbatch][rank]
    generator = torch.Generator().manual_seed(100 * microbatch + rank)
    ids, targets = (torch.randint(2, VOCABULARY, (sum(lengths),), generator=generator) for _ in range(2))
    return ids, targets, torch.cat([torch.arange(n) for n in lengths])


def _loss(model: Any, h: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = model.lm_head(h)
    cap = getattr(model.config, "final_logit_softcapping", None)
    return F.cross_entropy(cap * torch.tanh(logits / cap) if cap else logits, targets, reduction="sum")


def _cut(model: Any, begin: int, end: int) -> Any:
    """The model's layers [begin, end) as a model of their own, which shares their parameters."""
    stage = copy.copy(model.model)
    stage._modules = dict(stage._modules)
    stage.layers = nn.ModuleList(stage.layers[begin:end])
    if end < len(model.model.layers):
        stage.norm = nn.Identity()
    stage.config = copy.deepcopy(stage.config)
    stage.config.num_hidden_layers, stage.config.layer_types = end - begin, model.config.layer_types[begin:end]
    return stage


Found = tuple[float, dict[str, torch.Tensor], dict[Any, torch.Tensor]]


def _run(case: Case, windows: list[Any] | None = None) -> Found:
    """One rank's losses and gradients, and the largest logits of its layers. Plans are for the windows of the model's
    layers, or others.
    """
    stages = [[0, 1], [2, 3]]
    with distca.init(max_tokens=256, heads=GQA, timeout=30) as context:
        plans = pipeline.PipelinePlans(
            [distca.Layout.from_documents(lengths) for lengths in DOCUMENTS],
            GQA,
            stages=stages,
            layers=case.with_attention,
            windows=windows or [WINDOWS[kind] for kind in case.kinds if kind in WINDOWS],
            context=context,
            tolerance=0.02,
            min_rows=8,
        )
        model = _model(case, "distca")
        ticks = pipeline.Ticks(
            plans,
            context=context,
            recompute="layer" if case.recompute else None,
            scale=model.model.layers[1].self_attn.scaling,
            softcap=getattr(model.config, "attn_logit_softcapping", None) or 0.0,
        )
        begin = sum(case.layers[: plans.stage])
        part = _cut(model, begin, begin + case.layers[plans.stage])
        if case.recompute:
            part.gradient_checkpointing_enable({"use_reentrant": False})

        def stage(work: pipeline.Work, x: torch.Tensor | None) -> torch.Tensor:
            ids, targets, positions = _tokens(work.microbatch, plans.index)
            rows = {"input_ids": ids[None]} if x is None else {"inputs_embeds": x[None]}
            h = part(**rows, position_ids=positions[None], use_cache=False, plan=ticks.plan, distca_context=context)
            h = ticks.pad(h.last_hidden_state[0])
            return h if plans.stage == 0 else _loss(model, h, targets)

        with context.max_logits() as largest:
            losses = ticks.run(stage, like=torch.empty(0, model.config.hidden_size))
        assert plans.stats.imbalance_after < 1.1
        dist.barrier()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(sum(losses)), gradients, dict(largest)


def _largest(case: Case) -> dict[Any, torch.Tensor]:
    """The largest logits of each layer, of all documents on one rank."""
    rows = [_tokens(microbatch, rank) for microbatch in range(MICROBATCHES) for rank in range(DATA)]
    ids, _, positions = (torch.cat(parts)[None] for parts in zip(*rows, strict=True))
    documents = [n for microbatch in DOCUMENTS for of_rank in microbatch for n in of_rank]
    with distca.init(max_tokens=sum(documents), heads=GQA) as context:
        windows = [None, *{WINDOWS[kind] for kind in case.kinds if kind in WINDOWS} - {None}]
        plans = distca.plans(distca.Layout.from_documents([documents]), GQA, context=context, windows=windows)
        with context.max_logits() as found, torch.no_grad():
            _model(case, "distca").model(ids, position_ids=positions, use_cache=False, plan=plans)
    return dict(found)


def _alone(case: Case, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and the gradients of one process that computes each document by itself."""
    model, total = _model(case, _family(case).reference).to(dtype), 0.0
    for microbatch in range(MICROBATCHES):
        for rank in range(DATA):
            ids, targets, _ = _tokens(microbatch, rank)
            lengths = DOCUMENTS[microbatch][rank]
            for document, target in zip(ids.split(lengths), targets.split(lengths), strict=True):
                h = model.model(input_ids=document[None], use_cache=False).last_hidden_state[0]
                loss = _loss(model, h, target)
                loss.backward()
                total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _run_all(cases: list[Case]) -> list[Any]:
    return [_run(case) for case in cases]


def _error(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest error of a gradient, over the tensor's largest entry."""
    return max(float((found[name] - of).abs().max() / of.abs().max()) for name, of in right.items())


def test_models_whose_layers_differ_are_exact_in_a_pipeline() -> None:
    results = launch(_run_all, CASES, ranks=4)
    for number, case in enumerate(CASES):
        loss, gradients = _alone(case, torch.float64)
        one_process = _error(_alone(case, torch.float32)[1], gradients)
        found: dict[str, torch.Tensor] = {}
        for of_rank in results:
            for name, gradient in of_rank[number][1].items():
                found[name] = found.get(name, 0) + gradient
        assert set(found) == set(gradients), case
        assert sum(of_rank[number][0] for of_rank in results) == pytest.approx(loss, rel=1e-6), case
        error = _error(found, gradients)
        print(case, f"{error:.1e}, one process in float32 {one_process:.1e}")
        assert error < max(1e-6, 1.5 * one_process), case

        if case.layers == (1, 3):  # stage 0 also takes steps for which it has no layer
            of_stages = [{k: torch.maximum(a[2][k], b[2][k]) for k in a[2]} for a, b in _pairs(results, number)]
            assert [len(of_stage) for of_stage in of_stages] == case.with_attention
            expected = _largest(case)
            assert list(expected) == [layer for of_stage in of_stages for layer in of_stage]
            for layer, largest in expected.items():
                mine = next(of_stage[layer] for of_stage in of_stages if layer in of_stage)
                torch.testing.assert_close(mine, largest, rtol=1e-5, atol=1e-5)


def _pairs(results: list[list[Found]], number: int) -> list[tuple[Found, Found]]:
    """What the two data ranks of each stage have found in a case."""
    of_ranks = [of_rank[number] for of_rank in results]
    return [(of_ranks[0], of_ranks[1]), (of_ranks[2], of_ranks[3])]


def _run_with_windows_of_others() -> list[str]:
    chunk, errors = distca.Chunk(CHUNK), []
    for windows in (
        [chunk, chunk, None, None],
        [None, None, None, chunk],
        [distca.Chunk(CHUNK - 1), None, None, chunk],
    ):
        with pytest.raises(distca.DistcaError) as error:
            _run(Case("llama4", (2, 2)), windows)
        errors.append(str(error.value))
    return errors


def test_plans_of_a_pipeline_that_are_for_other_chunks_than_the_layers_are_refused() -> None:
    for errors in launch(_run_with_windows_of_others, ranks=4):
        of_whole, of_chunk, of_other = errors
        assert f"this layer has a window of None, the plan is for a window of Chunk(rows={CHUNK})" in of_whole
        assert f"this layer attends in chunks of {CHUNK} rows, the plan is for a window of None" in of_chunk
        assert f"attends in chunks of {CHUNK} rows, the plan is for a window of Chunk(rows={CHUNK - 1})" in of_other
