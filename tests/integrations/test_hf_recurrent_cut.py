"""Models with recurrent layers whose documents are cut between ranks, or share rows, are computed as if alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import tiny
from families.recurrent import Result, assert_as_expected
from families.reference import gradients, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import distca
from distca import pipeline
from distca.apps.train.stages import Chunk
from distca.integrations import hf
from distca.integrations.hf_recurrent import run_by_document
from distca.integrations.hf_scans import functions_of
from support import ranks as processes
from support.branches import Tree
from support.groups import loopback_group, on_all_ranks, outcomes

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of kernels

MODELS = {
    "linear attention": ("qwen3_next", {}),
    "state spaces beside attention": ("falcon_h1", {}),
    "convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "a sum over time": ("minimax", {}),  # returns a state, too
    "a projection into three": ("zaya", {}),
}
MODELS = {which: model for which, model in MODELS.items() if model[0] in tiny.CLASSES}  # older versions lack some
#: Documents that share no rows, and where they lie.
TREE = Tree([9, 20, 1, 40], [range(9), range(20), range(1), range(40)], {})
LAYOUTS = {
    "two cut documents, and one that stays": [
        [(0, 0, 9), (1, 0, 12), (2, 0, 1), (-1, 0, 2)],
        [(3, 0, 25), (1, 12, 20)],
        [(3, 25, 40), (-1, 0, 1)],
    ],
    "pieces out of order on one rank": [
        [(1, 15, 20), (1, 0, 15), (0, 0, 9)],
        [(-1, 0, 2), (2, 0, 1), (3, 0, 40)],
        [(-1, 0, 3)],
    ],
    "head and tail, and a rank that computes none": [
        [(3, 0, 10), (3, 30, 40)],
        [(3, 10, 30)],
        [(0, 0, 9), (1, 0, 20), (2, 0, 1)],
    ],
}
#: A prompt that is cut, two answers, one that goes on from the middle of another, and a document that shares nothing.
PROMPTS = Tree([9, 15, 25, 12, 7], [range(9), range(9, 15), range(9, 25), range(11, 12), range(7)], {1: 0, 2: 0, 3: 1})
PROMPTS_LAYOUT = [[(0, 0, 5), (1, 9, 15)], [(2, 9, 20), (0, 5, 9)], [(4, 0, 7), (3, 11, 12), (2, 20, 25)]]


def _rows_of(tree: Tree, seed: int) -> list[torch.Tensor]:
    """A number for each row of each document; those of shared rows are those of the document that has them."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(2, tiny.VOCABULARY, (length,), generator=generator) for length in tree.lengths]
    return [torch.cat([rows[of][part.start : part.stop] for of, part in tree.path(d)]) for d in range(len(rows))]


