"""Reading a cluster, a model and a parallelism from presets and from small TOML or JSON files."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from distca.arguments import is_whole
from distca.errors import InvalidArgumentError
from distca.simulator.device import Device, Gemm, PartTime
from distca.simulator.setup import Cluster, Collective, LinkClass, Model, Parallelism

_T = TypeVar("_T")

#: Models of transformers whose rows see those after them unless their configuration says is_decoder.
_ENCODERS = (
    *("albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert"),
    *("electra", "ernie", "esm", "esmc", "eurobert", "fnet", "gte", "ibert", "jina_embeddings_v3", "layoutlm", "luke"),
    *("longformer", "megatron-bert", "mobilebert", "modernbert", "mpnet", "mra", "neomme", "nomic_bert"),
    *("nystromformer", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "squeezebert"),
    *("tapas", "ultrabert"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod", "yoso"),
)


def read_cluster(source: str | Path, ranks: int | None = None) -> Cluster:
    """Reads a cluster: a preset's name, or a file with a table for each of `Cluster`'s links and device.

    Args:
        source: ``"h200-ib400"``, or the path of a TOML or JSON file.
        ranks: replaces the file's number of ranks.

    Raises:
        InvalidArgumentError: there is no such file, or a key or value is wrong. The message names it.
    """
    return as_cluster(_read(source, "cluster"), str(source), ranks)


def as_cluster(given: Mapping[str, Any], source: str, ranks: int | None = None) -> Cluster:
    """A cluster from the content of a file, which messages call `source`. The rest is as in `read_cluster`."""
    content = dict(given)
    content.pop("sources", None)  # where the figures are from, for readers of the file
    if ranks is not None:
        content["ranks"] = ranks
    of_cluster = f"{source}: cluster"
    for name in ("inside", "between"):
        link = dict(_mapping(content.get(name), f"{source}: {name}"))
        if "collectives" in link:
            where = f"{source}: {name}: collectives"
            link["collectives"] = _all(Collective, link["collectives"], where, "bytes and bandwidth")
        content[name] = _made(LinkClass, link, f"{source}: {name}")
    device = dict(_mapping(content.get("device"), f"{source}: device"))
    device["gemms"] = _all(Gemm, device.get("gemms"), f"{source}: device: gemms", "m, n, k and tflops")
    if "parts" in device:
        device["parts"] = _all(PartTime, device["parts"], f"{source}: device: parts", "part, numbers and forward")
    content["device"] = _made(Device, device, f"{source}: device")
    return _made(Cluster, content, of_cluster)


def read_model(source: str | Path) -> Model:
    """Reads a model: ``"llama-8b"``, ``"llama-34b"``, or the path of a config.json of transformers.

    Raises:
        InvalidArgumentError: there is no such file, or it lacks what a model of Llama's kind has.
    """
    content = _read(source, "model")
    if "hidden_size" not in content:
        return _made(Model, content, f"{source}: model")
    names = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "intermediate": "intermediate_size",
        "vocabulary": "vocab_size",
        "q_heads": "num_attention_heads",
    }
    missing = [name for name in names.values() if name not in content]
    if missing:
        raise InvalidArgumentError(f"{source}: {', '.join(missing)} is missing; a config.json of a decoder is expected")
    if other := _not_modelled(content):
        raise InvalidArgumentError(f"{source}: {other} are not modelled")
    values = {ours: content[theirs] for ours, theirs in names.items()}
    values["kv_heads"] = content.get("num_key_value_heads") or values["q_heads"]
    head_dim, hidden, heads = content.get("head_dim"), values["hidden"], values["q_heads"]
    if not head_dim and is_whole(hidden, 1) and is_whole(heads, 1):
        if hidden % heads:
            raise InvalidArgumentError(
                f"{source}: hidden_size = {hidden} is not a multiple of num_attention_heads = {heads}, and there is no "
                "head_dim"
            )
        head_dim = hidden // heads
    values["head_dim"] = head_dim
    return _made(Model, values, f"{source}: model")


def _not_modelled(content: Mapping[str, Any]) -> str | None:
    """What a config.json has that no model of Llama's kind has: a key, its value, and in words."""

    def said(name: str, what: str) -> str:
        return f"{name} = {content[name]!r}; {what}"

    for name, value in content.items():
        if "expert" in name and value:
            return said(name, "models with experts")
        if name.startswith("mamba_") and value:
            return said(name, "layers without attention")
    for name in ("layer_types", "layers_block_type", "block_types", "attn_layer_indices"):
        if set(content.get(name) or ()) - {"full_attention", "attention"}:
            return said(name, "layers with windows or chunks, and layers without attention,")
    if content.get("sliding_window") and content.get("use_sliding_window", True) and not content.get("layer_types"):
        return said("sliding_window", "layers with windows")
    if content.get("is_causal") is False or content.get("use_bidirectional_attention") is True:
        name = "is_causal" if content.get("is_causal") is False else "use_bidirectional_attention"
        return said(name, "models whose rows see those after them")
    if content.get("model_type") in _ENCODERS and not content.get("is_decoder"):
        return said("model_type", "models whose rows see those after them")
    if content.get("true_hidden_size"):
        return said("true_hidden_size", "layers of several widths")
    for name in ("per_layer_config", "num_attention_heads_per_layer"):
        if content.get(name):
            return said(name, "layers that differ in their heads")
    return said("kv_lora_rank", "models with latent attention") if content.get("kv_lora_rank") else None


