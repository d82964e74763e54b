"""The schedule of ticks in torch.distributed.pipelining computes what one process computes, with DDP and FSDP2."""

from __future__ import annotations

import gc
import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

import distca
from distca.integrations import torch_pipelining
from distca.pipeline import tick_table
from support import staged_model as model
from support.mistakes import Mistakes, Told
from support.ranks import launch
from support.torch_pipelines import ROWS, Case, Pipeline


def _run(case: Case) -> list[Any]:
    """Of one rank: losses and gradients of two steps, the losses of an evaluation, a third step; steps of attention."""
    with distca.init(max_tokens=512, heads=model.HEADS, timeout=20) as context:
        pipeline = Pipeline(case, context)
        first, (loss, _) = pipeline.run(0), pipeline.run(1, collect=False)
        evaluated, gradients = pipeline.run(2, evaluate=True)  # which leaves those of the second step as they are
        found = [first, (loss, gradients), evaluated, pipeline.run(3), context.step]
        del pipeline
        gc.collect()
        dist.barrier()
    return found


def _run_all(cases: list[Case]) -> list[Any]:
    return [_run(case) for case in cases]


TWO_STAGES = [
    Case([2, 2], wrap="ddp", mean=True),
    Case([1, 1], chunks=2, wrap="ddp"),
    Case([1, 2], microbatches=5, recompute="layer", wrap="fsdp", mean=True),
    Case([2, 2], microbatches=3, recompute="layer", save_attention=True, in_flight=2),
    Case([1, 2], microbatches=3, recompute="layer", ping_pong=True),
]
THREE_STAGES = [Case([2, 1, 1]), Case([1, 1, 1], chunks=2, microbatches=3)]


@pytest.mark.parametrize(("cases", "ranks"), [(TWO_STAGES, 4), (THREE_STAGES, 3)], ids=["two stages", "three stages"])
def test_the_schedule_computes_what_one_process_computes(cases: list[Case], ranks: int) -> None:
    results = launch(_run_all, cases, ranks=ranks)
    for number, case in enumerate(cases):
        of_ranks = [result[number] for result in results]
        data = ranks // len(case.layers)
        for step in (0, 1, 3):
            found = [of_rank[step] for of_rank in of_ranks]
            model.assert_as_alone(found, case.depth, case.lengths(step, data), (case, step))
        loss, _ = model.alone(case.depth, case.lengths(2, data))
        assert sum(of_rank[2] for of_rank in of_ranks) == pytest.approx(loss, rel=1e-6), case
        steps_of_pass = max(case.layers) * (case.microbatches * case.chunks + len(case.layers) - 1)
        passes = 3 if case.recompute is not None and not case.save_attention else 2
        expected = steps_of_pass * (3 * passes + 1) * (2 if case.ping_pong else 1)
        assert {of_rank[4] for of_rank in of_ranks} == {expected} or case.in_flight is not None, case


mistake = Mistakes()
PLAIN = Case([1, 2], microbatches=2)
INTERLEAVED = Case([1, 1], chunks=2, microbatches=2)
SECONDS = 4.0  # longer than any rank computes, shorter than the test waits


def _pipeline(context: distca.Context, case: Case = PLAIN, **changes: Any) -> Pipeline:
    return Pipeline(case, context, SECONDS, **changes)


@mistake("")
def none_at_all(context: distca.Context, wrong: bool) -> None:
    _pipeline(context).run(0)


@mistake("global rank 3: the plans have 2 micro-batches, n_microbatches is 3")
def other_micro_batches(context: distca.Context, wrong: bool) -> None:
    pipeline = _pipeline(context)
    pipeline.schedule = pipeline.scheduled(pipeline.made, 3 if wrong else 2)
    pipeline.run(0)


@mistake(r"global rank 3: the stages .* are \[\(0, 2\)\]; by the plans they are \[\(1, 2\)\]")
def a_stage_of_another_rank(context: distca.Context, wrong: bool) -> None:
    _pipeline(context, **({"stage_index": 0} if wrong else {})).run(0)