def _inputs(tree: Tree, layout: distca.Layout, rank: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A rank's input_ids and position_ids, and the targets of its rows; -100 for padding."""
    made = []
    for rows, padding in ((_rows_of(tree, 3), 0), (_rows_of(tree, 4), -100)):
        parts = [
            rows[d][begin:end] if d >= 0 else torch.full((end - begin,), padding)
            for d, begin, end in layout.segments(rank)
        ]
        made.append(torch.cat([torch.zeros(0, dtype=torch.int64), *parts]))
    return {"input_ids": made[0][None], "position_ids": layout.position_ids(rank)[None]}, made[1]


@functools.cache
def _expected(which: str, shared: bool = False) -> Result:
    """transformers' own attention, one document at a time with all rows that it sees; its own rows count."""
    tree = PROMPTS if shared else TREE
    entry, options = MODELS[which]
    model, total = tiny.model_of(entry, "eager", options).train(), 0.0
    for own, tokens, targets in zip(tree.own, _rows_of(tree, 3), _rows_of(tree, 4), strict=True):
        loss = loss_of(model(tokens[None], use_cache=False).logits[0, own.start :], targets[own.start :])
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def _found(
    which: str,
    layout: distca.Layout,
    tree: Tree = TREE,
    *,
    prepare: Callable[[torch.nn.Module], Any] = lambda model: None,
    halves: bool = False,
) -> Result:
    entry, options = MODELS[which]
    models = [tiny.model_of(entry, "distca", options).train() for _ in range(layout.num_ranks)]
    config = models[0].config
    make = hf.plan_halves if halves else distca.plans
    arguments = {"heads": hf.heads_of(config, torch.float32), "windows": hf.windows_of(config)}
    made = [make(layout, **arguments, rank=rank) for rank in range(layout.num_ranks)]

    def work(rank: int, context: distca.Context) -> Result:
        prepared = prepare(models[rank])
        inputs, targets = _inputs(tree, layout, rank)
        model = models[rank] if prepared is None else prepared
        loss = loss_of(model(**inputs, plan=made[rank], distca_context=context, use_cache=False).logits[0], targets)
        loss.backward()
        return loss.item(), gradients(models[rank])

    parts = made[0].plans if halves else made[:1]
    with loopback_group([plan for part in parts for plan in part.values()], timeout=20.0) as contexts:
        results = on_all_ranks(contexts, work)
    summed = {name: sum(of[name] for _, of in results) for name in results[0][1]}
    return sum(loss for loss, _ in results), summed


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_that_are_cut_between_three_ranks_are_computed_as_if_alone(which: str, layout: str) -> None:
    assert_as_expected(_found(which, distca.Layout(LAYOUTS[layout])), _expected(which))


@pytest.mark.parametrize("which", MODELS)
def test_layers_that_run_again_in_backward_get_the_rows_again(which: str) -> None:
    layout = distca.Layout(LAYOUTS["two cut documents, and one that stays"])
    found = _found(which, layout, prepare=lambda model: model.gradient_checkpointing_enable())
    assert_as_expected(found, _expected(which))


@pytest.mark.parametrize("which", MODELS)
def test_two_halves_whose_documents_are_cut_are_computed_as_one_row(which: str) -> None:
    layout = distca.Layout(LAYOUTS["two cut documents, and one that stays"])
    assert_as_expected(_found(which, layout, prepare=hf.ping_pong, halves=True), _expected(which))


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_documents_that_share_rows_are_computed_as_if_each_had_them(which: str, ranks: int) -> None:
    segments = PROMPTS_LAYOUT if ranks == 3 else [[one for of_rank in PROMPTS_LAYOUT for one in of_rank]]
    layout = distca.Layout(segments, branches=PROMPTS.branches)
    assert_as_expected(_found(which, layout, PROMPTS), _expected(which, shared=True))


class _Looks(torch.nn.Module):
    """A recurrence that also returns what has as many rows as a document of `states` rows, and takes such a thing."""

    def __init__(self, states: int) -> None:
        super().__init__()
        self.conv1d = torch.nn.Conv1d(1, 1, 4)
        self.states = states

    def forward(self, hidden_states: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert states.shape[1] == self.states
        return hidden_states.cumsum(dim=1), states + 1


def test_what_looks_like_rows_to_one_rank_is_not_taken_for_rows() -> None:
    """Rank 0 has three rows, and rank 1 one document of five; what has three or five rows is none of both."""
    layout = distca.Layout([[(0, 0, 3)], [(0, 3, 5)]])
    plan = distca.plan(layout, distca.Heads(1, 1, 8))

    def work(rank: int, context: distca.Context) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for states in (3, 5):
            module = _Looks(states)
            run_by_document(module, lambda: True)
            rows = torch.ones(1, layout.num_rows(rank), 1)
            with distca.using(plan.for_rank(rank), context=context):
                found.append(module(rows, torch.zeros(1, states, 2)))
        return found

    with loopback_group(plan, timeout=20.0) as contexts:
        for rank, found in enumerate(on_all_ranks(contexts, work)):
            for (rows, of_states), states in zip(found, (3, 5), strict=True):
                assert rows[0, :, 0].tolist() == ([1, 2, 3] if rank == 0 else [4, 5])
                assert torch.equal(of_states, torch.ones(1, states, 2))


def test_a_rank_that_leaves_out_a_model_is_an_error_on_the_others() -> None:
    layout = distca.Layout(LAYOUTS["two cut documents, and one that stays"])
    entry, options = MODELS["convolutions"]
    models = [tiny.model_of(entry, "distca", options).eval() for _ in range(3)]
    plan = distca.plan(layout, hf.heads_of(models[0].config, torch.float32))

    def work(rank: int, context: distca.Context) -> None:
        inputs, _ = _inputs(TREE, layout, rank)
        if rank < 2:
            models[rank](**inputs, plan=plan.for_rank(rank), distca_context=context, use_cache=False)

    with loopback_group(plan, timeout=0.3) as contexts:
        first, second, _ = outcomes(contexts, work)
    for error in (first, second):
        assert isinstance(error, distca.PeerTimeoutError) and "could not exchange rows" in str(error), error


# ---- ranks that are processes: gloo


def _train_in_groups(which: str, wrapper: str, parts: tuple[str, ...]) -> Result:
    """Two groups of two ranks, each with all documents; results are those of both groups together. With FSDP2 these
    parts of a layer are units, too.
    """
    entry, options = MODELS[which]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "context"))
    layout = distca.Layout([[(0, 0, 9), (3, 0, 25), (-1, 0, 2)], [(2, 0, 1), (3, 25, 40), (1, 0, 20)]])
    model = tiny.model_of(entry, "distca", options).train()
    config = model.config
    heads = hf.heads_of(config, torch.float32)
    if wrapper == "fsdp2":
        for layer in model.model.layers:
            for part in parts:
                module = getattr(layer, part.split(".")[0], None)
                if module is not None and functions_of(module):  # in older versions of transformers it has none
                    fully_shard(layer.get_submodule(part))
            fully_shard(layer)
        fully_shard(model)
    wrapped = DistributedDataParallel(model) if wrapper == "ddp" else model
    with distca.init(max_tokens=64, heads=heads, group=mesh.get_group("context"), timeout=60.0) as context:
        plans = distca.plans(layout, heads, windows=hf.windows_of(config), rank=context.rank)
        inputs, targets = _inputs(TREE, layout, context.rank)
        loss = loss_of(wrapped(**inputs, plan=plans, distca_context=context, use_cache=False).logits[0], targets)
        loss.backward()
        whole_ones = {n: (g.full_tensor() if isinstance(g, DTensor) else g) for n, g in gradients(model).items()}
        model.eval()
        with torch.no_grad():  # a second batch, of whole documents on one rank and of padding on the other
            whole = distca.Layout([[(0, 0, 9), (1, 0, 20), (2, 0, 1), (3, 0, 40)], [(-1, 0, 3)]])
            plans = distca.plans(whole, heads, windows=hf.windows_of(config), rank=context.rank)
            inputs, _ = _inputs(TREE, whole, context.rank)
            wrapped(**inputs, plan=plans, distca_context=context, use_cache=False)
    total = torch.tensor(loss.item(), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item(), whole_ones


@pytest.mark.parametrize(
    ("which", "wrapper", "parts"),
    [("linear attention", "ddp", ()), ("convolutions", "fsdp2", ("conv.in_proj", "conv.out_proj"))],
)
def test_processes_in_two_groups_train_as_one_process_does(which: str, wrapper: str, parts: tuple[str, ...]) -> None:
    expected = _expected(which)
    for found in processes.launch(_train_in_groups, which, wrapper, parts, ranks=4):
        # The wrappers divide by the four ranks; both groups have all documents.
        assert_as_expected((found[0] / 2, {name: 2 * gradient for name, gradient in found[1].items()}), expected)


#: For each micro-batch the documents of two ranks, of which one is cut, or shares rows of the other rank.
MICRO_BATCHES = (
    (TREE, [[(0, 0, 9), (3, 0, 25), (-1, 0, 2)], [(2, 0, 1), (3, 25, 40), (1, 0, 20)]]),
    (PROMPTS, [[(0, 0, 5), (1, 9, 15), (4, 0, 7)], [(2, 9, 25), (0, 5, 9), (3, 11, 12)]]),
)
PIPELINED = {
    "state spaces": ("bamba", {"attn_layer_indices": [1, 3]}),
    "a sum over time": ("minimax", {"layer_types": ["linear_attention", "full_attention"] * 2}),
}


def _train_in_stages(which: str, checkpoints: bool) -> Result:
    """Two stages of two layers each, on two ranks; the gradients of this rank's stage."""
    entry, options = PIPELINED[which]
    whole = tiny.model_of(entry, "distca", {**options, "num_hidden_layers": 4}).train()
    if checkpoints:
        whole.gradient_checkpointing_enable()
    heads = hf.heads_of(whole.config, torch.float32)
    stage_group = dist.get_rank() // 2
    layouts = [distca.Layout(segments, branches=tree.branches) for tree, segments in MICRO_BATCHES]
    pipeline_group = [dist.new_group([rank, rank + 2]) for rank in range(2)][dist.get_rank() % 2]
    with distca.init(max_tokens=64, heads=heads, pipeline_parallel=pipeline_group, timeout=60.0) as context:
        plans = pipeline.PipelinePlans(layouts, heads, stages=context.stages, context=context)
        scale = whole.model.layers[1].self_attn.scaling
        ticks = pipeline.Ticks(plans, context=context, recompute="layer" if checkpoints else None, scale=scale)
        chunk = Chunk(whole, range(2 * stage_group, 2 * stage_group + 2), last=stage_group == 1)

        def stage(work: pipeline.Work, rows: torch.Tensor | None) -> torch.Tensor:
            inputs, targets = _inputs(MICRO_BATCHES[work.microbatch][0], layouts[work.microbatch], plans.index)
            ids = inputs.pop("input_ids")
            embedded = whole.model.embed_tokens(ids) if rows is None else rows[None]
            shared = {"plan": ticks.plan, "distca_context": context, "use_cache": False}
            hidden = chunk(inputs_embeds=embedded, **inputs, **shared).last_hidden_state[0]
            return hidden if stage_group == 0 else loss_of(whole.lm_head(hidden), targets)

        losses = ticks.run(stage, like=torch.empty(0, whole.config.hidden_size))
        dist.barrier()
    return float(sum(losses)), gradients(whole)


@pytest.mark.parametrize(("which", "checkpoints"), [("state spaces", True), ("a sum over time", False)])
def test_stages_of_a_pipeline_take_documents_that_are_cut_or_share_rows(which: str, checkpoints: bool) -> None:
    entry, options = PIPELINED[which]
    model, loss = tiny.model_of(entry, "eager", {**options, "num_hidden_layers": 4}).train(), 0.0
    for tree, _ in MICRO_BATCHES:
        for own, tokens, targets in zip(tree.own, _rows_of(tree, 3), _rows_of(tree, 4), strict=True):
            of_document = loss_of(model(tokens[None], use_cache=False).logits[0, own.start :], targets[own.start :])
            of_document.backward()
            loss += of_document.item()
    expected = gradients(model)
    found = processes.launch(_train_in_stages, which, checkpoints, ranks=4)
    summed = {name: sum(of.get(name, torch.zeros(())) for _, of in found) for name in expected}
    assert_as_expected((sum(of for of, _ in found), summed), (loss, expected))
