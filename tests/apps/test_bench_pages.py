"""Tables and pictures of benchmarks in pages of documentation: from files of results, without measuring anything."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from distca.apps.bench import scaling, when_it_pays
from distca.apps.bench.real_steps import in_order, relative
from distca.apps.bench.scaling_page import tables
from distca.apps.cli import main
from distca.simulator.case import Case, Memory
from distca.simulator.search import Found
from distca.simulator.setup import Parallelism
from distca.simulator.simulate import IdleShares, StrategyResult
from distca.simulator.ticking import Ticking
from distca.simulator.validation import Errors
from support.simulated import MODEL, cluster

ROOT = Path(__file__).resolve().parents[2]
STEP = {"measured": 1.5, "modelled": 1.47, "error": -0.02, "spread": 0.01}
SIMULATOR: dict[str, Any] = {
    "benchmark": "simulator",
    "cpu": "A machine",
    "cores": 3,
    "torch": "9.9",
    "command": "distca bench simulator --rounds 5 --json out.json",
    "rows": [{"name": "steps, median error", "value": 2.0}, {"name": "steps, largest error", "value": 4.0}],
    "details": {
        "rounds": 5,
        "reference_seconds": 2.0,
        "reference_modelled_seconds": 1.9,
        "steps": [
            {"name": "one", "measured_seconds": 2.0, "modelled_seconds": 1.9, **STEP},
            {"name": "two", "measured_seconds": 3.0, "modelled_seconds": 2.0, **STEP},
        ],
        "balanced_over_unbalanced": {"two, no balance": [0.8, 0.84]},
        "replay_of_8_ranks": {"idle share": [0.01, 0.03]},
    },
}


def _page(folder: Path, name: str) -> Path:
    page = folder / "page.md"
    page.write_text(f"# Page\n\n<!-- {name}: begin -->\nold\n<!-- {name}: end -->\n\nbelow\n")
    return page


def test_a_table_of_a_page_is_rewritten_from_a_file_of_results(tmp_path: Path) -> None:
    source, page = tmp_path / "out.json", _page(tmp_path, "simulator")
    source.write_text(json.dumps(SIMULATOR))
    for _ in range(2):  # the second time changes nothing
        assert main(["bench", "simulator", "--from", str(source), "--page", str(page)]) == 0
        lines = page.read_text().splitlines()
        assert lines[:4] == ["# Page", "", "<!-- simulator: begin -->", ""] and "old" not in lines
        assert lines[-4:] == ["", "<!-- simulator: end -->", "", "below"]
        assert "A machine, 3 cores, PyTorch 9.9, 5 rounds, `distca bench simulator --rounds 5`." in lines
        assert "| two | 1.500 | 1.470 | -2.0 % | 1.0 % |" in lines and not any("| one |" in line for line in lines)
        assert "| two | 0.800 | 0.840 | +5.0 % |" in lines and "| idle share | 0.010 | 0.030 | +0.020 |" in lines
        assert lines[-6].endswith("2.000 s, and 1.900 s modelled.") and "take 5 to 50 % longer" in lines[-5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--page", "page.md"], "--page is for scaling, simulator, when-it-pays; bench plan has none"),
        (["simulator", "--plot", "p.png"], "--plot is for scaling, when-it-pays; bench simulator has none"),
        (["scaling", "--from", "{out}"], "--from is for --page and --plot: give one of them"),
        (["scaling", "--from", "{out}", "--page", "page.md"], "has no figures of bench scaling"),
        (["simulator", "--from", "nowhere.json", "--page", "page.md"], "nowhere.json cannot be read"),
        (["simulator", "--from", "{out}", "--page", "nowhere.md"], "--page nowhere.md: No such file"),
        (["simulator", "--from", "{out}", "--page", "{out}"], "<!-- simulator: end --> are expected there"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "out.json"
    source.write_text(json.dumps(SIMULATOR))
    assert main(["bench", *(one.format(out=source) for one in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_every_step_of_a_round_has_a_reference_beside_it() -> None:
    for number in range(2, 9):
        order = in_order(number)
        assert order[0] == order[-1] == 0 and sorted(filter(None, order)) == list(range(1, number))
        assert all(0 in (order[at - 1], order[at + 1]) for at, step in enumerate(order) if step)


def test_a_step_is_relative_to_the_references_around_it() -> None:
    # Two rounds. In the second the machine takes twice as long from the second reference on.
    seconds = [[2.0, 2.0], [3.0, 4.5], [1.0, 1.5], [2.0, 4.0], [5.0, 10.0], [3.0, 4.0]]
    assert relative(seconds, [0, 1, 2, 0, 3, 0]) == [[1.0, 1.0], [1.5, 1.5], [0.5, 0.5], [2.0, 2.5]]


def _way(seconds: float, **other: float) -> dict[str, float]:
    return {"seconds": seconds, "links": 0, "fill": 0.1, "port": 1.5, "longest": 0, "latency": 0, **other}


def test_a_point_is_bound_by_what_leaves_most_idle(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ways = {"ping-pong": _way(2.0, rows=0.3, uneven=0.1, longest=0.9), "single": _way(1.0, rows=0.2, uneven=0.05)}
    point = {"model": "llama-8b", "lengths": "list", "context": 2**20, "gpus": 64, "stages": 4, "recompute": True}
    spread = {way: {**figures, "seconds": 0.8 * figures["seconds"], "rows": 0.0} for way, figures in ways.items()}
    points = [
        {**point, "homes": "packed", "ways": ways},
        {**point, "homes": "spread", "recompute": False, "ways": spread},
    ]
    content = {
        "benchmark": "scaling",
        "command": "distca bench scaling --json out.json",
        "details": {"draws": 3, "micro_batches": {"4": 8}, "points": points},
    }
    lines = tables(content)
    for heading, line in (
        ("the step on homes of `spread`, over that on packed homes.**", "| 8B, list, 1M | 0.80: 25 -> 5 % |"),
        ("idle shares, packed homes.**", "| 8B, list, 1M | 40.0 / **25.0**, fill 10: port 1.50 |"),
        ("idle shares, spread homes.**", "| 8B, list, 1M | 10.0 / **5.0**, fill 10: tolerance 1.50 |"),
    ):
        assert lines[lines.index(f"**4 stages, 8 micro-batches: {heading}") + 4] == line
    bounds = [scaling.Way(**ways["ping-pong"]).bound]
    bounds += [
        scaling.Way(**_way(1.0, **of)).bound
        for of in ({"rows": 0.1, "uneven": 0.2}, {"rows": 0.3, "uneven": 0.2, "latency": 0.6})
    ]
    assert bounds == ["longest document's port", "tolerance", "latency"]
    (tmp_path / "out.json").write_text(json.dumps(content))
    assert main(["bench", "scaling", "--from", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("ping_pong", [False, True])
def test_the_busiest_port_is_that_of_the_plans_transfers(ping_pong: bool) -> None:
    documents = [[[60000], [1000] * 60]]
    case = Case(documents, cluster(2, 1), MODEL, Parallelism(data=2))
    program = Ticking(case, ping_pong=ping_pong)
    seconds = 0.0
    for tick in program.plans.table:
        ports: dict[tuple[str, int], int] = {}
        for part in program.plans.parts:
            for transfer in program.plans.plan(0 if tick.phase == "forward" else 1, 0, part).transfers:
                if transfer.message.startswith(tick.phase):
                    for port in (("out", transfer.source), ("in", transfer.target)):
                        ports[port] = ports.get(port, 0) + transfer.bytes
        seconds += MODEL.layers * max(ports.values()) / 40e9
    found, longest = scaling._busiest_ports(program)
    assert found == pytest.approx(seconds) and seconds > 0
    assert longest == pytest.approx(1)  # the only home that sends keys


def test_a_document_needs_as_many_homes_as_hold_it() -> None:
    assert list(scaling._points("llama-8b", "list", 2**20, 16, 1, 1, 1)) == []
    packed, point = scaling._points("llama-34b", "list", 131072, 16, 1, 1, 1)
    assert (packed.homes, point.homes) == ("packed", "spread")
    assert (point.model, point.gpus, point.stages, set(point.ways)) == ("llama-34b", 16, 1, {"ping-pong", "single"})
    for way in point.ways.values():
        assert 0 <= way.rows < 1 and 0 <= way.uneven < 1 and 0 <= way.latency <= 1


def _compared(name: str, rates: dict[str, float], data: dict[str, int]) -> dict[str, Any]:
    """A comparison as `distca bench when-it-pays` writes it, of strategies with these rates and data ranks."""
    result = {"seconds": 2.0, "mfu": 0.4, "idle": {"mean": 0.25, "most": 0.5}, "exposed_communication": 0.125}
    result |= {"bytes_between": 3e9, "memory": {"states": 1e9, "activations": 2e9, "buffers": 4e9}}
    strategies: list[dict[str, Any]] = [
        {
            "strategy": one,
            "parallelism": {"data": data.get(one, 8), "context": 2},
            "result": {**result, "tokens_per_second": rate},
        }
        for one, rate in rates.items()
    ]
    strategies.append({"strategy": "wlb", "parallelism": None, "result": None})
    verdict = {"ours": "distca", "other": "ring", "speedup": 1.0, "reason": None}
    part, _, name = name.partition(": ")
    return {"part": part, "name": name, "gpus": 64, "draws": [{"verdict": verdict, "strategies": strategies}]}


def test_tables_of_when_it_pays_have_the_fastest_of_either_side_and_its_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 10 % of the ratio of unlike set-ups: 1.5 stands for 1.5 / 1.1 to 1.5 / 0.9; 5 % of alike ones.
    monkeypatch.setattr("distca.apps.bench.when_it_pays_page.errors", lambda: Errors(0.2, 0.1, 0.05))
    first = _compared(
        "grid: llama-8b, 128K, 64 GPUs",
        {"unbalanced": 6400, "ring": 64000, "distca": 96000, "distca-single": 32000},
        {"ring": 4},
    )
    second = _compared("grid: small", {"ring": 64000, "distca-rows": 65280}, {})
    even = _compared("grid: even", {"ring": 64000, "distca": 128000}, {})
    even["draws"][0]["verdict"]["reason"] = "all sequences have equal attention"
    source, page = tmp_path / "out.json", _page(tmp_path, "when-it-pays")
    source.write_text(json.dumps({"benchmark": "when-it-pays", "details": {"cells": [first, second, even]}}))
    assert main(["bench", "when-it-pays", "--from", str(source), "--page", str(page)]) == 0
    lines = page.read_text().splitlines()
    columns = "unbalanced | ring | distca | distca-single | distca-rows"
    assert f"| model, context, GPUs | {columns} | speed-up, interval | pays |" in lines
    assert (
        "| llama-8b, 128K, 64 GPUs | 100 | 1,000 | 1,500 | 500 | - | distca / ring 1.500, 1.36 to 1.67 | yes |" in lines
    )
    assert "| small | - | 1,000 | - | - | 1,020 | distca-rows / ring 1.020, 0.97 to 1.07 | no |" in lines
    assert "| even | - | 1,000 | 2,000 | - | - | distca / ring 2.000, 1.90 to 2.11 | no |" in lines
    assert "| ring | 2.00 s | 40.0 % | 25 % | 12 % | 3 GB | 7 GB | d4 c2 |" in lines


def test_one_comparison_is_made_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distca.apps.bench.when_it_pays_page.errors", lambda: Errors(0.2, 0.1, 0.05))
    made = []

    def compared(cell: when_it_pays.Cell, draws: int) -> dict[str, Any]:
        made.append((cell.name, draws))
        return _compared(f"{cell.part}: {cell.name}", {"ring": 1.0, "distca": len(made)}, {})

    monkeypatch.setattr(when_it_pays, "compared", compared)
    file, page = tmp_path / "out.json", _page(tmp_path, "when-it-pays")
    for name in ("documents: one long", "documents: equal", "documents: one long"):
        assert main(["bench", "when-it-pays", "--only", name, "--json", str(file), "--page", str(page)]) == 0
    assert made == [("one long", 1), ("equal", 1), ("one long", 1)]
    cells = json.loads(file.read_text())["details"]["cells"]
    rates = [cell["draws"][0]["strategies"][1]["result"]["tokens_per_second"] for cell in cells]
    assert [cell["name"] for cell in cells] == ["equal", "one long"] and rates == [2, 3]
    assert "| distca / ring 3.000, 2.86 to 3.16 | yes |" in page.read_text()


def test_some_strategies_of_a_comparison_are_searched_again_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(when_it_pays, "errors", lambda: Errors(0.2, 0.1, 0.05))
    first, other = (_compared(f"documents: {name}", {}, {}) for name in ("equal", "scaled"))
    rates = {"unbalanced": 1.0, "ring": 4.0, "distca-retired": 1.0, "distca": 2.0}
    first["draws"] = [_compared("", rates, {"ring": 4})["draws"][0] for _ in range(2)]
    for draw in first["draws"]:
        for one in draw["strategies"]:
            if one["result"] is not None:
                one["result"]["attention"] = 0.5
    file = tmp_path / "out.json"
    file.write_text(json.dumps({"benchmark": "when-it-pays", "details": {"cells": [first, other]}}))
    searched = []

    def search(sequences: Any, *, strategies: list[str], **_: Any) -> list[Found]:
        searched.append((strategies, len(sequences)))
        memory = Memory(1.0, 1.0, 1.0)
        shares = IdleShares(0.0, 0.0, 0.0, 0.0)
        made = StrategyResult("", 1.0, 8.0, 0.5, [0.1, 0.3], shares, 0.0, 0.0, 0.0, 0.0, 0.5, memory, True)
        return [Found(name, Parallelism(data=4, context=2), made, 1, 0, 0) for name in strategies]

    monkeypatch.setattr(when_it_pays, "search", search)
    only = ["bench", "when-it-pays", "--only", "documents: equal", "--json", str(file)]
    assert main([*only, "--strategies", "distca-single,all-gather"]) == 0
    assert searched == [(["distca-single", "all-gather"], 8)] * 2
    made, stayed = json.loads(file.read_text())["details"]["cells"]
    assert stayed == other
    for before, draw in zip(first["draws"], made["draws"], strict=True):
        found = {one["strategy"]: one for one in draw["strategies"]}
        assert [one for one in found.values() if one["strategy"] not in ("distca-single", "all-gather")] == [
            next(one for one in before["strategies"] if one["strategy"] == name)
            for name in ("unbalanced", "ring", "wlb", "distca", "distca-retired")
        ]
        assert list(found)[:3] == ["unbalanced", "all-gather", "ring"]
        assert found["distca-single"]["result"]["idle"] == {"most": 0.3, "mean": pytest.approx(0.2)}
        verdict = draw["verdict"]  # of equal documents, and of two strategies with the same set-up: 5 % of the ratio
        assert (verdict["ours"], verdict["other"], verdict["speedup"]) == ("distca-single", "all-gather", 1)
        assert verdict["interval"]["least"] == pytest.approx(1 / 1.05)
        assert verdict["reason"] == "all sequences have equal attention"


@pytest.mark.parametrize(
    ("strategies", "complaint"),
    [
        ("distca-single,magic", "--strategies 'magic': the strategies of documents: equal are unbalanced, "),
        ("", "--strategies '': the strategies of documents: equal are unbalanced, "),
        ("distca-single", "no comparison 'documents: equal' whose other strategies could stay"),
    ],
)
def test_strategies_of_a_comparison_that_cannot_be_searched_are_refused(
    strategies: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    earlier = json.dumps({"benchmark": "when-it-pays", "details": {"cells": [_compared("documents: scaled", {}, {})]}})
    file.write_text(earlier)
    only = ["bench", "when-it-pays", "--only", "documents: equal", "--json", str(file)]
    assert main([*only, "--strategies", strategies]) == 2
    assert complaint in capsys.readouterr().err and file.read_text() == earlier


def test_a_strategy_that_takes_too_long_on_many_gpus_is_not_of_that_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--only", "grid: llama-8b, 128K, 128 GPUs", "--json", str(tmp_path / "out.json")]
    assert main(["bench", "when-it-pays", *only, "--strategies", "hybrid-context"]) == 2
    error = capsys.readouterr().err
    assert "--strategies 'hybrid-context': the strategies of grid: llama-8b, 128K, 128 GPUs are" in error
    assert "hybrid-context," not in error


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["when-it-pays", "--strategies", "distca", "--json", "out.json"], "--strategies is for --only NAME"),
        (["scaling", "--strategies", "distca"], "--strategies is for --only NAME"),
        (
            ["when-it-pays", "--only", "a: b", "--strategies", "ring", "--rounds", "2", "--json", "out.json"],
            "cannot be given with --rounds",
        ),
        (["when-it-pays", "--only", "documents: equal"], "--only is for"),
        (["simulator", "--only", "documents: equal", "--json", "out.json"], "--only is for"),
        (["when-it-pays", "--only", "equal", "--json", "out.json"], "the comparisons are documents: equal; "),
        (["when-it-pays", "--only", "documents: equal", "--json", "out.json", "--results", "."], "cannot be given"),
        (["when-it-pays", "--only", "documents: equal", "--json", "out.json", "--from", "in.json"], "cannot be given"),
    ],
)
def test_a_comparison_that_is_not_there_is_refused(
    arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    assert complaint in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_pages_have_the_figures_of_the_results() -> None:
    for name, page in (("simulator", "simulator"), ("scaling", "simulator"), ("when-it-pays", "when-it-pays")):
        content = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
        module = importlib.import_module(f"distca.apps.bench.{name.replace('-', '_')}_page")
        assert "\n".join(module.tables(content)) in (ROOT / f"docs/{page}.md").read_text()


def test_the_table_of_published_figures_has_those_of_the_results() -> None:
    figures = json.loads((ROOT / "benchmarks/results/published.json").read_text())["details"]["figures"]
    made = {one["name"]: f"{one['modelled']:.3f}, {'hit' if one['hit'] else 'miss'}" for one in figures}
    page = (ROOT / "docs/simulator.md").read_text()
    names = [name.removeprefix("best products: ") for name in made if name.startswith("best products: ")]
    assert len(names) == 32
    for name in names:
        columns = f"{made['best products: ' + name]} | {made['products as assumed: ' + name]} |"
        assert any(line.startswith(f"| {name} | ") and line.endswith(columns) for line in page.splitlines()), name
    hits = [sum(one["hit"] for one in of) for of in (figures[:64], figures)]
    assert (
        f"Of these {hits[0]} of 64 are hits, and with those of\n[other systems](#other-systems) {hits[1]} of 128"
        in page
    )
