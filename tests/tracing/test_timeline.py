"""Figures and the picture of traces that are written by hand, and `distca report`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import distca
from distca.apps.cli import main
from distca.apps.common.timeline_picture import draw_timeline
from distca.trace.timeline import after_warm_up, figures, lines_below_table, rows_of_table, windows
from distca.trace.trace import SentRows, Span, TrainingPhase

PNG = b"\x89PNG"


def part(name: str, begin: float, end: float) -> Span:
    return Span(name, False, 1, 0, "forward", -1, begin, end)


def wait(begin: float, end: float) -> Span:
    return Span("rows for tasks served here", True, 1, 0, "forward", 0, begin, end)


def by_hand() -> list[distca.Trace]:
    """Two ranks with two steps. The first takes 1 s and has one-time costs. The second takes 10 s, and rank 1 is done a
    second earlier.
    """
    first = [distca.Trace(rank, [part("attend", 0.1, 0.9)], []).of_step(0, 0.0, 1.0, load=4) for rank in range(2)]
    # Rank 0 sends from 3 to 6 over a link. Rank 1 copies results from 6.5 to 7 itself.
    second = [
        distca.Trace(
            0, [part("dispatch", 2, 3.5), part("attend", 4, 8)], [SentRows(1, 10, 3, 6)]
        ).of_step(1, 1, 11, load=9),
        distca.Trace(
            1, [part("dispatch", 2, 3), part("attend", 3, 7), wait(4, 6), wait(8, 9), part("collect", 8, 9)], [],
            [SentRows(0, 5, 6.5, 7)],
        ).of_step(1, 1, 10, load=3),
    ]  # fmt: skip
    return [
        distca.Trace(rank, a.spans + b.spans, a.transfers + b.transfers, a.copies + b.copies, a.steps + b.steps)
        for rank, (a, b) in enumerate(zip(first, second, strict=True))
    ]


def test_traces_without_a_step_in_common_have_no_windows() -> None:
    apart = [distca.Trace(n, [part("attend", 0.1, 0.9)], []).of_step(n, 0.0, 1.0) for n in range(2)]
    with pytest.raises(distca.InvalidArgumentError, match="no step of training in common"):
        windows(apart)


def test_figures_of_a_step_are_those_counted_by_hand() -> None:
    traces = by_hand()
    assert [window.number for window in windows(traces)] == [0, 1]
    (window,) = after_warm_up(windows(traces))
    assert (window.begin, window.end) == (1, 11)
    found = figures(traces, [window])
    zero, one = found.ranks
    # The waits of 2 s and 1 s, and the second for which rank 0 goes on.
    assert (zero.idle_share, one.idle_share) == (0.0, 0.4)
    assert found.idle_shares == (0.0, 0.4)
    assert (zero.attention, one.attention) == (4, 2)
    # Rows travel from 3 to 6 and from 6.5 to 7. Rank 0 dispatches until 3.5. Rank 1 waits from 4 to 6, then copies.
    assert (zero.traffic, zero.exposed, zero.hidden) == (3.5, 0.5, 3.0)
    assert (one.traffic, one.exposed, one.hidden) == (3.5, 2.5, 1.0)
    assert found.predicted == 9 / 6
    assert found.measured == 4 / 3


def test_figures_of_several_steps_are_added_up_and_imbalances_are_means() -> None:
    found = figures(by_hand(), windows(by_hand()))
    assert found.numbers == [0, 1]
    assert [rank.seconds for rank in found.ranks] == [11, 11]
    assert found.ranks[1].idle_share == 4 / 11
    assert [rank.load for rank in found.ranks] == [13, 7]
    assert found.predicted == pytest.approx((1 + 9 / 6) / 2)
    assert found.measured == pytest.approx((1 + 4 / 3) / 2)


def test_a_trace_without_steps_is_one_window_and_says_nothing_of_loads() -> None:
    traces = [distca.Trace(rank, [part("attend", 2 + rank, 6), wait(4, 5)], []) for rank in range(2)]
    (window,) = windows(traces)
    assert (window.number, window.begin, window.end) == (None, 2, 6)
    found = figures(traces, [window])
    assert [rank.idle_share for rank in found.ranks] == [0.25, 0.25]
    assert found.predicted is None
    assert rows_of_table(found)[1] == ("0", "25.00%", "-", "-", "-", "1.200")
    assert any("no rows in transit were recorded" in line for line in lines_below_table(found))


def test_an_empty_trace_has_no_figures() -> None:
    with pytest.raises(distca.InvalidArgumentError, match="the trace has no events"):
        windows([distca.Trace(0, [], [])])


def of_ping_pong() -> list[distca.Trace]:
    """A rank that runs two layers in two halves, forward only. Half 0 computes for 2 s, and half 1 for 1 s."""
    spans = [
        Span("dispatch", False, 1, 0, "forward", -1, 2, 3, "0 (Attention)", 0),
        Span("dispatch", False, 2, 1, "forward", -1, 4, 5, "0 (Attention)", 1),
        Span("attend", False, 1, 0, "forward", -1, 5, 6, "0 (Attention)", 0),
        Span("attend", False, 2, 1, "forward", -1, 6, 7, "0 (Attention)", 1),
        Span("collect", False, 1, 0, "forward", -1, 7, 8, "0 (Attention)", 0),
        Span("collect", False, 2, 1, "forward", -1, 10, 11, "0 (Attention)", 1),
    ]
    phases = [TrainingPhase("forward", 0.5, 12), TrainingPhase("backward", 12, 14), TrainingPhase("optimizer", 14, 15)]
    return [distca.Trace(0, spans, []).of_step(0, 0, 16, phases=phases)]


def test_what_lies_between_parts_is_of_the_half_that_computes_and_of_its_phase() -> None:
    (trace,) = of_ping_pong()
    assert [(s.begin, s.end, s.phase, s.half) for s in trace.spans if s.name == "compute"] == [
        (0, 0.5, "other", None),
        (0.5, 2, "forward", 0),
        (3, 4, "forward", 1),
        (8, 10, "forward", 0),  # for example the head of the model, before the other half's collect
        (11, 12, "forward", 1),
        (12, 14, "backward", 1),
        (14, 15, "optimizer", None),
        (15, 16, "other", None),
    ]


def test_the_picture_shows_phases_layers_and_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: saved.append(self))
    draw_timeline(tmp_path / "one.png", of_ping_pong(), windows(of_ping_pong()))
    draw_timeline(tmp_path / "plain.png", by_hand(), windows(by_hand()))
    one, plain = saved
    (axes,) = one.axes
    words = [text.get_text() for text in axes.texts]
    assert [word for word in words if word in ("forward", "backward", "optimizer")] == [
        "forward",
        "backward",
        "optimizer",
    ]
    assert [word for word in words if word.startswith("layer")] == ["layer 0", "layer 0"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["second half", "first half", "rank 0"]
    legend = [text.get_text() for text in one.legends[0].get_texts()]
    assert {"forward", "backward", "optimizer"} < {*legend}
    assert "a layer's attention, first half" in legend and "a layer's attention, second half" in legend
    # The layers of each half lie in a lane of their own, from dispatch to collect.
    layers = {
        (patch.x0, patch.x1): patch.y0
        for of in axes.collections
        for patch in (path.get_extents() for path in of.get_paths())
        if (patch.x0, patch.x1) in ((2000, 8000), (4000, 11000))
    }
    assert layers[2000, 8000] > layers[4000, 11000]
    assert [label.get_text() for label in plain.axes[0].get_yticklabels()][1::2] == ["rank 1", "rank 0"]
    legend = [text.get_text() for text in plain.legends[0].get_texts()]
    assert legend == ["outside of attention", "dispatch", "attend", "collect", "waits in them", "its rows under way"]


def test_the_picture_has_a_bar_for_every_span_and_the_steps_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    drawn: list[tuple[float, float]] = []
    bars = Axes.broken_barh
    monkeypatch.setattr(Axes, "broken_barh", lambda self, x, *a, **o: (drawn.extend(x), bars(self, x, *a, **o))[1])
    everything = windows(by_hand())
    draw_timeline(tmp_path / "all.png", by_hand(), everything[1:])
    assert (tmp_path / "all.png").read_bytes().startswith(PNG)
    # Below is what rank 0 did in step 1, in milliseconds from its begin, with its rows; then the same for rank 1.
    zero = [(0, 1000), (1000, 1500), (2500, 500), (3000, 4000), (7000, 3000), (2000, 3000)]
    one = [(0, 1000), (1000, 1000), (2000, 4000), (6000, 1000), (7000, 1000), (8000, 1000)]
    waits_and_rows = [(3000, 2000), (7000, 1000), (5500, 500)]
    assert sorted(drawn) == sorted(zero + one + waits_and_rows)
    drawn.clear()
    draw_timeline(tmp_path / "part.png", by_hand()[:1], everything[1:], between=(2500, 3500))
    assert sorted(drawn) == [(2500, 500), (2500, 1000), (3000, 500)]
    with pytest.raises(distca.InvalidArgumentError, match="there is nothing to draw"):
        draw_timeline(tmp_path / "none.png", by_hand(), everything, between=(12000, 13000))
    with pytest.raises(distca.InvalidArgumentError, match="cannot be written"):
        draw_timeline(tmp_path / "none" / "none.png", by_hand(), everything)


# ---- the command ----


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    distca.write_trace(tmp_path / "trace.json", by_hand())
    return tmp_path / "trace.json"


def test_report_states_figures_and_draws_beside_the_trace(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "2 ranks, step 1" in out and f"step 1 drawn in {trace.parent / 'timeline.png'}" in out
    row = next(line for line in out.splitlines() if line.strip().startswith("1 "))
    assert row.split() == ["1", "40.00%", "1,000.0", "ms", "(29%)", "2,500.0", "ms", "(71%)", "0.500", "0.667"]
    assert "idle share of a step: 0.00% on the slowest rank, 40.00% on the one that idles most" in out
    assert "largest attention load over the mean: 1.500 as planned, 1.333 as measured" in out
    assert (trace.parent / "timeline.png").read_bytes().startswith(PNG)
    assert (
        main(["report", str(trace.parent), "--steps", "0-1", "--ranks", "1", "--out", str(trace.parent / "a.png")]) == 0
    )
    assert "steps 0 to 1 drawn in" in capsys.readouterr().out


def test_report_without_a_picture_needs_no_matplotlib(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["report", str(trace), "--no-picture"]) == 0
    assert list(trace.parent.iterdir()) == [trace]
    assert main(["report", str(trace)]) == 2
    assert "pip install matplotlib, or give --no-picture" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["none"], "there is no .*none; a run's folder or a trace is expected"),
        (["empty"], "empty has no trace.json: that is not the folder of a run. `distca train --trace` writes a trace"),
        (["run"], "run has no trace.json: the run was not traced. `distca train --trace` writes a trace"),
        (["run/config.json"], "is not a trace of distca.write_trace"),
        (["", "--steps", "2"], "--steps is 2-2; the trace has 0 to 1"),
        (["", "--steps", "1-0"], "--steps is 1-0; the trace has 0 to 1"),
        (["", "--ranks", "0,2"], "--ranks is 0,2; the trace has 0 to 1"),
        (["", "--between", "9-3"], "there is nothing to draw"),
    ],
)
def test_a_mistake_of_report_is_one_line_that_says_what_was_expected(
    options: list[str], complaint: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trace.parent / "empty").mkdir()
    (trace.parent / "run").mkdir()
    (trace.parent / "run" / "config.json").write_text("{}")
    assert main(["report", str(trace.parent / options[0]), *options[1:]]) == 2
    err = capsys.readouterr().err
    assert re.search(complaint, err) and err.count("\n") == 1, err