@mistake(r"global rank 3: the stages .* \[\(3, 4\), \(1, 4\)\]; .* \[\(1, 4\), \(3, 4\)\], in that order")
def stages_in_another_order(context: distca.Context, wrong: bool) -> None:
    pipeline = _pipeline(context, INTERLEAVED)
    pipeline.schedule = pipeline.scheduled(pipeline.made[::-1] if wrong else pipeline.made)
    pipeline.run(0)


@mistake("global rank 3: stage 1 has no input_args; give PipelineStage example tensors")
def no_shapes(context: distca.Context, wrong: bool) -> None:
    _pipeline(context, **({"input_args": None, "output_args": None} if wrong else {})).run(0)


@mistake("global rank 3: input_args of stage 1 require no gradient")
def shapes_without_gradients(context: distca.Context, wrong: bool) -> None:
    _pipeline(context, **({"input_args": torch.empty(ROWS, model.HIDDEN)} if wrong else {})).run(0)


@mistake(r"stages of the plans are processes (\[2, 0\]|\[3, 1\]); the group of the stages has")
def stages_swapped(context: distca.Context, wrong: bool) -> None:
    pipeline = _pipeline(context)
    pipeline.run(0, pipeline.ticks(0, stages=pipeline.stages[::-1]))


@mistake(
    r"rank \d has 200 rows in a micro-batch, and (in|out)put_args of stage \d have shape \[300, 32\].* as many rows"
)
def micro_batches_of_other_sizes(context: distca.Context, wrong: bool) -> None:
    pipeline = _pipeline(context)
    pipeline.run(0)
    layouts = [distca.Layout.from_documents(lengths) for lengths in ([[300], [300]], [[100, 100], [200]])]
    pipeline.run(1, pipeline.ticks(1, layouts=layouts))


@mistake("these ticks were run before")
def the_ticks_of_the_former_step(context: distca.Context, wrong: bool) -> None:
    pipeline = _pipeline(context)
    first = pipeline.ticks(0)
    pipeline.run(0, first)
    pipeline.run(1, first if wrong else None)


@mistake("ticks is a NoneType; a distca.Ticks is expected")
def no_ticks(context: distca.Context, wrong: bool) -> None:
    pipeline = _pipeline(context)
    pipeline.run(0)
    pipeline.schedule.step(ticks=None)


@mistake(r"an evaluation takes PipelinePlans\(..., backward=False\)")
def an_evaluation_with_backward(context: distca.Context, wrong: bool) -> None:
    pipeline = _pipeline(context)
    pipeline.run(0)
    pipeline.run(1, pipeline.ticks(1, backward=wrong), evaluate=True)


@mistake("step trains, which takes plans with backward")
def training_without_backward(context: distca.Context, wrong: bool) -> None:
    pipeline = _pipeline(context)
    pipeline.run(0, pipeline.ticks(0, backward=not wrong))


@mistake("step trains, which takes plans with backward, and gradients")
def training_without_gradients(context: distca.Context, wrong: bool) -> None:
    pipeline = _pipeline(context)
    pipeline.run(0)
    with torch.set_grad_enabled(not wrong):
        pipeline.run(1)


@mistake("tick 1 of 6, forward: stage 1 calls core_attention more often than the tick has forward steps: 2")
def a_layer_more(context: distca.Context, wrong: bool) -> None:
    pipeline = _pipeline(context, Case([1, 3], microbatches=2) if wrong else PLAIN)
    pipeline.run(0, pipeline.ticks(0, layers=[1, 2]))


@mistake("tick 0 of 6, forward: stage 0 calls core_attention more often than the tick has forward steps: 2")
def a_layer_more_before_others_wait_for_its_rows(context: distca.Context, wrong: bool) -> None:
    pipeline = _pipeline(context, Case([3 if context.rank == 1 else 2, 2], microbatches=2))
    pipeline.run(0, pipeline.ticks(0, layers=2))


