"""Megatron-core on distca: exact beside Megatron-core alone, or refused. `make megatron` runs more cases."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path
from types import SimpleNamespace as Spec
from typing import Any

import pytest

import distca
from support.ranks import launch

if (
    importlib.util.find_spec("megatron") is None
):  # Megatron itself is imported where it runs, because that takes seconds
    pytest.skip("megatron-core is not installed", allow_module_level=True)


def _exact(number_of_processes: int, folder: Path) -> Any:
    from support import megatron_cases as of
    from support import megatron_runs as runs

    uneven = {"num_layers_in_first_pipeline_stage": 1}
    cases = [
        runs.Case(tensor=2, per_token=True, steps=3, writes="a checkpoint"),
        # Gradients are reduced in backward from the second step on.
        runs.Case(pipeline=2, per_token=True, overlap=True, align=True, chunks=2, changes=of.SELECTIVE, steps=4),
        runs.Case(pipeline=2, per_token=True, changes=uneven | of.RECOMPUTED[0], steps=4, reads="a checkpoint"),
        runs.Case(pipeline=2, changes={**uneven, **of.RECOMPUTED[2], **of.WINDOWS, "softmax_scale": 0.7}),
        runs.Case(pipeline=2, overlap=True, shards=True, gathers=True, tied=True, steps=2),
        runs.Case(tensor=2, per_token=True, joined=True),
        runs.Case(pipeline=2, halved=True, chunks=2, per_token=True, changes=of.SELECTIVE, steps=4),
        runs.Case(pipeline=2, halved=True, per_token=True, changes=uneven | of.RECOMPUTED[0], steps=4),
        runs.Case(tensor=4, data=1, share=2, halved=True, changes=of.SEQUENCE),
        runs.Case(pipeline=2, steps=3, changes={**of.QK_CLIP, **of.RECOMPUTED[2], **uneven}),
    ]
    if number_of_processes == 1:
        return runs.run_all_alone(cases), *_in_one_process()
    return cases, runs.run_all(cases, folder)


@pytest.fixture(scope="module")
def alone() -> tuple[list[Any], dict[str, str], dict[str, Any]]:
    """What one process computes, what it is told for each mistake, and what a failed evaluation leaves."""
    [found] = launch(_exact, 1, Path(), ranks=1)
    return found


def test_four_processes_compute_what_one_process_computes(alone: Any, tmp_path: Path) -> None:
    """A checkpoint goes from one split to another."""
    from support.megatron_runs import assert_as_alone

    of_ranks = launch(_exact, 4, tmp_path, ranks=4)
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
    "a plan with a window": r"layer 1 is causal with a window of None, the plan causal with one of 30. .*window=None",
    "a plan that is not causal": "layer 1 is causal with a window of None, the plan full with one of None",
    "outside of ticks": "no tick with work is under way",
    "another dtype": r"plan was made for 4 query heads .*, bfloat16; the tensors have .*, float32",
    "more layers": "calls core_attention more often than the tick has forward steps: 2",
    "no more data": "StopIteration",
    "no block of layers": "there is no TransformerBlock of Megatron in a Linear. What to change: .* ping_pong=False",
    "compiled layers": r"layers.1 .* compiled, and compiled code cannot give the turn",
    "a compiled forward": r"layers.1 .* compiled, and compiled code cannot give the turn",
}


def _in_one_process() -> tuple[dict[str, str], dict[str, Any]]:
    from megatron.core import parallel_state, tensor_parallel

    from distca.integrations.megatron_on_cpu import cuda_is_cpu

    with cuda_is_cpu():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        return _told(), _after_a_failed_evaluation() | {"halves": _halves_of_a_forward_that_was_replaced()}


def _told() -> dict[str, str]:
    """What is told for each mistake to a process that has two layers."""
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    from distca.integrations import megatron
    from support import megatron_runs as runs

    case = runs.Case(data=1, layers=2)

    def told(mistake: str) -> str:
        config = runs.configured(case)
        deep = case._replace(layers=3) if mistake == "more layers" else case
        [model] = runs.models_of(deep, runs.configured(deep), None)
        if mistake == "compiled layers":
            model.module.decoder.layers[1].compile()
        if mistake == "a compiled forward":
            layer = model.module.decoder.layers[1]
            layer.forward = torch.compile(layer.forward)
        if mistake == "no block of layers":
            linear: Any = torch.nn.Linear(1, 1)
            linear.config, model = config, linear
        data = [runs.microbatch_of(case, 0, number, 0) for number in range(2)]

        def forward_step(data_iterator: Any, model: Any) -> Any:
            batch, packed, mask = next(data_iterator), data_iterator.packed_seq_params(), None
            if mistake == "no plan":
                packed = PackedSeqParams("thd", *[packed.cu_seqlens_q] * 2, max_seqlen_q=240, max_seqlen_kv=240)
            if mistake.startswith("a plan"):
                layout = distca.Layout.from_documents([[240]])
                options = {"window": 30} if mistake == "a plan with a window" else {"mask": "full"}
                packed.plan = distca.plan(layout, packed.context.heads, context=packed.context, **options)
            if mistake == "a mask":
                mask = torch.zeros(1, 1, 240, 240, dtype=torch.bool)
            return model(batch["tokens"], batch["positions"], mask, packed_seq_params=packed), lambda out: (
                out.mean(),
                {},
            )

        heads_of = case._replace(changes={"params_dtype": torch.bfloat16}) if mistake == "another dtype" else case
        with megatron.init(runs.configured(heads_of), max_tokens=240, timeout=20) as context:
            halved = mistake in ("no block of layers", "compiled layers", "a compiled forward")
            batches: Any = megatron.PlannedBatches(
                iter(data), config, context=context, num_microbatches=2, ping_pong=halved
            )
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

    return {mistake: told(mistake) for mistake in MISTAKES}


def _after_a_failed_evaluation() -> dict[str, Any]:
    """The loss of a micro-batch before and after an evaluation of other documents that fails, and what that leaves."""
    from distca.integrations import megatron
    from support import megatron_runs as runs

    case = runs.Case(data=1, layers=2)
    config = runs.configured(case)
    [model] = runs.models_of(case, config, None)
    [trained, evaluated] = (runs.microbatch_of(case, 0, number, 0) for number in (0, 2))  # one document, and many

    def forward_step(data_iterator: Any, model: Any) -> Any:
        found = runs.forward_step(data_iterator, model)
        if data_iterator is evaluation:
            raise ValueError("a bad sample")
        return found

    with megatron.init(config, max_tokens=240, timeout=20) as context:
        options: dict[str, Any] = {"num_microbatches": 1, "continues": lambda batch: False, "context": context}
        batches = megatron.PlannedBatches(iter([trained] * 2), config, **options)
        evaluation = megatron.PlannedBatches(iter([evaluated]), config, forward_only=True, **options)
        given: dict[str, Any] = {"num_microbatches": 1, "seq_length": 240, "micro_batch_size": 1}
        [before] = runs.train(model, forward_step, data_iterator=batches, **given)
        with pytest.raises(ValueError, match="a bad sample") as kept:  # which keeps the frames of the schedule
            runs.train(model, forward_step, data_iterator=evaluation, forward_only=True, **given)
        with pytest.raises(distca.InvalidArgumentError, match="no tick is under way"):
            next(evaluation)
        assert kept.traceback
        [after] = runs.train(model, forward_step, data_iterator=batches, **given)
        for each in (batches, evaluation):
            each.close()
    losses = [float(each["loss"]) for each in (before, after)]
    return {"losses": losses, "hooks": len(model.module.rotary_pos_emb._forward_hooks)}


def _halves_of_a_forward_that_was_replaced() -> list[int]:
    """How many halves an iteration in ping-pong runs through a forward that somebody has put on the block itself, in
    each of two iterations.
    """
    from distca.integrations import megatron
    from support import megatron_runs as runs

    case = runs.Case(data=1, layers=2)
    config = runs.configured(case)
    [model] = runs.models_of(case, config, None)
    block, calls, counts = model.module.decoder, [], []
    forward = block.forward

    def counted(*given: Any, **options: Any) -> Any:
        calls.append(1)
        return forward(*given, **options)

    block.forward = counted
    with megatron.init(config, max_tokens=240, timeout=20) as context:
        data = iter([runs.microbatch_of(case, 0, 0, 0)] * 2)
        batches = megatron.PlannedBatches(data, config, context=context, num_microbatches=1, ping_pong=True)
        given: dict[str, Any] = {"num_microbatches": 1, "seq_length": 240, "micro_batch_size": 1}
        for _ in range(2):
            runs.train(model, runs.forward_step, data_iterator=batches, **given)
            counts.append(len(calls))
        batches.close()
    return counts


def test_ping_pong_keeps_a_forward_that_somebody_has_put_on_the_block(alone: Any) -> None:
    assert alone[2]["halves"] == [2, 4]


def test_an_evaluation_that_fails_changes_no_later_loss(alone: Any) -> None:
    before, after = alone[2]["losses"]
    assert after == before


def test_a_schedule_that_has_ended_leaves_nothing_on_the_model(alone: Any) -> None:
    assert alone[2]["hooks"] == 0


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_what_to_change(alone: Any, mistake: str) -> None:
    found, expected = alone[1][mistake], MISTAKES[mistake]
    assert re.search(expected, found) if expected else found == ""


def test_chunks_with_one_function_against_early_reduction_are_refused() -> None:
    """One function would end for all chunks at the last backward of the first one."""
    from distca.integrations.megatron_schedule import _GradientSync

    with pytest.raises(distca.InvalidArgumentError, match="a list of one for each chunk is expected"):
        _GradientSync(Spec(no_sync_func=lambda: None, grad_sync_func=None), 2, 0)


def test_a_megatron_without_what_is_needed_is_named() -> None:
    from megatron import core

    from distca.integrations.megatron_names import _name

    expected = f"uses no_such of megatron.core.utils: Megatron-core {re.escape(core.__version__)} .*install megatron-co"
    with pytest.raises(distca.DistcaError, match=expected):
        _name("utils", "no_such")
    with pytest.raises(distca.DistcaError, match="uses it of megatron.core.no_such: Megatron-core "):
        _name("no_such", "it")


@pytest.mark.parametrize("version", [(0, 15, 3, ""), (0, 20, 0, "rc1"), (1, 0, 0, "")])
def test_a_megatron_that_was_not_tried_is_refused_when_it_is_imported(
    version: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import package_info

    from distca.integrations import megatron_names

    monkeypatch.setattr(package_info, "VERSION", version)
    number = re.escape(".".join(map(str, version[:3])))
    with pytest.raises(distca.DistcaError, match=f"version {number} was not tried. What to change: install megatron"):
        runpy.run_path(megatron_names.__file__)


def test_the_package_asks_for_the_versions_of_megatron_that_were_tried() -> None:
    from distca.integrations.megatron_names import REQUIREMENT

    root = Path(__file__).parents[2]
    assert f'\nmegatron = ["{REQUIREMENT}"]\n' in (root / "pyproject.toml").read_text()
    assert f'"{REQUIREMENT}"\n' in (root / "docs/megatron.md").read_text()
