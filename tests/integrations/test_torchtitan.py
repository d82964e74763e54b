"""Models of torchtitan whose core attention distca computes on two ranks: exact, or refused with the reason."""

from __future__ import annotations

import copy
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torch.utils._pytree import tree_map

import distca
from support.groups import loopback_group, on_all_ranks
from support.ranks import launch

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make titan")
from distca.integrations.torchtitan import (
    BatchPlan,
    DistcaAttention,
    heads_of,
    plan_batches,
    windows_of,
)
from support import titan, titan_stages

EXPERTS = {"moe_comm_backend": "standard"}
#: Model, flavor, number of layers, options. The layers are of all kinds that the model has.
EXACT = [
    ("deepseek_v3", "debugmodel", 2, EXPERTS),
    ("deepseek_v3", "debugmodel", 2, EXPERTS | {"num_mtp_layers": 1}),
    ("gpt_oss", "debugmodel", 2, EXPERTS),
    ("kimi_k2_7", "debugmodel", 2, EXPERTS),
    ("llama3", "debugmodel", 6, {}),
    ("muse_glimmer", "debugmodel", 4, {}),
    ("muse_glimmer", "debugmodel_mm", 4, {}),
    ("qwen3", "debugmodel", 2, {}),
    ("qwen3", "debugmodel_moe", 2, EXPERTS),
    ("qwen3", "debugmodel_non_fused_qkv", 2, {}),
]
#: Models that are refused, or cannot be imported without what is not installed here.
NOT_RUN = {"flux": "not a decoder with layers of causal attention", "qwen3_5": "No module named 'fla'"}
LLAMA = distca.Heads(q=16, kv=16, dim=16)


def test_every_model_of_the_installed_torchtitan_is_known() -> None:
    assert {name for name, *_ in EXACT} | set(NOT_RUN) == set(titan.model_packages())


@pytest.mark.parametrize(("package", "flavor", "layers", "options"), EXACT)
def test_two_ranks_have_loss_and_gradients_of_torchtitans_own_attention(
    package: str, flavor: str, layers: int, options: dict[str, Any]
) -> None:
    expected = titan.reference(titan.config_of(package, flavor, layers, **options))
    ours, plans, steps = titan.on_two_ranks(titan.config_of(package, flavor, layers, **options))
    assert steps == 2 * len(windows_of(titan.config_of(package, flavor, layers, **options)))
    assert abs(ours.loss - expected.loss) <= 1e-6 * expected.loss
    # Sums in float32 differ more where norms follow attention, in Qwen and Glimmer.
    assert titan.worst_gradient(ours, expected) <= (1e-6 if package in ("llama3", "deepseek_v3") else 1e-5)
    for plan in plans.values():
        assert plan.stats.imbalance_before > 1.3
        assert plan.stats.imbalance_after <= 1.05


def test_an_out_transform_of_any_kind_has_exact_gradients() -> None:
    """That of gpt-oss, taken for one that is not known: its sinks then work on out and lse."""
    options = ("gpt_oss", "debugmodel", 2)
    expected = titan.reference(titan.config_of(*options, **EXPERTS))
    with mock.patch("distca.integrations.torchtitan._sinks", lambda _: None):
        ours, *_ = titan.on_two_ranks(titan.config_of(*options, **EXPERTS))
    assert abs(ours.loss - expected.loss) <= 1e-6 * expected.loss
    assert titan.worst_gradient(ours, expected) <= 1e-5


@pytest.mark.parametrize("package", NOT_RUN)
def test_a_model_that_is_not_run_says_why(package: str) -> None:
    with pytest.raises((ImportError, distca.InvalidArgumentError), match=NOT_RUN[package]):
        heads_of(next(iter(titan.flavors(package).values()))())


def test_models_differ_in_windows_sinks_and_value_heads() -> None:
    assert windows_of(titan.config_of("muse_glimmer", "debugmodel", 4)) == [128, 128, 128, None]
    assert windows_of(titan.config_of("gpt_oss", "debugmodel", 2, **EXPERTS)) == [128, None]
    latent = heads_of(titan.config_of("deepseek_v3", "debugmodel", 2, **EXPERTS))
    assert latent == distca.Heads(q=16, kv=16, dim=192, v_dim=128, dtype=torch.bfloat16)


def test_the_override_replaces_every_layer() -> None:
    config = titan.config_of("llama3", "debugmodel", 6)
    lines = titan.replaced(config)
    assert len(lines) == 6 and all("VarlenAttention.Config -> DistcaAttention.Config" in line for line in lines)
    assert all(isinstance(layer.attention.inner_attention, DistcaAttention.Config) for layer in config.layers)