@mistake("tick 1 of 6, forward: stage 1 ended the tick after 1 of 2 steps")
def a_layer_less(context: distca.Context, wrong: bool) -> None:
    pipeline = _pipeline(context)
    ticks = pipeline.ticks(0)
    if wrong:
        del pipeline.modules[0].layers["2"]
        ticks.plan.pad = lambda hidden: hidden  # type: ignore[method-assign]
    pipeline.run(0, ticks)


@mistake("tick 2 of 3, forward: stage 1 ended the tick after 1 of 2 steps")
def a_layer_less_in_the_last_tick(context: distca.Context, wrong: bool) -> None:
    pipeline = _pipeline(context)
    ticks = pipeline.ticks(0, backward=False)
    if wrong:
        layer = pipeline.modules[0].layers["2"]
        forward = layer.forward
        layer.forward = lambda h, *more: h if ticks.current.number == 2 else forward(h, *more)
    pipeline.run(0, ticks, evaluate=True)
    pipeline.run(1)  # ranks that need nothing of the last step are told here


@mistake("tick 0 of 6, forward: the plans have halves, and the model is called outside of distca.PingPong")
def halves_without_ping_pong(context: distca.Context, wrong: bool) -> None:
    pipeline = _pipeline(context)
    layouts = [distca.Layout.from_documents(lengths) for lengths in model.DOCUMENTS[:2]]
    try:
        pipeline.run(0, pipeline.ticks(0, halves=[distca.halves(layout) for layout in layouts]))
    finally:
        dist.barrier()  # a context that is closed at once may be heard of before the error


@pytest.fixture(scope="module")
def told() -> dict[str, list[Told]]:
    """For each mistake of rank 3 what each rank is told."""
    return mistake.told(model.HEADS, ranks=4, wrong_rank=3, max_tokens=512)


def test_no_mistake_no_error(told: dict[str, list[Told]]) -> None:
    assert [kind for kind, _, _ in told["none_at_all"]] == [""] * 4


@pytest.mark.parametrize("name", [name for name in mistake if name != "none_at_all"])
def test_all_ranks_are_told_at_once(told: dict[str, list[Told]], name: str) -> None:
    mistake.assert_told_at_once(name, told[name])


@pytest.mark.parametrize(
    "name",
    [
        "_Action",
        "_ComputationType",
        "_PipelineScheduleRuntime",
        "_PipelineScheduleRuntime.register_custom_function",
        "_PipelineScheduleRuntime._prepare_schedule_with_comms",
    ],
)
def test_a_pytorch_without_what_is_needed_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    *owner, attribute = name.split(".")
    with monkeypatch.context() as patch:
        patch.delattr(getattr(schedules, owner[0]) if owner else schedules, attribute)
        with pytest.raises(
            distca.DistcaError, match=f"PyTorch {re.escape(torch.__version__)} lacks .*{attribute}.*Ticks.run"
        ):
            importlib.reload(torch_pipelining)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A process group that stands for four ranks, of which this process is the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"backward": False}, {"in_flight": 2}, {"chunks": 3}], ids=str)
def test_no_receive_comes_after_the_tick_of_its_send(four_ranks: None, options: dict[str, Any]) -> None:
    table = tick_table(4, 8, **options)
    chunks = table.chunks
    made = [PipelineStage(torch.nn.Identity(), 4 * c, 4 * chunks, torch.device("cpu")) for c in range(chunks)]
    schedule = torch_pipelining.ScheduleTicks(made, 8, loss_fn=torch.nn.functional.mse_loss)
    schedule._order(table)
    sent, received = {}, {}
    for stage in range(4):
        number = -1
        for action in schedule.pipeline_order_with_comms[stage]:
            kind, microbatch = action.computation_type.name, action.microbatch_index
            to = action.stage_index + (1 if kind == "SEND_F" else -1)
            if kind == "OVERLAP_F_B" and microbatch is not None:
                assert microbatch == number + 1, "ticks in order"
                number = microbatch
            elif kind.startswith("SEND"):
                sent[kind[-1], to, microbatch] = number
            elif kind.startswith("RECV"):
                received[kind[-1], action.stage_index, microbatch] = number
        assert number == len(table) - 1
    assert sent and set(sent) == set(received)
    assert all(received[what] <= number for what, number in sent.items())