def read_parallelism(source: str | Path) -> Parallelism:
    """Reads the keys of `Parallelism` from a TOML or JSON file.

    Raises:
        InvalidArgumentError: there is no such file, or a key or value is wrong.
    """
    return _made(Parallelism, _read(source, "parallelism"), f"{source}: parallelism")


def _read(source: str | Path, kind: str) -> Mapping[str, Any]:
    presets = {
        entry.name.removesuffix(".json").removeprefix(f"{kind}-"): entry
        for entry in (files("distca.simulator") / "presets").iterdir()
        if entry.name.startswith(f"{kind}-")
    }
    preset = presets.get(str(source))
    try:
        text = Path(source).read_text() if preset is None else preset.read_text()
    except OSError as error:
        known = f" nor one of {', '.join(sorted(presets))}" if presets else ""
        raise InvalidArgumentError(f"{kind}: {source} is neither a file that can be read{known}") from error
    try:
        content = _toml(text) if str(source).endswith(".toml") else json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(f"{source}: cannot be read: {error}") from error
    return _mapping(content, str(source))


def _toml(text: str) -> Any:
    if sys.version_info < (3, 11):
        raise ValueError("TOML needs Python 3.11; write the same keys as JSON")
    import tomllib

    return tomllib.loads(text)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(f"{where}: {value!r} is given; a table of keys is expected")
    return value


def _all(kind: type[_T], content: Any, where: str, expected: str) -> tuple[_T, ...]:
    """Objects of a dataclass from a list of tables."""
    if not isinstance(content, list):
        raise InvalidArgumentError(f"{where} = {content!r}; a list of {expected} is expected")
    return tuple(_made(kind, one, where) for one in content)


def _made(kind: type[_T], content: Any, where: str) -> _T:
    """An object of a dataclass. Raises InvalidArgumentError if a key is unknown, missing, or has a wrong value."""
    content = _mapping(content, where)
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(content) - set(fields))
    if unknown:
        raise InvalidArgumentError(f"{where}: unknown key {unknown[0]!r}; allowed are {', '.join(fields)}")
    needed = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
    missing = [name for name in needed if name not in content]
    if missing:
        raise InvalidArgumentError(f"{where}: {missing[0]!r} is missing; needed are {', '.join(needed)}")
    try:
        return kind(**content)
    except InvalidArgumentError as error:
        said = str(error)
        outer, _, last = where.rpartition(": ")
        raise InvalidArgumentError(f"{outer if said.startswith(f'{last}: ') else where}: {said}") from error
