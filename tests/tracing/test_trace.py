"""Emulated links, and traces of what ranks did over them."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import distca
from distca import testing
from distca.trace.trace import SentRows, Span, TrainingPhase, TrainingStep
from support.batches import Batch, data_parallel, random_batch, spill
from support.groups import compute, loopback_group, on_all_ranks, outcomes, run_step, together
from support.processes import plan_for, tensors_for
from support.torch_ranks import join, torch_group

HEADS = distca.Heads(4, 2, 32)
LENGTHS = (300, 97, 64, 1, 211)
FAST = distca.Link(bytes_per_second=1e9, latency=2e-4)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return random_batch(LENGTHS, HEADS, seed=5)


@pytest.fixture(scope="module")
def plan() -> distca.Plan:
    return distca.plan(spill(LENGTHS, 3), HEADS, tolerance=0.01, min_rows=16)


def traced_step(batch: Batch, plan: distca.Plan, link: distca.Link | None) -> tuple[list, list[distca.Trace]]:
    """The results of all ranks' forward and backward, and their traces."""

    def work(rank: int, context: distca.Context) -> tuple:
        context.start_trace()
        return run_step(batch, plan, context)

    with loopback_group(plan, link=link) as contexts:
        results = on_all_ranks(contexts, work)
        return results, [context.take_trace() for context in contexts]