def test_a_document_over_both_ranks_is_exact_with_the_positions_of_its_layout() -> None:
    layout = distca.Layout([[(0, 0, 300)], [(0, 300, 500), (1, 0, 100)]])
    tokens = torch.randint(0, 2000, (600,), generator=torch.Generator().manual_seed(3))

    def loss(model: Any, rows: slice, positions: torch.Tensor, masks: Any) -> torch.Tensor:
        logits = model(tokens[rows][None], positions=positions[None], attention_masks=masks)[0]
        return torch.nn.functional.cross_entropy(logits, tokens[rows], reduction="sum") / 600

    alone = titan.own_attention(titan.built(titan.config_of("llama3", "debugmodel", 2)))
    whole = torch.cat([torch.arange(500), torch.arange(100)])
    loss(alone, slice(0, 600), whole, alone.get_attention_masks(whole[None])).backward()
    config = titan.config_of("llama3", "debugmodel", 2)
    titan.replaced(config)
    models, plan = [titan.built(config), titan.built(config)], distca.plan(layout, LLAMA)

    def work(rank: int, context: distca.Context) -> None:
        masks, positions = BatchPlan(plan.for_rank(rank), context), layout.position_ids(rank)
        loss(models[rank], slice(300 * rank, 300 * rank + 300), positions, masks).backward()

    with loopback_group(plan) as contexts:
        on_all_ranks(contexts, work)
    of_ranks = [dict(model.named_parameters()) for model in models]
    for name, wanted in alone.named_parameters():
        ours = of_ranks[0][name].grad + of_ranks[1][name].grad
        assert (ours - wanted.grad).abs().max() <= 1e-6 * wanted.grad.abs().max(), name


def test_the_plan_of_a_batch_survives_pytrees_copies_and_the_splitting_of_keywords() -> None:
    masks = BatchPlan(distca.plan(distca.Layout.from_documents([[8, 4]]), LLAMA))
    assert tree_map(lambda leaf: leaf, masks) is masks
    assert copy.deepcopy({"attention_masks": masks})["attention_masks"] is masks
    _, keywords = split_args_kwargs_into_chunks((torch.zeros(2, 6),), {"attention_masks": masks}, 2)
    assert [of_chunk["attention_masks"] for of_chunk in keywords] == [masks, masks]


def test_a_layers_output_has_the_dtype_and_shape_of_its_queries() -> None:
    heads = distca.Heads(q=4, kv=2, dim=8, v_dim=16, dtype=torch.bfloat16)
    plan = distca.plan(distca.Layout.from_documents([[5, 7]]), heads)
    layer = DistcaAttention(DistcaAttention.Config())
    with loopback_group(plan) as contexts:
        q, k, v = torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 16)
        out = layer(q, k, v, attention_masks=BatchPlan(plan, contexts[0]), enable_gqa=True)
    assert out.shape == (2, 6, 4, 16) and out.dtype == torch.float32


def _called(config: dict[str, Any] | None = None, **keywords: Any) -> None:
    """Calls a layer without a context: it must refuse before any step."""
    rows = torch.zeros(1, 40, 16, 16)
    plan = distca.plan(distca.Layout.from_documents([[40]]), LLAMA)
    DistcaAttention(DistcaAttention.Config(**config or {}))(
        rows, rows, rows, **{"attention_masks": BatchPlan(plan)} | keywords
    )


def _stated(change: Any) -> None:
    """Asks for the heads of a changed configuration."""
    config = titan.config_of("llama3", "debugmodel", 2)
    change(config)
    heads_of(config)


def _planned(**changes: Any) -> None:
    config = titan.config_of("llama3", "debugmodel", 1)
    if changes.pop("replaced", True):
        titan.replaced(config)
    plan_batches(titan.built(config), **changes)


def _with_types() -> None:
    with mock.patch("distca.integrations.torchtitan.is_type_checking", lambda: True):
        _called()


