"""`distca bench overlap`: what the measure counts as exposed, what the order of calls allows, and the sweep's files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

import distca
from distca.apps.bench.overlap import benchmark, computed, slept, sweep
from distca.apps.bench.overlap.figures import figures_of
from distca.apps.bench.overlap.paired import Paired, estimate, seconds_of
from distca.apps.bench.overlap.schedule import CallTimes, Pass, messages_of, pass_of, play
from distca.apps.bench.overlap.sweep import Ranks, rounds_at
from distca.apps.cli import main
from distca.trace.trace import SentRows, Span, Trace, TrainingPhase
from support.ranks import launch

LINK = distca.Link(bytes_per_second=100.0, latency=0.5)
SIGNALS = distca.Link(bytes_per_second=1e9, latency=0.5, signal_only=True)


def step(forward: float, backward: float = 1.0, on_link: float = 0.0, late: float = 0.0) -> list[Trace]:
    """A step of two ranks. Rank 1 begins forward `late` and ends it with rank 0, whose rows are `on_link`."""
    phases = [TrainingPhase("forward", 10.0, 10.0 + forward), TrainingPhase("backward", 50.0, 50.0 + backward)]
    later = [TrainingPhase("forward", 10.0 + late, 10.0 + forward), phases[1]]
    rows = [SentRows(1, 8, 10.25, 10.25 + on_link)]
    return [Trace(0, [], rows, phases=phases), Trace(1, [], [], phases=later)]


def test_an_interval_is_that_of_the_sign_test() -> None:
    # Coverages of the k-th smallest to the k-th largest of n, from tables of order statistics.
    for n, low, high, level in (
        (5, 1, 5, 0.9375),
        (6, 1, 6, 0.96875),
        (9, 2, 8, 0.9609),
        (20, 6, 15, 0.9586),
        (21, 6, 16, 0.9734),
    ):
        found = estimate([float(value) for value in reversed(range(1, n + 1))])
        assert (found.median, found.low, found.high) == ((n + 1) / 2, low, high)
        assert found.level == pytest.approx(level, abs=5e-5)
    assert estimate([3.0]) == (3.0, 3.0, 3.0, 0.0)
    assert estimate([1.0, 2.0, 4.0]).scaled(-2.0, 1.0)[:3] == (-3.0, -7.0, -1.0)


def test_a_phase_takes_from_the_first_begin_to_the_last_end() -> None:
    traces = step(3.0, late=1.0)
    traces[1].phases[1] = TrainingPhase("backward", 51.0, 53.5)
    assert seconds_of(traces, "forward") == 3.0
    assert seconds_of(traces, "backward") == 3.5
    assert seconds_of(traces) == 6.5


def test_what_only_steps_with_rows_take_longer_is_exposed_and_what_both_take_is_not() -> None:
    # The machine, or a slower peer, makes both steps of a round longer. A quarter of the traffic's 0.4 s is exposed.
    noise = [0.0, 0.5, 3.0, 0.1, 7.0, 0.2, 1.0]
    paired = Paired(
        [step(2.1 + slower, on_link=0.4) for slower in noise],
        [step(2.0 + slower) for slower in noise],
        [step(1.5 + slower) for slower in noise],
    )
    assert paired.traffic("forward") == pytest.approx(0.4)
    assert paired.hidden("forward")[:3] == pytest.approx((0.75, 0.75, 0.75))
    assert paired.hidden()[:3] == pytest.approx((0.75, 0.75, 0.75))
    assert paired.signals("forward").median == pytest.approx(0.5)
    assert paired.exposed("backward") == pytest.approx([0.0] * 7)


def test_noise_of_single_steps_widens_the_interval_and_moves_the_median_little() -> None:
    # Nothing is exposed. Single steps of either kind are late, as they are on a machine with other work.
    late = [0.3, -0.2, 0.0, 0.1, -0.1, 0.02, -0.3, 4.0, -5.0]
    paired = Paired(
        [step(2.0 + max(by, 0.0), on_link=0.5) for by in late],
        [step(2.0 + max(-by, 0.0)) for by in late],
        [step(2.0) for _ in late],
    )
    found = paired.hidden("forward")
    assert found.median == pytest.approx(1.0) and found.low < 1.0 < found.high
    assert (found.low, found.high) == pytest.approx((1 - 0.3 / 0.5, 1 + 0.3 / 0.5))


def test_traffic_and_attention_are_those_of_the_phase_and_of_the_busiest_rank() -> None:
    attends = [Span("attend", False, n, 0, phase, -1, begin, end) for n, phase, begin, end in (
        (1, "forward", 10.0, 11.0), (2, "backward", 50.0, 50.5))]  # fmt: skip
    wait = Span("rows for tasks served here", True, 1, 0, "forward", 0, 10.25, 10.5)
    quiet, busy = step(2.0)
    busy = Trace(1, [*attends, wait], [SentRows(0, 1, 10.5, 10.75), SentRows(0, 1, 50.0, 50.125)], phases=busy.phases)
    paired = Paired([[quiet, busy]], [[quiet, busy]], [[quiet, busy]])
    assert (paired.attention("forward"), paired.attention("backward"), paired.attention()) == (0.75, 0.5, 1.25)
    assert (paired.traffic("forward"), paired.traffic("backward"), paired.traffic()) == (0.25, 0.125, 0.375)


def pass_with(calls: Sequence[tuple[str, int]], times: Sequence[Sequence[tuple[float, float, float]]]) -> Pass:
    return Pass(list(calls), [[CallTimes(*call) for call in of_rank] for of_rank in times], [0.0] * len(times))


def test_in_a_single_stream_rows_cost_their_time_on_the_link_both_ways() -> None:
    calls = [("dispatch", 0), ("attend", 0), ("collect", 0)]
    # Rank 0 sends 200 bytes to rank 1, which has 1 s of its own tasks and 3 s of tasks of rank 0, and returns 100.
    home, server = [(1.0, 0.0, 0.0), (0.0, 2.0, 0.0), (0.0, 0.0, 0.5)], [(1.0, 0.0, 0.0), (0.0, 1.0, 3.0), (0, 0, 0)]
    messages = {(0, "in"): [[0, 200], [0, 0]], (0, "out"): [[0, 0], [100, 0]]}
    of = pass_with(calls, [home, server])
    # 1 s, 2 s on the link and the latency, 3 s of tasks, 1 s on the link and the latency, 0.5 s.
    assert play(of, messages, LINK) == pytest.approx(1 + 2.5 + 3 + 1.5 + 0.5)
    # With one byte rows come while rank 1 has tasks of its own.
    assert play(of, messages, SIGNALS) == pytest.approx(1 + 1 + 3 + 0.5 + 0.5)


def test_with_two_halves_rows_of_one_travel_while_the_other_computes() -> None:
    calls = [("dispatch", 0), ("dispatch", 1), ("attend", 0), ("attend", 1), ("collect", 0), ("collect", 1)]
    both = {(half, way): matrix for half in (0, 1) for way, matrix in (("in", [[0, 100], [0, 0]]),
                                                                       ("out", [[0, 0], [100, 0]]))}  # fmt: skip
    home = [(0, 0, 0), (2, 0, 0), (0, 2, 0), (0, 2, 0), (0, 0, 0), (2, 0, 0)]
    server = [(0, 0, 0), (2, 0, 0), (0, 0, 2), (0, 0, 2), (0, 0, 0), (2, 0, 0)]
    of = pass_with(calls, [home, server])
    # Rows of half 0 are there after 1.5 s, of half 1 after 3.5 s: before their tasks begin. Results of half 0 are home
    # after 5.5 s, while half 1 is attended to until 6 s; those of half 1 after 7.5 s, before the last 2 s are over.
    assert play(of, both, LINK) == pytest.approx(8.0)
    assert play(of, both, SIGNALS) == pytest.approx(8.0)
    slow = distca.Link(bytes_per_second=25.0, latency=0.0)
    # Rows come after 4 s and 8 s. Tasks end at 6 s and 10 s, results are home at 10 s and 14 s.
    assert play(of, both, slow) == pytest.approx(14.0)


def test_a_sender_waits_for_the_slot_of_the_step_before_which_is_free_when_results_have_left() -> None:
    calls = [("dispatch", 0), ("attend", 0), ("collect", 0), ("dispatch", 0), ("attend", 0), ("collect", 0)]
    home, server = [(0.0, 0.0, 0.0)] * 6, [(0.0, 0.0, 1.0), (0, 0, 1), (0, 0, 0), (4.0, 0, 0), (0, 0, 1), (0, 0, 0)]
    messages = {(0, "in"): [[0, 100], [0, 0]], (0, "out"): [[0, 0], [100, 0]]}
    link = distca.Link(bytes_per_second=100.0)
    of = pass_with(calls, [home, server])
    # Rows 1 s, tasks 1 s, results until 3 s. The server computes from 2 s to 6 s. The slot is free at 3 s, and the rows
    # have come by 4 s. Tasks until 7 s, results until 8 s.
    assert play(of, messages, link) == pytest.approx(8.0)
    # The server's own next step begins when its results have left: at 3 s, and not at 2.5 s. It computes 2 s of its own
    # tasks and then those of the rows, and results are home at 7 s.
    soon = pass_with(calls, [home, [*server[:3], (0.5, 0.0, 0.0), (0.0, 2.0, 1.0), server[5]]])
    assert play(soon, messages, link) == pytest.approx(7.0)
    # A sender computes for 0.5 s and waits for its rows, although nothing comes back to it.
    alone = {**messages, (0, "out"): [[0, 0], [0, 0]]}
    sender = [*home[:2], (0.0, 0.0, 0.5)]
    assert play(pass_with(calls[:3], [sender, home[:3]]), alone, link) == pytest.approx(1.0)
    late = pass_with(calls, [home, [*server[:2], (0.0, 0.0, 5.0), *server[3:]]])
    # Results are home at 3 s. The server ends its collect, and frees the slot, at 7 s. Then the rows travel while it
    # computes until 11 s.
    assert play(late, messages, link) == pytest.approx(13.0)
    long = {**messages, (0, "in"): [[0, 600], [0, 0]]}
    # 6 s, 1 s, the slot is free at 12 s, 6 s of rows, 1 s of tasks, 1 s of results.
    assert play(late, long, link) == pytest.approx(20.0)


def test_the_times_of_a_pass_are_medians_of_what_ranks_computed_around_their_waits() -> None:
    def trace(longer: float) -> Trace:
        spans = [
            Span("dispatch", False, 1, 0, "forward", -1, 1.0 + longer, 1.5 + longer, half=1),
            Span("credit to send rows to its server arena", True, 1, 0, "forward", 1, 1.25 + longer, 1.375 + longer),
            Span("compute", False, -1, -1, "forward", -1, 1.5 + longer, 2.0 + longer),
            Span("attend", False, 1, 0, "forward", -1, 2.0 + longer, 4.0 + longer, half=1),
            Span("rows for tasks served here", True, 1, 0, "forward", 1, 2.5 + longer, 3.0 + longer),
            Span("attend", False, 2, 0, "backward", -1, 8.0, 9.0),
        ]
        return Trace(0, spans, [], phases=[TrainingPhase("forward", 0.0, 5.0), TrainingPhase("backward", 7.0, 9.5)])

    found = pass_of([[trace(0.0)], [trace(0.5)], [trace(0.25)]], "forward")
    assert found.calls == [("dispatch", 1), ("attend", 1)]
    assert found.times == [[(1.25, 0.375, 0.0), (0.5, 0.5, 1.0)]]
    assert found.after == [0.75]
    assert pass_of([[trace(0.0)]], "backward") == ([("attend", 0)], [[(1.0, 0.0, 1.0)]], [0.5])


def test_messages_have_the_bytes_of_the_plan() -> None:
    plan = computed.plan_of([[512], [128] * 4])
    for phase in ("forward", "backward"):
        found = messages_of([plan, plan], phase)
        for half in range(2):
            for way in ("in", "out"):
                total = sum(map(sum, found[half, way]))
                assert total == plan.stats.bytes[f"{phase}_{way}"] > 0


def _measured_on_a_rank() -> list[str]:
    (found,) = computed.run_rank([[256], [64] * 4], 1, [(0.5, 1)], True)
    return [f"{kind} {len(traces)} {traces[0].rank == dist.get_rank()}" for kind, traces in found.kinds.items()]


def test_ranks_that_compute_take_each_kind_of_step_in_each_round() -> None:
    kinds = ("link", "one_byte", "without", "single", "single_one_byte")
    assert launch(_measured_on_a_rank, ranks=2) == [[f"{kind} 1 True" for kind in kinds]] * 2


def test_the_benchmark_states_what_is_hidden_its_interval_the_bound_and_the_causes_of_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distca, "launch", partial(distca.launch, start_method="forkserver"))
    monkeypatch.setattr(benchmark, "DOCUMENTS", [[256], [64] * 4])
    monkeypatch.setattr(benchmark, "LAYERS", 1)
    result = benchmark.run(1)
    rows = {row.name: row for row in result.rows}
    hidden = rows["traffic hidden by ping-pong, median"]
    assert hidden.at_least == 0.9
    assert rows["its interval, from"].value <= hidden.value <= rows["its interval, to"].value
    assert rows["wait for rows on the link, share of a step"].value >= 0
    assert result.details["phases"].keys() == {"forward", "backward", "step"}
    assert len(result.details["exposed_seconds_in_each_round"]) == result.details["rounds"] == 1
    lines = result.table().splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("  forward", "  backward", "  step"))] == [
        "forward",
        "backward",
        "step",
    ] * 2


def test_the_sweep_measures_what_it_says_and_writes_json_table_and_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(slept, "SECONDS", 0.002)
    groups = [
        Ranks("sleep", mix, 1, documents)
        for mix, documents in (("long", [[512], [128] * 4]), ("mixed", [[448, 64], [256, 128, 128]]))
    ]
    result = sweep(1, short=True, groups=groups)
    written = result.write_all(tmp_path)
    assert [path.name for path in written] == [f"overlap-sweep{ending}" for ending in (".json", ".md", ".png")]
    cases = json.loads(written[0].read_text())["details"]["cases"]
    assert [(case["ranks"]["mix"], case["traffic"]) for case in cases] == [
        (mix, traffic) for mix in ("long", "mixed") for traffic in (0.3, 0.7, 1.2)
    ]
    assert [case["rounds"] for case in cases] == [6, 1, 1] * 2
    assert [case["figures"]["step"]["hidden"]["level"] for case in cases] == [0.96875, 0.0, 0.0] * 2
    assert result.details["level_of_intervals"] == 0.0
    for case in cases:
        assert case["figures"].keys() == {"forward", "backward", "step"}
        of = case["figures"]["step"]
        assert of["bound"] <= 1.0 + 1e-9 and of["traffic"] > 0
        assert of["hidden"]["low"] <= of["hidden"]["median"] <= of["hidden"]["high"]
    lines = [line for line in written[1].read_text().splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(cases) and len({line.count("|") for line in lines}) == 1
    assert [row.at_least for row in result.rows] == [0.9, 0.9, None] * 2
    assert written[2].stat().st_size > 10_000


def test_a_case_with_half_of_the_traffic_takes_four_times_as_many_rounds() -> None:
    assert [rounds_at(traffic, 10) for traffic in (0.35, 0.5, 0.7, 0.9, 1.2)] == [40, 20, 10, 10, 10]


def test_the_link_of_a_case_has_the_traffic_that_it_is_to_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slept, "SECONDS", 0.01)
    documents = [[512], [128] * 4]
    plan = slept.plan_of(documents)
    measured = slept.run_ranks(documents, 1, [(0.5, 1)])
    case = [of_rank[0] for of_rank in measured]
    signals = [sent for of_rank in case for trace in of_rank.kinds["one_byte"] for sent in trace.transfers]
    assert signals and all(sent.end - sent.begin < 2 / case[0].link_speed for sent in signals)
    found = figures_of(case, [plan, plan])
    # Half of the attention of two halves: 10 ms in forward, and one to four times as long in backward.
    assert 0.5 * 2 * 0.01 * 2 < found["step"].traffic < 0.5 * 2 * 0.01 * 5
    assert found["step"].traffic == pytest.approx(found["forward"].traffic + found["backward"].traffic)


@pytest.mark.parametrize("benchmark", ["plan", "all"])
def test_a_sweep_of_another_benchmark_is_refused(benchmark: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", benchmark, "--sweep"]) == 2
    assert "--sweep is for `distca bench overlap` on the CPU alone" in capsys.readouterr().err
