"""`distca profile --cluster`: its pieces measure what they say, its file is a cluster, mistakes are one line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distca
from distca.apps.cli import main
from distca.apps.profile import contention, layers, links, sharding
from distca.apps.profile.cluster import tiny_llama
from distca.simulator.reading import read_cluster
from distca.simulator.setup import COLLECTIVES
from support.ranks import launch


def _measured(work: Any, heads: distca.Heads, models: list[Any], rounds: int, **_: Any) -> list[Any]:
    """What two ranks measure, but for what they do together: it needs other processes."""
    alone = {
        "gemms": layers.gemms(models, rounds),
        "parts": layers.parts(models, rounds),
        "layer_overhead": layers.layer_overhead(models[0], rounds),
        "recompute_overhead": layers.recompute_overhead(models[0], rounds),
        "attention": [{"q_rows": 1, "kv_rows": 1, "forward_ns": 2.0, "backward_ns": 4.0}],
    }
    together = {
        "contention": 1.25,
        "call_overhead": 1e-6,
        "puts": (1e9, 1e-6),
        "collectives": [{"what": "all_gather", "bytes": 8, "bandwidth": 1e6}],
    }
    return [(alone, together), ({}, {**together, "puts": (3e9, 3e-6), "call_overhead": 3e-6})]


def test_the_file_of_a_profile_is_a_cluster_with_the_mean_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(layers, "ROWS", (2,))
    monkeypatch.setattr(layers, "PART_ROWS", (2,))
    monkeypatch.setattr(layers, "WEIGHTS", (64,))
    monkeypatch.setattr(distca, "launch", _measured)
    out = tmp_path / "here.json"
    command = ["profile", "--cluster", "--ranks", "2", "--rounds", "1", "--hidden", "64", "--out", str(out)]
    assert main(command) == 0
    assert "2 ranks measured" in capsys.readouterr().out
    cluster = read_cluster(out)
    assert (cluster.ranks, cluster.inside.bandwidth, cluster.device.copy_bandwidth) == (2, 2e9, 2e9)
    assert cluster.device.call_overhead == pytest.approx(2e-6) and cluster.device.contention == 1.25
    # One pair of 8 heads of 64 takes 12 x 512 operations, here in 6 ns. No product of one thread is as fast.
    assert cluster.device.peak_tflops == pytest.approx(1.024)
    # Products of a Llama with one query head of 64, and every part.
    assert {(gemm.n, gemm.k) for gemm in cluster.device.gemms} == {(64, 64), (192, 64), (64, 192), (1024, 64)}
    assert {part.part for part in cluster.device.parts} == {
        "norm", "rotary", "activation", "residual", "sum", "loss", "embedding", "optimizer"
    }  # fmt: skip
    assert json.loads(out.read_text())["sources"]["command"].startswith("distca")


def test_pieces_run_forward_with_all_results_kept_and_then_backward() -> None:
    order = []

    def piece(number: int) -> layers.Piece:
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda _: order.append(f"b{number}"))

        def forward() -> tuple[torch.Tensor]:
            order.append(f"f{number}")
            return (2 * x,)

        return layers.Piece((x,), forward)

    forward, backward = layers.timed([piece(0), piece(1)], 1)
    assert order[2:] == ["f0", "f1", "b1", "b0"] * 2 and forward > 0 and backward > 0


def _links() -> tuple[tuple[float, float], list[dict[str, float]], float]:
    links.REDUCED, links.PRODUCT_ROWS = (64,), 8
    return links.puts(1), links.collectives(1), links.call_overhead(1)


def test_links_are_measured_between_processes() -> None:
    for (bandwidth, latency), rings, call in launch(_links, ranks=2):
        assert bandwidth > 0 and 0 < latency < 1 and 0 < call < 1
        assert {ring["what"] for ring in rings} == {what for what, instead in COLLECTIVES.items() if instead is None}
        assert all(ring["bytes"] == 32 and ring["bandwidth"] > 0 for ring in rings)


def _sharded() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What two ranks find, and what they find if layers take 1 s and 3 s, and sharded ones 9 s and 23 s."""
    models = [tiny_llama(64, distca.Heads(q=1, kv=1, dim=64), 8)]
    real = sharding.sharded_weights(models, 1)

    def seconds(layers: torch.nn.Module) -> tuple[float, float]:
        is_sharded = any("FSDP" in type(layer).__name__ for layer in layers.modules())
        return (9.0, 23.0) if is_sharded else (1.0, 3.0)

    sharding._Layers.seconds = seconds  # type: ignore[assignment]
    return real, sharding.sharded_weights(models, 2)