REFUSALS = {
    "a mask of torchtitan": (lambda: _called(attention_masks=None), "is a NoneType, a BatchPlan is expected"),
    "a window that the plan lacks": (lambda: _called({"window_size": (6, 0)}), "the layer's window is 7"),
    "later rows": (lambda: _called({"window_size": (-1, -1)}), "a row cannot see later rows"),
    "types of meshes": (_with_types, "spmd_typechecking is not supported"),
    "flex attention": (
        lambda: heads_of(titan.config_of("llama3", "debugmodel", attention="flex")),
        r'layers.0 of Llama3Model has FlexAttention: make the model with attn_backend="varlen"',
    ),
    "linear attention": (lambda: _stated(lambda c: setattr(c.layers[1], "attention", None)), "layers.1 .* linear"),
    "other heads": (lambda: _stated(lambda c: setattr(c.layers[1].attention, "n_heads", 8)), "differ in their heads"),
    "no override": (lambda: _planned(replaced=False), "layers.0 has torchtitan's attention: add .*use_distca"),
    "no context": (_planned, "there is no context 'default'"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_plan_cannot_express_is_refused_by_name(name: str) -> None:
    call, message = REFUSALS[name]
    with pytest.raises(distca.InvalidArgumentError, match=f"^torchtitan: .*{message}"):
        call()


def test_a_window_that_covers_the_longest_document_needs_no_plan_of_its_own() -> None:
    plan = distca.plan(distca.Layout.from_documents([[40]]), LLAMA)
    with loopback_group(plan) as contexts:
        _called({"window_size": (39, 0)}, attention_masks=BatchPlan(plan, contexts[0]))


def test_a_rank_with_padding_alone_has_no_window() -> None:
    """What its plan tells is the window of a document elsewhere."""
    layout = distca.Layout([[(0, 0, 40)], [(-1, 0, 40)]])
    plan, layer = distca.plan(layout, LLAMA, window=7, rank=1), DistcaAttention(DistcaAttention.Config())
    assert layer._plan(BatchPlan(plan)) == (plan, plan)
    with pytest.raises(distca.InvalidArgumentError, match="the layer's window is None, .* its window 7"):
        layer._plan(BatchPlan(plan.for_rank(0)))


def test_another_torchtitan_is_named_when_its_names_are_gone() -> None:
    spec = importlib.util.find_spec("distca.integrations.torchtitan_config")
    assert spec is not None and spec.loader is not None
    with (
        mock.patch.dict(sys.modules, {"torchtitan.models.gpt_oss.model": ModuleType("model")}),
        pytest.raises(ImportError, match=r"written for version 0\.3\.0 .* installed is 0\.3\.0: cannot import name"),
    ):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_compiled_layers_share_one_graph_over_batches() -> None:
    config = titan.config_of("llama3", "debugmodel", 3)
    titan.replaced(config)
    model, losses = titan.built(config), []
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    layout = distca.Layout.from_documents([titan.layout().document_lengths[:2]])
    plan = distca.plan(layout, LLAMA)
    with loopback_group(plan) as contexts:
        masks = BatchPlan(plan, contexts[0])
        losses.append(titan.step(model, 0, masks).loss)
        for layer in model.layers.values():
            layer.compile(backend=backend, fullgraph=True)
        losses += [titan.step(model, 0, masks).loss for _ in range(2)]
    assert losses[0] == losses[1] == losses[2]
    assert len(graphs) == 1


def test_selective_checkpointing_saves_core_attention() -> None:
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    job = SimpleNamespace(ac=SelectiveAC.Config())
    job.traverse = lambda kind: iter([("ac", job.ac, job, "ac")])
    steps = []
    for _ in range(2):
        config = titan.config_of("llama3", "debugmodel", 2)
        titan.replaced(config)
        model = titan.built(config)
        job.ac.build().apply(model)
        plan = distca.plan(distca.Layout.from_documents([titan.layout().document_lengths[:2]]), LLAMA)
        with loopback_group(plan) as contexts:
            titan.step(model, 0, BatchPlan(plan, contexts[0]))
            steps.append(contexts[0].step)
        apply_overrides(OverrideConfig(imports=["distca.integrations.torchtitan.save_distca"]), job)
    assert steps == [6, 4]  # without and with the override


def _planned_by_itself() -> tuple[titan.Result, list[str], float]:
    """A rank that plans its batches, among them one of which rank 1 has a row that does not begin a document."""
    rank, config = dist.get_rank(), titan.config_of("llama3", "debugmodel", 2)
    titan.replaced(config)
    model, refusals = titan.built(config), []
    with distca.init(max_tokens=512, heads=heads_of(config, torch.float32), timeout=60.0) as context:
        alone = dist.new_group([0])
        for change in ({"group": alone} if rank == 0 else {"context": "other"},):
            try:
                plan_batches(model, **change)
            except distca.InvalidArgumentError as error:
                refusals.append(str(error))
        plan_batches(model, tolerance=0.03)
        result = titan.step(model, rank)
        made = model.get_attention_masks(titan.positions_of(rank)).plan.for_window(None)
        try:
            model.get_attention_masks(titan.positions_of(rank) + rank)
        except distca.InvalidArgumentError as error:
            refusals.append(str(error))
        assert context.step == 4
    named = [module.layer for module in model.modules() if isinstance(module, DistcaAttention)]
    assert named == [f"layers.{number}.attention.inner_attention" for number in range(2)]
    return result, refusals, made.stats.imbalance_after


def test_a_model_plans_its_batches_from_the_positions_of_all_ranks() -> None:
    expected = titan.reference(titan.config_of("llama3", "debugmodel", 2))
    (first, first_refusals, imbalance), (second, second_refusals, _) = launch(_planned_by_itself, ranks=2)
    grads = {name: first.grads[name] + second.grads[name] for name in first.grads}
    assert titan.worst_gradient(titan.Result(0.0, grads), expected) <= 1e-6
    assert imbalance <= 1.03
    assert "the context has global ranks [0, 1], the group [0]" in first_refusals[0]
    assert "there is no context 'other'" in second_refusals[0]
    for refusal in (first_refusals[1], second_refusals[1]):
        assert refusal.startswith("rank 1: torchtitan: positions [2, 256] must be [B, L] and begin with 0 in every row")


def test_stages_of_a_model_in_the_schedule_of_ticks_are_exact() -> None:
    expected, of_ranks = titan_stages.alone(), launch(titan_stages.of_rank, ranks=4)
    names = set(of_ranks[0].grads) | set(of_ranks[2].grads)
    grads = {name: sum(result.grads[name] for result in of_ranks if name in result.grads) for name in names}
    loss = sum(result.loss for result in of_ranks)
    assert abs(loss - expected.loss) <= 1e-6 * expected.loss
    assert titan.worst_gradient(titan.Result(loss, grads), expected) <= 1e-6
