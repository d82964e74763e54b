"""Megatron-core on distca: exact beside Megatron-core alone, or refused. `make megatron` runs more cases."""

from __future__ import annotations

import importlib.util
import re
from types import SimpleNamespace as Spec
from typing import Any

import pytest

import distca
from support.ranks import launch

if (
    importlib.util.find_spec("megatron") is None
):  # Megatron itself is imported where it runs, because that takes seconds
    pytest.skip("megatron-core is not installed", allow_module_level=True)


def _exact(number_of_processes: int) -> Any:
    from support import megatron_runs as runs

    uniform = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    cases = [
        runs.Case(tensor=2, per_token=True),
        runs.Case(pipeline=2, changes={"num_layers_in_first_pipeline_stage": 1, **uniform}, steps=2),
        # Gradients are reduced in backward from the second step on.
        runs.Case(
            pipeline=2, chunks=2, overlap=True, align=True, changes={"recompute_granularity": "selective"}, steps=2
        ),
    ]
    if number_of_processes == 1:
        return runs.run_all_alone(cases), _told()
    return cases, runs.run_all(cases)


@pytest.fixture(scope="module")
def alone() -> tuple[list[Any], dict[str, str]]:
    """What one process computes, and what it is told for each mistake."""
    [found] = launch(_exact, 1, ranks=1)
    return found


def test_four_processes_compute_what_one_process_computes(alone: Any) -> None:
    from support.megatron_runs import assert_as_alone

    of_ranks = launch(_exact, 4, ranks=4)
    assert_as_alone(of_ranks[0][0], [results for _, results in of_ranks], alone[0])


MISTAKES = {
    "nothing": "",
    "other micro-batches": r"\(3, 1, False, 1, None\); with these PlannedBatches \(2, 1, False, 1, None\) is allowed",
    "two sequences": r"\(2, 2, False, 1, None\); with these PlannedBatches",
    "an evaluation": r"\(2, 1, True, 1, None\); with these PlannedBatches",
    "other rows": r"micro-batches have \[240\] rows .* seq_length is 200. What to change: count padding",
    "a plain iterator": "data_iterator is not a PlannedBatches",
    "no plan": "packed_seq_params is a PackedSeqParams. What to change: pass data_iterator.packed_seq_params",
    "a mask": "attention_mask or attention_bias is given",
    "outside of ticks": "no tick with work is under way",
    "more layers": "calls core_attention more often than the tick has forward steps: 2",
    "no more data": "StopIteration",
}


def _told() -> dict[str, str]:
    """What is told for each mistake, in one process that has two layers."""
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.packed_seq_params import PackedSeqParams

    from distca.integrations import megatron
    from distca.integrations.megatron_on_cpu import cuda_is_cpu
    from support import megatron_runs as runs

    case = runs.Case(data=1, layers=2)

    def told(mistake: str) -> str:
        config = runs.configured(case)
        deep = case._replace(layers=3) if mistake == "more layers" else case
        [model] = runs.models_of(deep, runs.configured(deep), None)
        data = [runs.microbatch_of(case, 0, number, 0) for number in range(2)]

        def forward_step(data_iterator: Any, model: Any) -> Any:
            batch, packed, mask = next(data_iterator), data_iterator.packed_seq_params(), None
            if mistake == "no plan":
                packed = PackedSeqParams("thd", *[packed.cu_seqlens_q] * 2, max_seqlen_q=240, max_seqlen_kv=240)
            if mistake == "a mask":
                mask = torch.zeros(1, 1, 240, 240, dtype=torch.bool)
            return model(batch["tokens"], batch["positions"], mask, packed_seq_params=packed), lambda out: (
                out.mean(),
                {},
            )

        with megatron.init(config, max_tokens=240, timeout=20) as context:
            batches: Any = megatron.PlannedBatches(iter(data), config, context=context, num_microbatches=2)
            changes: dict[str, Any] = {
                "other micro-batches": {"num_microbatches": 3},
                "two sequences": {"micro_batch_size": 2},
                "an evaluation": {"forward_only": True},
                "other rows": {"seq_length": 200},
                "a plain iterator": {"data_iterator": iter(data)},
            }.get(mistake, {})
            given = {"num_microbatches": 2, "seq_length": 240, "micro_batch_size": 1, "data_iterator": batches}
            try:
                if mistake == "outside of ticks":
                    next(batches)
                runs.train(model, forward_step, **(given | changes))
                if mistake == "no more data":
                    runs.train(model, forward_step, **given)
            except (distca.DistcaError, StopIteration) as error:
                return f"{type(error).__name__}: {error}"
            finally:
                batches.close()
        return ""

    with cuda_is_cpu():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        return {mistake: told(mistake) for mistake in MISTAKES}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_what_to_change(alone: Any, mistake: str) -> None:
    found, expected = alone[1][mistake], MISTAKES[mistake]
    assert re.search(expected, found) if expected else found == ""