def test_weights_of_layers_are_gathered_in_forward_and_reduced_in_backward() -> None:
    pytest.importorskip("transformers")
    # A layer of hidden 64 has 4 products of 64 x 64, 3 of 64 x 192 and 2 norms. A rank sends half of their bytes.
    sent = 4 * (4 * 64 * 64 + 3 * 64 * 192 + 2 * 64) // 2
    for real, known in launch(_sharded, ranks=2):
        for rates in (real, known):
            assert [(rate["what"], rate["bytes"]) for rate in rates] == [("fsdp_gather", sent), ("fsdp_reduce", sent)]
        assert all(0 < rate["bandwidth"] <= sent / 1e-6 for rate in real)
        # Of four layers each takes 2 s more in forward, and in backward 5 s, of which it gathers for 2 s again.
        assert [sent / rate["bandwidth"] for rate in known] == pytest.approx([2, 3])


def _contention() -> list[float]:
    """On a clock by which rank r takes 1 + r seconds for all that it runs."""
    rank = dist.get_rank()
    clock = itertools.accumulate(itertools.cycle((1.0, 0.5, 0.5 + rank)))
    layers.time = SimpleNamespace(perf_counter=clock.__next__)  # type: ignore[assignment]
    contention.NUMBERS = 64 * 4
    runs: list[int] = []
    x = torch.ones(1, requires_grad=True)

    def forward() -> tuple[torch.Tensor]:
        runs.append(rank)
        return (2 * x,)

    pieces = [layers.Piece((x,), forward)]
    seconds = [contention._seconds(pieces, [(torch.ones(1),)], ranks) for ranks in ([0], [1], [0, 1])]
    models = [tiny_llama(64, distca.Heads(q=1, kv=1, dim=64), 8)]
    return [*seconds, contention.contention(models, 2), contention.contention(models, 1), len(runs)]


def test_contention_is_what_ranks_take_together_over_one_at_a_time() -> None:
    pytest.importorskip("transformers")
    for *found, runs in launch(_contention, ranks=2):
        # Together 1.5 s, and alone 1 or 2 s in turns. The first round does not count. Nothing is faster together.
        assert found == [1, 2, 1.5, 1.125, 1] and runs == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "2"], "--ranks needs --cluster"),
        (["--cluster", "--ranks", "1"], "--ranks is 1, must be at least 2"),
        (["--cluster", "--hidden", "wide"], "--hidden is wide, must be multiples of --head-dim"),
        (["--cluster", "--hidden", "100"], "--hidden is 100, must be multiples of --head-dim"),
        (["--cluster", "--dtype", "bf16"], "--dtype is bf16, must be fp32 with --cluster"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments, "--out", "nowhere.json"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_tiny_llama_has_the_proportions_of_the_trainer() -> None:
    from distca.apps.train.config import TrainConfig
    from distca.apps.train.model import model_config

    ours = tiny_llama(256, distca.Heads(q=8, kv=2, dim=64), 512)
    theirs = model_config(TrainConfig(ranks=2, hidden=256, heads=4, kv_heads=1), 512)[0]
    assert (ours.hidden, ours.intermediate, ours.head_dim) == (256, theirs.intermediate_size, theirs.head_dim)
    assert (ours.q_heads, ours.kv_heads) == (4, 1)