def test_results_over_a_link_are_bitwise_those_without(batch: Batch, plan: distca.Plan) -> None:
    expected = compute(batch, plan)
    for link in (FAST, distca.Link(2e7), distca.Link(1e3, signal_only=True), distca.Link(1e12, latency=2e-3)):
        results, _ = traced_step(batch, plan, link)
        for ours, theirs in zip(together(batch.lengths, plan.layout, results), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_what_crosses_a_link_is_what_the_plan_says_and_takes_the_links_time(batch: Batch, plan: distca.Plan) -> None:
    link = distca.Link(bytes_per_second=4e7, latency=1e-3)
    _, traces = traced_step(batch, plan, link)
    assert sum(sent.bytes for trace in traces for sent in trace.transfers) == sum(plan.stats.bytes.values()) > 0
    for trace in traces:
        for sent in trace.transfers:
            assert sent.end - sent.begin == pytest.approx(sent.bytes / link.bytes_per_second, abs=2e-9)
        in_order = sorted(trace.transfers, key=lambda sent: sent.begin)
        # Transfers follow one another; two readings of the clock in seconds may differ in the last digits.
        assert all(a.end <= b.begin + 1e-6 for a, b in zip(in_order, in_order[1:], strict=False))
        # No step ends before the latency of its last rows has passed.
        collected = [span.end for span in trace.spans if span.name == "collect"]
        assert max(collected) >= max(sent.end for sent in trace.transfers) + link.latency


def test_signal_only_takes_the_link_no_time_and_moves_all_rows(batch: Batch, plan: distca.Plan) -> None:
    _, traces = traced_step(batch, plan, distca.Link(1e6, signal_only=True))
    for trace in traces:
        assert all(sent.end - sent.begin == pytest.approx(1e-6, abs=2e-9) for sent in trace.transfers)
    assert sum(sent.bytes for trace in traces for sent in trace.transfers) == sum(plan.stats.bytes.values())


def test_a_trace_has_the_parts_of_both_phases_in_order_with_the_waits_inside(batch: Batch, plan: distca.Plan) -> None:
    _, traces = traced_step(batch, plan, FAST)
    for rank, trace in enumerate(traces):
        assert trace.rank == rank
        parts = [span for span in trace.spans if not span.is_wait]
        assert [(part.name, part.phase, part.step) for part in sorted(parts, key=lambda part: part.begin)] == [
            *[(name, "forward", 1) for name in ("dispatch", "attend", "collect")],
            *[(name, "backward", 2) for name in ("dispatch", "attend", "collect")],
        ]
        waits = [span for span in trace.spans if span.is_wait]
        assert waits
        for wait in waits:
            assert any(part.begin <= wait.begin <= wait.end <= part.end and part.step == wait.step for part in parts)
            assert wait.peer in {-1, *range(3)} - {rank}


class _TwoLayers(torch.nn.Module):
    def forward(self, rows: torch.Tensor, plan: distca.Plan, context: distca.Context) -> torch.Tensor:
        for layer in (5, "6 (Attention)"):
            kv = rows[:, :2]
            rows, _ = distca.core_attention(rows, kv, kv, plan, layer=layer, context=context)
        return rows


def test_a_trace_says_the_layer_and_the_half_of_each_step_in_both_phases() -> None:
    plan = distca.plan(distca.Layout.from_documents([[64]]), HEADS)
    with loopback_group(plan) as (context,):
        rows = [torch.randn(64, 4, 32, requires_grad=True) for _ in range(2)]
        context.start_trace()
        _TwoLayers()(rows[0], plan, context).sum().backward()
        parts = sorted((s for s in context.take_trace().spans if s.name == "dispatch"), key=lambda span: span.begin)
        layers = [5, "6 (Attention)"]
        assert [(part.phase, part.layer, part.half) for part in parts] == [
            *(("forward", layer, None) for layer in layers),
            *(("backward", layer, None) for layer in reversed(layers)),
        ]
        both = distca.PingPong(_TwoLayers())(*({"rows": half, "plan": plan, "context": context} for half in rows))
        (both[0].sum() + both[1].sum()).backward()
        trace = context.take_trace().of_step(0, 0.0, 1e9)
        parts = [span for span in trace.spans if span.name == "dispatch"]
        assert [(part.phase, part.layer, part.half) for part in parts] == [
            *(("forward", layer, half) for layer in layers for half in (0, 1)),
            *(("backward", layer, half) for layer in reversed(layers) for half in (1, 0)),
        ]
        # The computation of a half outside of attention precedes its dispatch.
        for span, other in zip(trace.spans, trace.spans[1:], strict=False):
            if span.name == "compute" and other.name == "dispatch":
                assert span.half == other.half
        context.stop_trace()
        _TwoLayers()(rows[0], plan, context)
        assert context.take_trace() == distca.Trace(0, [], [])


def test_nothing_is_recorded_unless_asked_for_and_nothing_twice(batch: Batch, plan: distca.Plan) -> None:
    with loopback_group(plan, link=FAST) as contexts:
        on_all_ranks(contexts, lambda rank, context: run_step(batch, plan, context))
        assert [trace.spans for trace in (context.take_trace() for context in contexts)] == [[], [], []]
        for context in contexts:
            context.start_trace()
        assert [context.take_trace().transfers for context in contexts] == [[], [], []]
        on_all_ranks(contexts, lambda rank, context: run_step(batch, plan, context))
        assert all(context.take_trace().spans for context in contexts)
        assert not any(context.take_trace().spans for context in contexts)
    assert contexts[0].take_trace() == distca.Trace(0, [], [])


def test_figures_of_a_trace_written_by_hand() -> None:
    def span(name: str, begin: float, end: float, is_wait: bool = False) -> Span:
        return Span(name, is_wait, 1, 0, "forward", 1 if is_wait else -1, begin, end)

    trace = distca.Trace(
        0,
        [
            span("rows for tasks served here", 3.0, 3.5, is_wait=True),
            span("attend", 2.0, 6.0),
            span("its own rows to arrive", 7.0, 8.0, is_wait=True),
            span("collect", 6.5, 8.0),
        ],
        [SentRows(1, 100, 0.0, 4.0), SentRows(1, 100, 4.0, 10.0)],
    )
    assert trace.exposed == 1.5
    assert trace.attending == 3.5
    assert trace.traffic == 10.0
    assert trace.hidden == 0.85
    assert distca.Trace(0, trace.spans, []).hidden == 1.0


def test_rows_that_a_rank_copies_itself_are_what_the_plan_says_and_lie_in_its_steps(
    batch: Batch, plan: distca.Plan
) -> None:
    _, traces = traced_step(batch, plan, None)
    for trace in traces:
        sent = [transfer for transfer in plan.transfers if transfer.source == trace.rank]
        to_peers = {peer: sum(rows.bytes for rows in trace.copies if rows.peer == peer) for peer in range(3)}
        assert to_peers == {peer: sum(t.bytes for t in sent if t.target == peer) for peer in range(3)}
        parts = [span for span in trace.spans if not span.is_wait]
        assert all(any(p.begin <= rows.begin <= rows.end <= p.end for p in parts) for rows in trace.copies)
    _, over_link = traced_step(batch, plan, FAST)
    assert [trace.copies for trace in over_link] == [[], [], []]


def a_trace(rank: int = 0) -> distca.Trace:
    """Two steps of training, 1 s and 2 s long, on a machine that has been up for days."""
    at = 1e6 + 1 / 3
    spans = [
        Span("attend", False, 1, 0, "forward", -1, at + 0.25, at + 0.5, "3 (LlamaAttention)", 1),
        Span(
            "rows for tasks served here", True, 1, 0, "forward", 1 - rank, at + 0.25, at + 0.3, "3 (LlamaAttention)", 1
        ),
    ]
    phases = [TrainingPhase("forward", at + 0.1, at + 0.6), TrainingPhase("backward", at + 0.6, at + 0.9)]
    of_first = distca.Trace(rank, spans, [SentRows(1 - rank, 7, at + 0.1, at + 0.2)])
    of_first = of_first.of_step(3, at, at + 1.0, load=5, phases=phases)
    of_second = distca.Trace(rank, [], [], [SentRows(1 - rank, 8, at + 1.1, at + 1.2)]).of_step(4, at + 1.0, at + 3.0)
    return distca.Trace(
        rank,
        [*of_first.spans, *of_second.spans],
        of_first.transfers,
        of_second.copies,
        [*of_first.steps, *of_second.steps],
        [*of_first.phases, *of_second.phases],
    )


def test_the_trace_of_a_step_has_what_lies_between_its_parts() -> None:
    at = 1e6 + 1 / 3
    found = [(span.name, span.phase, round(span.begin - at, 6), round(span.end - at, 6)) for span in a_trace().spans]
    assert found == [
        ("compute", "other", 0, 0.1),
        ("compute", "forward", 0.1, 0.25),
        ("attend", "forward", 0.25, 0.5),
        ("rows for tasks served here", "forward", 0.25, 0.3),
        ("compute", "forward", 0.5, 0.6),
        ("compute", "backward", 0.6, 0.9),
        ("compute", "other", 0.9, 1.0),
        ("compute", "forward", 1.0, 3.0),  # this step was given no phases
    ]
    assert a_trace().steps == [TrainingStep(3, at, at + 1.0, 5), TrainingStep(4, at + 1.0, at + 3.0, None)]


def test_a_written_trace_is_chromes_format(batch: Batch, plan: distca.Plan, tmp_path: Path) -> None:
    _, traces = traced_step(batch, plan, FAST)
    distca.write_trace(tmp_path / "trace.json", traces)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == sum(len(trace.spans) + len(trace.transfers) for trace in traces)
    attend = next(event for event in complete if event["name"] == "attend backward" and event["pid"] == 2)
    ours = next(span for span in traces[2].spans if span.name == "attend" and span.phase == "backward")
    first = min(span.begin for trace in traces for span in trace.spans)
    assert attend["ts"] == pytest.approx((ours.begin - first) * 1e6, abs=0.002)
    assert attend["dur"] == pytest.approx(ours.seconds * 1e6, abs=0.002)


def test_written_spans_nest_also_where_a_reader_cuts_times_down_to_nanoseconds(
    batch: Batch, plan: distca.Plan, tmp_path: Path
) -> None:
    _, traces = traced_step(batch, plan, FAST)
    begin, end = (pick(s for t in traces for s in t.begins()) for pick in (min, max))
    traces = [trace.of_step(0, begin - 0.1, end + 1.0, load=3) for trace in traces]
    distca.write_trace(tmp_path / "trace.json", [*traces, a_trace()])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in (event for event in events if event["ph"] == "X"):
        cut = int(event["ts"] * 1e3), int(event["ts"] * 1e3) + int(event["dur"] * 1e3)
        open_ones = threads.setdefault((event["pid"], event["tid"]), [])
        while open_ones and open_ones[-1][1] <= cut[0]:
            open_ones.pop()
        assert not open_ones or (open_ones[-1][0] <= cut[0] and cut[1] <= open_ones[-1][1]), event
        open_ones.append(cut)
    assert {thread for _, thread in threads} == {0, 1}


def test_a_trace_that_is_read_is_the_one_that_was_written(tmp_path: Path) -> None:
    distca.write_trace(tmp_path / "trace.json", [a_trace(1), a_trace(0)])
    read = distca.read_trace(tmp_path / "trace.json")
    assert [trace.rank for trace in read] == [0, 1]
    at = a_trace().steps[0].begin
    for trace in read:
        wrote = a_trace(trace.rank)
        for ours, theirs in (
            (trace.spans, wrote.spans),
            (trace.transfers, wrote.transfers),
            (trace.copies, wrote.copies),
            (trace.steps, wrote.steps),
            (trace.phases, wrote.phases),
        ):
            for one, other in zip(ours, theirs, strict=True):
                times = {
                    "begin": pytest.approx(other.begin - at, abs=2e-9),
                    "end": pytest.approx(other.end - at, abs=2e-9),
                }
                assert one._asdict() == other._asdict() | times


def _with_events(events: str) -> str:
    return f'{{"otherData": {{"distca": 1}}, "traceEvents": [{events}]}}'


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "No such file.*a trace of distca.write_trace is expected"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        (
            _with_events('{"pid": null, "ph": "M"}, {"pid": 0, "ph": "M"}'),
            "an event is not as distca.write_trace makes it",
        ),
        (
            _with_events(
                '{"pid": 0, "ph": "X", "cat": "part", "ts": 0, "dur": 1, "name": 3, "args": {"phase": "forward"}}'
            ),
            "an event is not as distca.write_trace makes it",
        ),
        *(
            (
                _with_events(
                    f'{{"pid": 0, "ph": "X", "cat": "training", "ts": {at}, "dur": 1, "name": "a", "args": {about}}}'
                ),
                "an event is not as distca.write_trace makes it",
            )
            for at, about in [
                ("1" + "0" * 400, '{"step": 1}'),
                ("NaN", '{"step": 1}'),
                ("1e300", '{"step": 1}'),
                ("1", '{"step": [1]}'),
                ("1", '{"step": 1, "load": "much"}'),
            ]
        ),
        ("[]", "is not a trace of distca.write_trace"),
        ('{"traceEvents": []}', "is not a trace of distca.write_trace"),
        ('{"traceEvents": [], "otherData": {"distca": 3}}', "it has format 3, this reads 1 and 2"),
        ('{"traceEvents": [{"pid": 0, "ph": "X"}], "otherData": {"distca": 1}}', "an event is not as"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(content: str | None, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(distca.InvalidArgumentError, match=complaint) as caught:
        distca.read_trace(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("link", "complaint"),
    [
        (distca.Link(0), "at least 1"),
        (distca.Link(float("nan")), "at least 1"),
        (distca.Link(1e9, latency=-1), "0 to 10"),
        (distca.Link(1e9, latency=float("nan")), "0 to 10"),
    ],
)
def test_a_link_that_cannot_be_is_refused(link: distca.Link, complaint: str) -> None:
    with pytest.raises(distca.errors.InvalidArgumentError, match=complaint):
        testing.loopback(2, max_tokens=8, heads=HEADS, link=link)


def test_the_torch_transport_has_no_link() -> None:
    with pytest.raises(distca.errors.InvalidArgumentError, match="has no link"):
        distca.init(transport="torch", max_tokens=8, heads=HEADS, link=FAST)


def over_a_link(rank: int, ranks: int, pipe: Connection, port: int) -> None:
    join(rank, ranks, port)
    plan = plan_for(ranks, rank)
    with distca.init(transport="shm", max_tokens=plan.num_rows, heads=plan.heads, link=FAST, timeout=20.0) as context:
        context.start_trace()
        distca.core_attention(*tensors_for(plan)[:3], plan, context=context)
        pipe.send((context.transport, sum(sent.bytes for sent in context.take_trace().transfers)))
    dist.destroy_process_group()


def test_init_over_shared_memory_takes_a_link_and_its_trace_has_what_that_carried() -> None:
    with torch_group(over_a_link, 2) as group:
        told = [group.receive(rank) for rank in range(2)]
    sent = [[t.bytes for t in plan_for(2, 0).transfers if t.source == rank] for rank in range(2)]
    assert [transport for transport, _ in told] == ["link", "link"]
    assert all(0 < carried <= sum(of_both) for (_, carried), of_both in zip(told, sent, strict=True))


def test_one_rank_of_init_takes_a_link() -> None:
    with distca.init(max_tokens=8, heads=HEADS, link=FAST, name="linked") as context:
        assert context.transport == "link"


def test_rows_that_wait_for_the_link_when_a_step_fails_are_dropped_and_the_news_overtakes_them() -> None:
    heads = distca.Heads(2, 1, 16)
    plan = distca.plan(distca.Layout.from_documents([[400], [16]]), heads, tolerance=0.01, min_rows=16)
    sent = sum(transfer.bytes for transfer in plan.transfers if transfer.source == 0 and transfer.tensor in "qkv")
    assert sent > 10_000

    def work(rank: int, context: distca.Context) -> None:
        rows = plan.for_rank(rank).num_rows
        q, k, v = torch.zeros(rows, 2, 16), torch.zeros(rows, 1, 16), torch.zeros(rows, 1, 16)
        step = distca.dispatch(q, k, v, plan.for_rank(rank), context=context)
        if rank == 0:
            step.abandon("on purpose")
        else:
            distca.attend(step)

    # The rows would take ten minutes, and the contexts wait for one.
    with loopback_group(plan, link=distca.Link(sent / 600)) as contexts:
        _, waited_in_vain = outcomes(contexts, work)
        assert "rank 0 left step 1 (forward) unfinished" in str(waited_in_vain)
        assert contexts[0].take_trace().transfers == []


def test_a_rank_that_leaves_behind_a_link_is_noticed(batch: Batch) -> None:
    plan = distca.plan(data_parallel(LENGTHS, 2), HEADS, tolerance=0.01, min_rows=16)
    with loopback_group(plan, link=FAST) as contexts:
        contexts[1].close()
        with pytest.raises(distca.PeerLeftError):
            run_step(batch, plan, contexts[0])