REFUSED = [
    ("attention_dropout", 0.1),
    ("context_parallel_size", 2),
    ("multi_latent_attention", True),
    ("softmax_type", "learnable"),
    ("window_size", (128, 0)),
    ("apply_query_key_layer_scaling", True),
    ("qk_clip", True),
    ("cuda_graph_impl", "local"),
]
REFUSED_WITH_TICKS = [
    ("mtp_num_layers", 1),
    ("pipeline_model_parallel_layout", "Et|tL"),
    ("num_microbatches_with_partial_activation_checkpoints", 1),
    ("fine_grained_activation_offloading", True),
    ("defer_embedding_wgrad_compute", True),
    ("recompute_method", "block"),
]


def _config(**changes: Any) -> Spec:
    plain = {"virtual_pipeline_model_parallel_size": None, "recompute_granularity": None}
    return Spec(**(plain | changes))


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_attention_cannot_do_is_refused_by_name(name: str, value: Any) -> None:
    from distca.integrations.megatron import DistcaCoreAttention

    with pytest.raises(distca.InvalidArgumentError, match=f"Megatron's {name} = {re.escape(repr(value))} does not go"):
        DistcaCoreAttention(_config(**{name: value}), 1)


@pytest.mark.parametrize(("name", "value"), REFUSED + REFUSED_WITH_TICKS)
def test_what_cannot_go_together_with_ticks_is_refused_by_name(
    name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distca.integrations import megatron

    monkeypatch.setattr(megatron.names, "get_num_layers_to_build", lambda *_: 2)
    config = _config(**{"recompute_granularity": "full" if name == "recompute_method" else None, name: value})
    with (
        distca.init(max_tokens=8, heads=distca.Heads(q=1, kv=1, dim=8), name="refused") as context,
        pytest.raises(distca.InvalidArgumentError, match=f"Megatron's {name} = {re.escape(repr(value))} does not go"),
    ):
        megatron.PlannedBatches([], config, context=context, num_microbatches=1)


def test_chunks_of_different_depth_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from distca.integrations import megatron

    monkeypatch.setattr(megatron.names, "get_num_layers_to_build", lambda _, chunk, __: 1 + chunk)
    with (
        distca.init(max_tokens=8, heads=distca.Heads(q=1, kv=1, dim=8), name="refused") as context,
        pytest.raises(distca.InvalidArgumentError, match=r"the chunks of the stages \[\[1, 2\]\] layers"),
    ):
        config = _config(virtual_pipeline_model_parallel_size=2)
        megatron.PlannedBatches([], config, context=context, num_microbatches=1)


def test_chunks_with_one_function_against_early_reduction_are_refused() -> None:
    """One function would end for all chunks at the last backward of the first one."""
    from distca.integrations.megatron_schedule import _GradientSync

    with pytest.raises(distca.InvalidArgumentError, match="a list of one for each chunk is expected"):
        _GradientSync(_config(no_sync_func=lambda: None, grad_sync_func=None), 2, 0)


@pytest.mark.parametrize(
    "options",
    [{"attention_type": "cross"}, {"attention_dropout": 0.1}, {"num_splits": 1}, {"attn_mask_type": "no_mask"}],
    ids=str,
)
def test_other_kinds_of_attention_are_refused(options: dict[str, Any]) -> None:
    from distca.integrations.megatron import DistcaCoreAttention, names

    if "attn_mask_type" in options:
        options = {"attn_mask_type": names.AttnMaskType[options["attn_mask_type"]]}
    with pytest.raises(distca.InvalidArgumentError, match="allowed"):
        DistcaCoreAttention(_config(), 1, **options)


def _layer(attention: Any, **others: Any) -> Spec:
    return Spec(submodules=Spec(self_attention=Spec(submodules=attention), **others))


def test_every_self_attention_of_a_block_gets_distca() -> None:
    """Megatron's specs, that of Transformer Engine too, have the slot in this place."""
    from distca.integrations.megatron import DistcaCoreAttention, use_distca

    layers = [_layer(Spec(core_attention=object, linear_qkv=int)) for _ in range(2)]
    assert use_distca(block := Spec(layer_specs=layers)) is block
    assert [layer.submodules.self_attention.submodules.core_attention for layer in layers] == [DistcaCoreAttention] * 2
    assert layers[0].submodules.self_attention.submodules.linear_qkv is int


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (_layer(Spec()), "no self_attention.submodules.core_attention"),
        (Spec(), "no self_attention.submodules.core_attention"),
        (_layer(Spec(core_attention=object), cross_attention=Spec(submodules=Spec())), "cross attention"),
    ],
    ids=["no slot", "no layer", "cross attention"],
)
def test_a_layer_without_the_slot_is_refused(layer: Spec, message: str) -> None:
    from distca.integrations.megatron import use_distca

    with pytest.raises(distca.InvalidArgumentError, match=message):
        use_distca(layer)


def test_a_megatron_without_what_is_needed_is_named() -> None:
    from megatron import core

    from distca.integrations.megatron_names import _name

    expected = f"uses no_such of megatron.core.utils: Megatron-core {re.escape(core.__version__)} .*have megatron-core"
    with pytest.raises(distca.DistcaError, match=expected):
        _name("utils", "no_such")
    with pytest.raises(distca.DistcaError, match="uses it of megatron.core.no_such: Megatron-core "):
        _name("no_such", "it")
