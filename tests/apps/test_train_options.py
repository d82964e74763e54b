"""Options of `distca train`: comparison, FSDP and compilation on two ranks, each against the plain run."""

import importlib.util
import json
import os
import platform
import re
import shutil
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch._dynamo.testing import CompileCounterWithBackend

import distca
from distca.apps.cli import main
from distca.apps.common.options import ConfigError
from distca.apps.train.checkpoint import whole_checkpoints
from distca.apps.train.config import TrainConfig, option_name
from distca.apps.train.log import create_run_dir
from distca.apps.train.metrics import StepMetrics, describe
from distca.apps.train.report import draw_loss
from distca.apps.train.resume import resumed_config
from distca.apps.train.step import BALANCED, UNBALANCED, compared_step
from distca.apps.train.trainer import train
from distca.errors import DistcaError
from support.once import made_once
from support.ranks import launch
from support.torch_features import PING_PONG_TAKES_FSDP
from support.train_runs import metrics_in, one_rank, without_pictures

SMALL = TrainConfig(steps=3, tokens_per_rank=192, hidden=32, layers=2, lr=0.01)
RUNS = {
    "plain": {},
    "compare": {"compare": True},
    "fsdp": {"fsdp": True, "checkpoint_every": 2},
    "ping-pong": {"ping_pong": True, "trace": ""},
    "ping-pong, fsdp and compare": {
        "ping_pong": True,
        "fsdp": PING_PONG_TAKES_FSDP,
        "compare": True,
        "log_memory": True,
    },
    "retain": {"retain_bytes": 1 << 30},
    "bfloat16": {"dtype": "bfloat16", "master_weights": True},
    "rounded contributions": {"dtype": "bfloat16", "master_weights": True, "attention_reduce_dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for number in range(12):
        text = f"line {number} of a text that repeats itself\n" * (40 if number % 6 == 0 else 1 + number)
        (folder / f"{number:02}.txt").write_text(text)
    return folder


def _train_all(runs: dict[str, TrainConfig], folder: Path) -> None:
    for name, config in runs.items():
        if dist.get_rank() == 0:
            (folder / name).mkdir()
        train(config, folder / name)
    if dist.get_rank() == 0:
        shutil.copytree(folder / "fsdp", folder / "fsdp, then not")
        shutil.rmtree(whole_checkpoints(folder / "fsdp, then not")[3])
    dist.barrier()
    changed = {"fsdp": False, "ping_pong": True}
    train(resumed_config(folder / "fsdp, then not", changed), folder / "fsdp, then not")


@pytest.fixture(scope="module")
def runs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> Path:
        configs = {name: replace(SMALL, data=data, **options) for name, options in RUNS.items()}
        name = "ping-pong, fsdp and compare"
        configs[name] = replace(configs[name], trace=str(folder / "given.json"))
        launch(_train_all, configs, folder, ranks=2)
        return folder

    return made_once(tmp_path_factory, "runs_with_options", make)


def _losses(run_dir: Path) -> list[float]:
    return [step["loss"] for step in metrics_in(run_dir)]


@pytest.mark.parametrize("ping_pong", [False, True])
def test_each_layer_compiles_to_one_graph_or_in_ping_pong_to_several(
    ping_pong: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")

    def compile_counted(layer: torch.nn.Module) -> None:
        layer._compiled_call_impl = torch.compile(layer._call_impl, backend=counter, fullgraph=not ping_pong)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_counted)
    losses = []
    for compiled in (False, True):
        config = replace(SMALL, ranks=1, data=data, compile=compiled, ping_pong=ping_pong, runs_dir=tmp_path)
        run_dir = create_run_dir(config)
        with one_rank():
            train(config, run_dir)
        losses.append(_losses(run_dir))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    # The layers share one graph; plans of another size class need a second one.
    assert counter.frame_count > 2 if ping_pong else 1 <= counter.frame_count <= 2


@pytest.mark.parametrize(
    "name", [*(name for name in RUNS if name != "plain" and "dtype" not in RUNS[name]), "fsdp, then not"]
)
def test_a_run_has_the_losses_of_the_plain_one(name: str, runs: Path) -> None:
    assert len(_losses(runs / "plain")) == 3
    assert _losses(runs / name) == pytest.approx(_losses(runs / "plain"), rel=1e-6)


def test_rounded_contributions_are_fewer_bytes_and_change_losses_by_their_rounding(runs: Path) -> None:
    wide, rounded = _losses(runs / "bfloat16"), _losses(runs / "rounded contributions")
    assert rounded[0] == wide[0] and rounded == pytest.approx(wide, rel=1e-3)
    sent = [sum(step["bytes"] for step in metrics_in(runs / name)) for name in ("rounded contributions", "bfloat16")]
    assert sent[0] < sent[1]


def test_a_run_that_retains_keys_has_the_same_bits_and_moves_fewer_bytes(runs: Path) -> None:
    assert _losses(runs / "retain") == _losses(runs / "plain")
    for retaining, plain in zip(metrics_in(runs / "retain"), metrics_in(runs / "plain"), strict=True):
        assert 0 < retaining["bytes"] < plain["bytes"]


def test_a_run_with_ping_pong_reports_its_halves_and_what_fsdp_keeps_whole(runs: Path) -> None:
    for name in ("ping-pong", "ping-pong, fsdp and compare"):
        assert all(0.5 <= step["larger_half"] <= 1 for step in metrics_in(runs / name))
        summary = json.loads((runs / name / "summary.json").read_text())
        assert f"the larger half of a step has {summary['larger_half']:.2f} of its attention" in describe(summary)
        report = (runs / name / "report.md").read_text()
        assert "ping-pong: part of the attention in the larger half" in report
        assert ("MB of weights whole on every rank" in report) == ("fsdp" in name and PING_PONG_TAKES_FSDP)
    assert [step["tokens"] for step in metrics_in(runs / "ping-pong")] == [384] * 3
    assert "larger_half" not in metrics_in(runs / "plain")[0]


def test_a_trace_goes_to_a_file_that_is_given_too_whose_folder_must_exist(
    runs: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "ping-pong, fsdp and compare"
    assert (runs / "given.json").read_text() == (runs / name / "trace.json").read_text()
    train = ["train", "--data", str(data), "--runs-dir", str(tmp_path / "runs")]
    assert main([*train, "--trace", str(tmp_path / "missing" / "t.json")]) == 2
    assert "t.json, must be a file in a folder that exists" in capsys.readouterr().err
    assert main([*train, "--trace", str(tmp_path)]) == 2
    assert f"--trace is {tmp_path}, must be a file in a folder that exists" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_trace_has_the_overlapping_steps_of_both_ranks_and_what_they_compute_between(runs: Path) -> None:
    events = json.loads((runs / "ping-pong" / "trace.json").read_text())["traceEvents"]
    for rank in range(2):
        mine = sorted((e for e in events if e["pid"] == rank and e.get("cat") == "step"), key=lambda event: event["ts"])
        names = [event["name"] for event in mine]
        assert {
            f"{part} {phase}" for part in ("dispatch", "attend", "collect") for phase in ("forward", "backward")
        } <= {*names}
        parts = [event for event in mine if not event["name"].startswith("compute")]
        assert [event["args"]["step"] for event in parts[:6]] == [1, 2, 1, 2, 1, 3]
        assert len(parts) == 3 * 3 * 2 * 2 * 2  # the factors are steps, parts, layers, halves and phases
        assert all(b["ts"] >= a["ts"] + a["dur"] - 1 for a, b in zip(mine, mine[1:], strict=False)), "spans overlap"
        assert names[0] == names[-1] == "compute other"  # waiting for a batch, and sharing the loss
        assert {"compute forward", "compute backward", "compute optimizer"} <= {*names}
        phases = [e for e in events if e["pid"] == rank and e.get("cat") == "phase"]
        assert [event["name"] for event in phases] == ["forward", "backward", "optimizer"] * 3
        for event in parts:
            phase = next(p for p in phases if p["ts"] <= event["ts"] and event["ts"] <= p["ts"] + p["dur"])
            assert event["name"].endswith(phase["name"])
        forward = [event["args"] for event in parts[: 3 * 2 * 2] if event["name"] == "dispatch forward"]
        assert [(args["layer"].split()[0], args["half"]) for args in forward] == [
            (layer, half) for layer in "01" for half in (0, 1)
        ]


def test_writing_a_checkpoint_belongs_to_no_traced_step(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distca.apps.train.trainer.Checkpoints.save", lambda *_: time.sleep(0.2))
    with one_rank():
        train(replace(SMALL, data=data, ranks=1, steps=2, checkpoint_every=1, trace=""), tmp_path)
    (trace,) = distca.read_trace(tmp_path / "trace.json")
    first, second = trace.steps
    assert second.begin - first.end > 0.2


def test_a_traced_run_reports_idle_shares_and_how_attention_was_planned_and_measured(runs: Path) -> None:
    for name in ("ping-pong", "ping-pong, fsdp and compare"):
        traces = distca.read_trace(runs / name / "trace.json")
        assert [[step.number for step in trace.steps] for trace in traces] == [[0, 1, 2]] * 2
        # The traced loads are those that the step's imbalance was computed from. A comparison runs both plans in one
        # step.
        for number, metrics in enumerate(metrics_in(runs / name)):
            loads = [trace.steps[number].load for trace in traces]
            assert None not in loads
            if name == "ping-pong":
                assert max(loads) * 2 / sum(loads) == pytest.approx(metrics["imbalance_after"])
        summary = json.loads((runs / name / "summary.json").read_text())
        traced = summary["trace"]
        assert traced["steps"] == [1, 2]  # the first has one-time costs
        assert all(0 <= share < 1 for share in traced["idle"]) and len(traced["idle"]) == 2
        assert 1 <= traced["imbalance_predicted"] <= 2 and 1 <= traced["imbalance_measured"] <= 2
        assert f"{max(traced['idle']):.2%} on the one that idles most (steps 1 to 2)" in describe(summary)
        report = (runs / name / "report.md").read_text()
        assert (
            "| rank | idle | traffic hidden |" in report and "![What every rank did in step 2](timeline.png)" in report
        )
        assert f"| 1 | {traced['idle'][1]:.2%} |" in report
        assert (runs / name / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "trace" not in json.loads((runs / "plain" / "summary.json").read_text())
    assert not {"trace.json", "timeline.png"} & {path.name for path in (runs / "plain").iterdir()}


def test_a_log_of_memory_has_a_line_for_every_point_of_every_step_of_every_rank(runs: Path) -> None:
    run = runs / "ping-pong, fsdp and compare"
    # Forward and backward run twice in a step that compares.
    points = ["begin", "forward", "backward", "begin", "forward", "backward", "optimizer"]
    for rank in range(2):
        lines = [json.loads(line) for line in (run / f"memory-rank{rank}.jsonl").read_text().splitlines()]
        assert [(line["step"], line["point"]) for line in lines] == [(n, p) for n in range(3) for p in points]
        for line in lines:
            assert 0 < line["rss"] <= line["rss_peak"]
            assert 0 <= line["arena_forward"] <= line["heap"] and 0 <= line["arena_backward"] <= line["heap"]
        for phase in ("forward", "backward"):  # a step without balance may need no arena
            assert max(line[f"arena_{phase}"] for line in lines) > 0
        assert lines[-1]["rss_shared"] > 0  # the parts of the heaps that steps have used
    assert not list((runs / "plain").glob("memory*"))


def test_a_comparison_puts_step_times_side_by_side_and_shows_that_the_steps_are_the_same(runs: Path) -> None:
    steps = [step["unbalanced"] for step in metrics_in(runs / "compare")]
    assert all(step["seconds"] > 0 for step in steps)
    assert all(step["loss_difference"] == 0 for step in steps)  # attention's output is the same to the bit
    assert all(step["gradient_difference"] < 1e-5 for step in steps)
    summary = json.loads((runs / "compare" / "summary.json").read_text())
    assert summary["compare"]["steps"] == 2  # the first step carries one-time costs
    assert summary["compare"]["ratio"] > 0
    assert "(medians of 2 pairs), ratio " in describe(summary)
    assert "the same loss to 0.0e+00" in describe(summary)
    assert "unbalanced" not in metrics_in(runs / "plain")[0]


def test_the_ways_of_a_comparison_draw_the_same_random_numbers_and_the_next_step_goes_on_after_the_balanced_way() -> (
    None
):
    torch.manual_seed(3)
    first, second, _ = torch.rand(3).tolist()

    def way(num_draws: int) -> Any:
        return SimpleNamespace(forward_backward=lambda trained, watch: (torch.rand(num_draws)[0], 1))

    nothing = SimpleNamespace(step=lambda: None)
    trained: Any = SimpleNamespace(
        clip=lambda: None, total_norm=lambda: 1.0, optimizer=nothing, schedule=nothing, dtype=torch.float32
    )
    for order in [(UNBALANCED, way(2)), (BALANCED, way(1))], [(BALANCED, way(1)), (UNBALANCED, way(2))]:
        torch.manual_seed(3)
        with one_rank():
            result = compared_step(trained, order, False, 0.0)
        assert result.loss == pytest.approx(first) and result.unbalanced is not None
        assert result.unbalanced.loss_difference == 0
        assert torch.rand(1).item() == second


def test_a_comparison_takes_no_balance() -> None:
    with pytest.raises(ConfigError, match="--balance is off, must be left out with --compare"):
        TrainConfig(compare=True, balance="off")


def test_a_trace_that_cannot_be_written_is_an_error_that_names_its_file(data: Path, tmp_path: Path) -> None:
    with one_rank(), pytest.raises(DistcaError, match="could not write /dev/full: No space left on device"):
        train(replace(SMALL, ranks=1, data=data, steps=1, trace="/dev/full"), tmp_path)


# ---- what a run leaves ----


def test_a_run_that_diverges_says_after_which_step_and_leaves_metrics_in_json(data: Path, tmp_path: Path) -> None:
    config = replace(SMALL, ranks=1, data=data, lr=1e30, steps=20)
    with one_rank(), pytest.raises(DistcaError, match="the loss is nan at step") as raised:
        train(config, tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=pytest.fail)["loss"] is None for line in lines][-2:] == [False, True]
    assert f"the loss is nan at step {len(lines)}: lower --lr" in str(raised.value)


@without_pictures()
def test_a_report_spells_out_what_of_a_path_is_not_utf8(data: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(data, tmp_path / os.fsdecode(b"d\xff"))
    (tmp_path / "run").mkdir()
    with one_rank():
        train(replace(SMALL, ranks=1, data=folder, steps=1, trace=""), tmp_path / "run")
    assert f"--data {tmp_path}/d\\udcff" in (tmp_path / "run" / "report.md").read_text().replace("'", "")
    assert (tmp_path / "run" / "summary.json").is_file()
    assert resumed_config(tmp_path / "run", {"steps": 2}).data == folder


def test_a_run_leaves_a_report_with_a_picture_of_the_loads_and_events(runs: Path) -> None:
    report = (runs / "compare" / "report.md").read_text()
    for part in (
        "| `--compare` | True |",
        "after 3 of 3 steps on 2 ranks",
        "| ratio (median of the pairs) |",
        "plan.png",
    ):
        assert part in report
    for part in (
        "| `--heads` | 4 |",
        "| `--doc-scale` | 1.0 |",
        "| `--tokenizer` | none, tokens are bytes |",
        "| `--model` | a tiny Llama |",
        "| `--trace` | off |",
        f"| torch | {torch.__version__} |",
        f"| transformers | {transformers.__version__} |",
        f"| python | {platform.python_version()} |",
        "| CPU | ",
        "| memory | ",
        "| GPUs | ",
        "\n    distca train --steps 3 --tokens-per-rank ",
        " --lr 0.01 --compare\n",
        "![Loss of every step](loss.png)",
    ):
        assert part in report
    configuration = report.partition("## Command and configuration")[2].partition("##")[0]
    assert {f"`{option_name(option.name)}`" for option in fields(TrainConfig)} <= {*configuration.split()}
    assert not re.search(r"\|\s*(None)?\s*\|$", configuration, re.MULTILINE), "an option has no value"
    assert "| `--trace` | trace.json of the run |" in (runs / "ping-pong" / "report.md").read_text()
    assert (runs / "plain" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "ratio (median" not in (runs / "plain" / "report.md").read_text()
    assert (runs / "plain" / "plan.png").read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(runs / "compare" / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(step, pytest.approx(loss)) for step, loss in enumerate(_losses(runs / "compare"))]
    assert {"imbalance/before", "imbalance/after", "seconds/balanced", "seconds/unbalanced"} <= {
        *events.Tags()["scalars"]
    }


def test_the_picture_of_the_loss_has_that_of_evaluation_where_metrics_have_one(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: saved.append(self))
    steps = [StepMetrics.from_json(json.dumps(step)) for step in metrics_in(runs / "plain")]
    draw_loss(tmp_path / "loss.png", steps)
    evaluated = [replace(step, eval_loss=5.0 if step.step != 1 else None) for step in steps]
    draw_loss(tmp_path / "loss.png", evaluated)
    plain, both = ([(list(line.get_xdata()), list(line.get_ydata())) for line in f.axes[0].lines] for f in saved)
    assert plain == [([0, 1, 2], _losses(runs / "plain"))]
    assert both == [*plain, ([0, 2], [5.0, 5.0])]
    assert [len(figure.legends[0].get_texts()) for figure in saved] == [1, 2]


def test_without_matplotlib_and_tensorboard_a_run_says_what_is_missing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    missing = ("matplotlib", "tensorboard")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    config = replace(SMALL, ranks=1, data=data, runs_dir=tmp_path)
    run_dir = create_run_dir(config)
    with one_rank():
        summary = train(config, run_dir)
    assert [path.name for path in run_dir.iterdir() if path.name in ("plan.png", "tensorboard")] == []
    assert "plan.png" not in (run_dir / "report.md").read_text().partition("Note")[0]
    assert "no plan.png and no loss.png: the package matplotlib is not installed" in describe(summary)
    assert "no TensorBoard events: the package tensorboard is not installed" in (run_dir / "report.md").read_text()
