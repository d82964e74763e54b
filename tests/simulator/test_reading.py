"""Files of clusters and models: presets are read, and every mistake is named in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import distca
from distca.simulator.device import Gemm
from distca.simulator.reading import read_cluster, read_model, read_parallelism
from distca.simulator.setup import Parallelism
from support.simulated import DEVICE, DOCUMENTS, MODEL, cluster

LINK = {"bandwidth": 1e9, "latency": 1e-6}
CONTENT: dict[str, Any] = {
    "ranks": 8,
    "ranks_per_node": 4,
    "inside": LINK,
    "between": LINK,
    "device": {
        "attention": "h200",
        "gemms": [{"m": 1, "n": 1, "k": 1, "tflops": 1.0}],
        "peak_tflops": 1.0,
        "memory_bandwidth": 1e9,
        "memory": 1e9,
    },
}


def _with(path: list[str], value: Any) -> dict[str, Any]:
    content = json.loads(json.dumps(CONTENT))
    inner = content
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return content


def test_presets_are_read_and_a_cluster_takes_another_number_of_ranks() -> None:
    assert read_cluster("h200-ib400", ranks=512).ranks == 512
    assert read_model("llama-34b").layers == 48
    # The number of weights that makes a Llama 3 8B.
    model = read_model("llama-8b")
    assert model.layers * model.layer_weights + 2 * model.head_weights == pytest.approx(8.03e9, rel=0.01)


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    pytest.importorskip("tomllib")
    (tmp_path / "p.toml").write_text("data = 2\ntensor = 4\nfsdp = true\n")
    (tmp_path / "p.json").write_text('{"data": 2, "tensor": 4, "fsdp": true}')
    wanted = Parallelism(data=2, tensor=4, fsdp=True)
    assert read_parallelism(tmp_path / "p.toml") == read_parallelism(tmp_path / "p.json") == wanted


LLAMA: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "rope_theta": 1.0,
}


def test_a_config_json_of_transformers_is_a_model(tmp_path: Path) -> None:
    config = LLAMA
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    model = read_model(path)
    assert (model.layers, model.kv_heads, model.head_dim) == (2, 4, 16)
    path.write_text(json.dumps(config | {"hidden_size": "wide"}))
    with pytest.raises(distca.InvalidArgumentError, match="hidden = 'wide'; a whole number"):
        read_model(path)
    path.write_text(json.dumps(config | {"hidden_size": 66}))
    with pytest.raises(distca.InvalidArgumentError, match="hidden_size = 66 is not a multiple of num_attention_heads"):
        read_model(path)
    path.write_text(json.dumps(config | {"layer_types": ["full_attention"] * 2, "sliding_window": 8}))
    assert read_model(path) == model, "no layer has the window"
    path.write_text(json.dumps(config | {"use_sliding_window": False, "sliding_window": 8}))
    assert read_model(path) == model


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"num_local_experts": 8}, "num_local_experts = 8; models with experts are not modelled"),
        ({"sliding_window": 8}, "sliding_window = 8; layers with windows are not modelled"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, r"layer_types = .*; layers with windows or chunks"),
        ({"per_layer_config": {"1": {"head_dim": 64}}}, "per_layer_config = .*; layers that differ in their heads"),
        ({"kv_lora_rank": 8}, "kv_lora_rank = 8; models with latent attention"),
        ({"mamba_d_state": 8}, "mamba_d_state = 8; layers without attention"),
    ],
)
def test_a_config_json_of_what_is_not_modelled_is_refused(
    content: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | content))
    with pytest.raises(distca.InvalidArgumentError, match=message):
        read_model(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_with(["rank"], 1), "cluster: unknown key 'rank'; allowed are ranks"),
        (_with(["between", "speed"], 1), "between: unknown key 'speed'; allowed are bandwidth"),
        (_with(["inside"], {"bandwidth": 1e9}), "inside: 'latency' is missing"),
        (_with(["inside", "bandwidth"], 0), "bandwidth = 0; a positive number"),
        (_with(["inside", "bandwidth"], "fast"), "bandwidth = 'fast'; a positive number"),
        (_with(["between", "latency"], -1), "latency = -1; seconds from 0 on"),
        (_with(["ranks"], 6), "6 ranks on nodes of 4"),
        (_with(["ranks"], True), "cluster.json: cluster: ranks = True; a whole number"),
        (_with(["device", "gemms"], []), "gemms = .*at least one"),
        (_with(["device", "gemms"], 5), "gemms = 5; a list"),
        (_with(["device", "attention"], "pairs"), "has no times"),
        (_with(["device", "attention"], "nowhere"), "nowhere is neither a file"),
        (_with(["device"], 3), "device: 3 is given; a table"),
        ([], "a table of keys is expected"),
    ],
)
def test_a_wrong_cluster_is_refused_with_one_line(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(content))
    with pytest.raises(distca.InvalidArgumentError, match=message) as raised:
        read_cluster(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("parallelism", "message"),
    [
        (Parallelism(data=3), "= 3; the cluster has 4 ranks"),
        (Parallelism(tensor=4, micro_batches=2), "documents of 4 ranks; data x context is 1"),
        (Parallelism(data=4), "documents of 2 micro-batches; the parallelism has 1"),
        (Parallelism(data=1, pipeline=4, chunks=2), "cannot share 4 layers equally"),
        (Parallelism(data=2, pipeline=2, fsdp=True), "fsdp with pipeline > 1 is not modelled"),
    ],
)
def test_an_impossible_parallelism_is_refused(parallelism: Parallelism, message: str) -> None:
    with pytest.raises(distca.InvalidArgumentError, match=message):
        distca.simulate(DOCUMENTS, cluster=cluster(4), model=MODEL, parallelism=parallelism)


def test_what_cannot_be_simulated_is_refused() -> None:
    shape = Parallelism(data=4, micro_batches=2)
    with pytest.raises(distca.InvalidArgumentError, match="there are no documents"):
        distca.simulate([[[], [], [], []]] * 2, cluster=cluster(4), model=MODEL, parallelism=shape)
    with pytest.raises(distca.InvalidArgumentError, match="length 0; 1 to 2"):
        distca.simulate([[[0], [1], [1], [1]]] * 2, cluster=cluster(4), model=MODEL, parallelism=shape)
    with pytest.raises(distca.InvalidArgumentError, match="a micro-batch is 100; for each micro-batch, for each rank"):
        distca.simulate([100, 200], cluster=cluster(4), model=MODEL, parallelism=shape)  # type: ignore[list-item]
    with pytest.raises(distca.InvalidArgumentError, match="strategy 'magic'; allowed are unbalanced"):
        distca.simulate(DOCUMENTS, cluster=cluster(4), model=MODEL, parallelism=shape, strategies=["magic"])
    with pytest.raises(distca.InvalidArgumentError, match="the device has 141 GB: use more tensor"):
        distca.simulate(
            [[[1000]]],
            cluster=read_cluster("h200-ib400", ranks=1),
            model=read_model("llama-34b"),
            parallelism=Parallelism(),
        )
    with pytest.raises(distca.InvalidArgumentError, match="tensor = 3 cannot share|tensor = 3; a divisor"):
        Parallelism(tensor=3).check(cluster(3, 3), MODEL)


def test_a_product_takes_the_rate_of_the_nearest_shape_between_the_rows_that_are_known() -> None:
    gemms = (Gemm(1024, 64, 64, 100.0), Gemm(4096, 64, 64, 300.0), Gemm(1024, 4096, 64, 50.0))
    device = type(DEVICE)("h200", gemms, 1000.0, 1e12, 1e12)
    for m, n, rate in ((512, 64, 100.0), (2048, 64, 200.0), (9999, 64, 300.0), (2048, 4000, 50.0)):
        assert device.product(m, n, 64).forward == pytest.approx(2 * m * n * 64 / (rate * 1e12))
